"""Checkpoint writers that stand still or fail where a test wants it, and files compared with copies of what was saved.

No test of asynchronous saves sleeps or hopes for a slow disk: :class:`HeldWriter` does not read a byte of what it was
given until it is let go, and training goes on until then.
"""

import copy
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp_offload.checkpoint.arena_stager import Loan
from fsdp_offload.state.shard import Reader
from tests.parity import leaves, same_value

TIMEOUT_S = 60  # whoever waits longer has met a deadlock


class HeldWriter(FileSystemWriter):
    """Stands still before it reads anything, until :meth:`let_go`.

    Attributes:
        arrived: set when it stands there.
        in_use: whether a save has begun that it writes.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=False)
        self.arrived = threading.Event()
        self.in_use = False
        self._go = threading.Event()

    def let_go(self) -> None:
        self._go.set()

    @property
    def is_held(self) -> bool:
        return not self._go.is_set()

    def write_data(self, *args: Any) -> Any:
        self.arrived.set()
        assert self._go.wait(TIMEOUT_S), "nobody has let the writer go"
        return super().write_data(*args)


class FailingWriter(HeldWriter):
    """Fails after it has written everything but the metadata."""

    def write_data(self, *args: Any) -> Any:
        super().write_data(*args)
        raise OSError("no space left on device")


class Reading(Reader):
    """Reads homes, in place of a writer, until somebody waits for it or says that it has finished.

    Attributes:
        reading: whether it still does.
        waited: how often somebody waited for it while it did.
    """

    def __init__(self) -> None:
        self.reading = True
        self.waited = 0

    def is_reading(self) -> bool:
        return self.reading

    def wait(self) -> None:
        self.waited += self.reading
        self.reading = False


class Waits:
    """Lets writers go when the library waits for them, and no sooner: what must not wait for them is seen not to.

    Attributes:
        count: how often somebody had to wait for a writer that was being held.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.writers: list[HeldWriter] = []
        wait = Loan.wait

        def let_go_and_wait(loan: Loan) -> None:
            if loan.is_reading():
                self.let_go()
            wait(loan)

        monkeypatch.setattr(Loan, "wait", let_go_and_wait)

    def hold(self, path: Path) -> HeldWriter:
        writer = HeldWriter(path)
        self.writers.append(writer)
        return writer

    def let_go(self) -> None:
        held = [writer for writer in self.writers if writer.in_use and writer.is_held]
        self.count += bool(held)
        for writer in held:
            writer.let_go()


def copied(values: Any) -> Any:
    """``values`` with copies of all tensors, and of what else may change."""
    if isinstance(values, Mapping):
        return {key: copied(value) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(copied(value) for value in values)
    return values.detach().clone() if isinstance(values, Tensor) else copy.deepcopy(values)


def emptied(values: Any) -> Any:
    """Something of the same structure to load into, in which nothing is right yet."""
    if isinstance(values, Mapping):
        return {key: emptied(value) for key, value in values.items()}
    if isinstance(values, list):
        return [emptied(value) for value in values]
    if not isinstance(values, Tensor):
        return None
    made = values.detach().clone()
    for leaf in leaves(made):
        leaf.fill_(77)
    return made


def loaded(path: Path, like: Any) -> Any:
    """What the checkpoint at ``path`` holds, in the structure of ``like``."""
    found = emptied(like)
    dcp.load(found, checkpoint_id=path)
    return found


def not_the_same(saved: Any, found: Any, where: str = "") -> Iterator[str]:
    """Where a value, nested or not, is not what was saved: types, keys, order or bits."""
    if isinstance(saved, Mapping) and isinstance(found, Mapping):
        if list(saved) != list(found):
            yield f"{where} has {list(found)} instead of {list(saved)}"
        for key in saved.keys() & found.keys():
            yield from not_the_same(saved[key], found[key], f"{where}/{key}")
    elif isinstance(saved, list) and isinstance(found, list) and len(saved) == len(found):
        for number, (one, other) in enumerate(zip(saved, found, strict=True)):
            yield from not_the_same(one, other, f"{where}/{number}")
    elif not same_value(saved, found):
        yield f"{where} differs"


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Everything in a checkpoint, in one process and without a model: whole tensors and other values, by key."""
    metadata = FileSystemReader(path).read_metadata()
    values: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in metadata.state_dict_metadata.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(values, checkpoint_id=path, no_dist=True)
    return values


def runs_within(seconds: float, action: Callable[[], object]) -> bool:
    """Whether ``action`` ends in time; in a thread of its own, which is left behind if it does not."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
