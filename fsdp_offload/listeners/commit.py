"""One commit: the homes that it reads, and a record of values that are small enough to be copied in each step."""

import pickle
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ..core.loop import Core
from ..state.shard import Reader, ShardHome

Record = dict[str, Any]
_Memory = tuple[bool, torch.dtype]
"""Key of tensors that are copied and written as one: whether they lie on the device, and their dtype."""


class AtHome:
    """Stands in a record for a state tensor that lies in its home."""


AT_HOME = AtHome()


@dataclass(frozen=True)
class _Small:
    """Stands in a record for a tensor without a home: its range in the tensor that joins all of one ``memory``."""

    memory: _Memory
    begin: int
    shape: torch.Size


@dataclass(eq=False)
class Commit(Reader):
    """One commit: it reads its homes until a later commit has been written.

    Attributes:
        number: number of its record.
        which: file (0 or 1) with the parameters that stay on the device.
        homes, seen: its homes; the versions that they and the parameters on the device had when it was made.
        before: number of the commit that all ranks have once the stores of this one have ended.
        give_up: deletes all commits.
        record: contents to write; emptied once they are written.
        written: ends when the record is written.
    """

    number: int
    which: int
    homes: list[ShardHome]
    seen: list[object]
    before: int
    give_up: Callable[[], None]
    record: Record = field(default_factory=dict)
    written: Future[None] = field(default_factory=Future)
    is_over: bool = False

    def is_reading(self) -> bool:
        """Return whether no later commit has been written."""
        return not self.is_over

    def wait(self) -> None:
        """Delete all commits: a load, or other code, is about to write the homes between two steps."""
        if not self.is_over:
            self.give_up()


def record_of(tree: Record, core: Core) -> Record:
    """Pickle ``tree`` with stand-ins for its tensors; copy the tensors to the host.

    Tensors on the device are copied in the lane of stores: the record is complete once these copies have run.
    """
    found, spec = tree_flatten(tree)
    device, store = core.cache.device, core.lanes.store
    alike: defaultdict[_Memory, list[Tensor]] = defaultdict(list)
    numels: defaultdict[_Memory, int] = defaultdict(int)
    known: dict[int, _Small] = {}
    for at, one in enumerate(found):
        if type(one) is not Tensor:  # a DTensor is pickled as it is
            continue
        if id(one) not in known:
            memory = (one.device.type == device.type, one.dtype)
            known[id(one)] = _Small(memory, numels[memory], one.shape)
            alike[memory].append(one.detach())
            numels[memory] += one.numel()
        found[at] = known[id(one)]
    homes: dict[_Memory, Tensor] = {}
    store.wait(core.lanes.compute.mark(), *core.updated.values())  # R3: updates write counters
    for memory, tensors in alike.items():
        is_on_device, dtype = memory
        pins = is_on_device and device.type != "cpu"
        homes[memory] = home = torch.empty(numels[memory], dtype=dtype, device="cpu", pin_memory=pins)

        def copy(home: Tensor = home, tensors: list[Tensor] = tensors) -> None:
            home.copy_(torch.cat([one.reshape(-1) for one in tensors]), non_blocking=True)

        if is_on_device:
            store.run(copy, reads=tensors, writes=[home])
        else:
            copy()
    with store.running() if any(isinstance(one, Tensor) for one in found) else nullcontext():
        pickled = pickle.dumps(tree_unflatten(found, spec))  # one object for torch.save, which is slow with many
    return {"tree": pickled, "small": homes}


def tree_of(record: Record, device: torch.device) -> Record:
    """Return the tree that :func:`record_of` was given, with new tensors where they were, on ``device`` or the host."""
    homes: dict[_Memory, Tensor] = record["small"]

    @cache  # one tensor again for places that shared one, such as the learning rate of two groups
    def tensor(one: _Small) -> Tensor:
        values = homes[one.memory][one.begin :][: one.shape.numel()].view(one.shape)
        return values.to(device if one.memory[0] else "cpu", copy=True)

    found: Record = tree_map_only(_Small, tensor, pickle.loads(record["tree"]))
    return found
