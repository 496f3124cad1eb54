"""Translate one framework's names and fused weights to another's, by the steps of its data files in turn.

What a step gives lies in a folder beside the destination until the next one is done.
"""

import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import torch

from ..core.errors import CheckpointError
from ..exchange.config_values import COMMON_FILE, FORMAT_FILE, with_told
from ..exchange.request import Request, complete
from ..stored.reading import Checkpoint
from ..write import rewrite
from ..write.rewrite_plan import Rewrite, plan_rewrite
from ..write.save import held
from .families import Fuse, Rename, Step, steps, value_names
from .renaming import rename_exchange


class Translation(NamedTuple):
    """Request to translate between two frameworks."""

    family: str
    source: str
    target: str
    values: Mapping[str, float]
    excluded: Sequence[str]


Progress = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]
"""Called with a step's name and size in bytes; gives a context whose function is told of bytes that are done."""


@contextlib.contextmanager
def _unseen(what: str, nbytes: int) -> Iterator[Callable[[int], object]]:
    del what, nbytes
    yield lambda done: None


def translate(
    source: str,
    destination: str,
    asked: Translation,
    *,
    threads: int,
    max_memory_bytes: int,
    progress: Progress = _unseen,
) -> tuple[int, list[str]]:
    """Write it; how many keys there are then, and what there is to be said.

    Raises:
        CheckpointError: a key or a value is not known, the source cannot be read, or the destination not be written.
    """
    rewrite.check_destination(source, destination)
    to = source
    checkpoint, sidecars = rewrite.open_whole(source, threads)
    values, notes = with_told(checkpoint, value_names(asked.family), asked.values)
    notes += rewrite.notes_on(checkpoint, sidecars)
    work = steps(asked.family, asked.source, asked.target, values)
    _check_values(work, values)
    first_rename = next(number for number, step in enumerate(work) if isinstance(step, Rename))
    planned: Rewrite | None = None
    with _room_for(destination) as room:
        for number, step in enumerate(work):
            if number:
                checkpoint, sidecars = rewrite.open_whole(to, threads)
            before, to = room / f"{number - 1}", destination if number + 1 == len(work) else f"{room}/{number}"
            planned = _plan(checkpoint, step, values, asked.excluded if number <= first_rename else ())
            is_megatron = to == destination and asked.target == "megatron"
            with progress(f"rename, {number + 1} of {len(work)}", planned.nbytes) as advance:
                rewrite.write(
                    checkpoint,
                    planned,
                    to,
                    threads=threads,
                    max_memory_bytes=max_memory_bytes,
                    advance=advance,
                    sidecars=sidecars.files,
                    beside=_format_files(sidecars.files) if is_megatron else None,
                )
            shutil.rmtree(before, ignore_errors=True)
    assert planned is not None
    return len(planned.tensors) + len(planned.objects), notes


def _check_values(work: Sequence[Step], values: Mapping[str, float]) -> None:
    """Refuse before the first step what a later one would: a rule without its values.

    Optional rules may match nothing, and then need none.
    """
    rules = [rule for step in work if isinstance(step, Fuse) for rule in step.rules if not rule.optional]
    missing = sorted({name for rule in rules for name in rule.value_names} - values.keys())
    if missing:
        options = " ".join(f"--value {name}=NUMBER" for name in missing)
        raise CheckpointError(f"the config of the model is needed for weights that are fused; give {options}")


def _plan(checkpoint: Checkpoint, step: Step, values: Mapping[str, float], excluded: Sequence[str]) -> Rewrite:
    if isinstance(step, Rename):
        return plan_rewrite(checkpoint, rename_exchange(checkpoint, step, excluded))
    known = {name: value for name, value in values.items() if any(name in rule.value_names for rule in step.rules)}
    request = Request(step.rules, known, excluded, is_sure=True)
    return rewrite.plan(checkpoint, step.way, complete(checkpoint, step.way, request))


def _format_files(there: Sequence[str]) -> dict[str, bytes]:
    """Make the files that Megatron-Core expects beside ``torch_dist``: an empty common state, the format."""
    buffer = io.BytesIO()
    torch.save({}, buffer)
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    versions = {f"{name}_version": 1 for name in backends}
    made = {COMMON_FILE: buffer.getvalue(), FORMAT_FILE: json.dumps(backends | versions).encode()}
    return {name: content for name, content in made.items() if name not in there}


@contextlib.contextmanager
def _room_for(destination: str) -> Iterator[Path]:
    """Give a folder for what is between the steps, on the destination's disk if that is local."""
    if "://" in destination:
        with tempfile.TemporaryDirectory(prefix="checkpoint-tools-") as folder:
            yield Path(folder)
        return
    with held(Path(f"{destination}.steps")) as mark:
        try:
            yield mark.parent
        finally:
            shutil.rmtree(mark.parent)
