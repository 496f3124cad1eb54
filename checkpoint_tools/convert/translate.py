"""Translate one framework's names and fused weights to another's, by the steps of its data files in turn.

What a step gives lies in a folder beside the destination until the next one is done, and each step goes on after a kill
as split and merge do.
"""

import contextlib
import hashlib
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
from ..write.partial import locked_folder, partial_of, steps_beside
from ..write.rewrite_plan import Rewrite, plan_rewrite
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
    restart: bool = False,
) -> tuple[int, list[str]]:
    """Write it; how many keys there are then, and what there is to be said.

    Raises:
        CheckpointError: a key or a value is not known, the source cannot be read, or the destination not be written.
        KeyboardInterrupt: as it came. What was written so far is there to go on with.
    """
    rewrite.check_destination(source, destination)
    checkpoint, sidecars = rewrite.open_whole(source, threads)
    values, notes = with_told(checkpoint, value_names(asked.family), asked.values)
    notes += rewrite.notes_on(checkpoint, sidecars)
    work = steps(asked.family, asked.source, asked.target, values)
    _check_values(work, values)
    first_rename = next(number for number, step in enumerate(work) if isinstance(step, Rename))
    request = repr((asked, sorted(values.items()), work))
    identity = hashlib.sha256(f"{request} {rewrite.stamps_of(checkpoint)}".encode()).hexdigest()[:16]
    planned: Rewrite | None = None
    with _room_for(destination, identity, restart=restart) as room:
        others = [] if "://" in destination else [each for each in steps_beside(Path(destination)) if each != room]
        notes += [f"{each} is left from another rename; remove it if nobody goes on with that" for each in others]
        made = [number for number in range(len(work) - 1) if (room / f"{number}").is_dir()]
        at, begin = (f"{room}/{made[-1]}", made[-1] + 1) if made else (source, 0)
        for number, step in list(enumerate(work))[begin:]:
            to = destination if number + 1 == len(work) else f"{room}/{number}"
            if number:
                checkpoint, sidecars = rewrite.open_whole(at, threads)
            planned = _plan(checkpoint, step, values, asked.excluded if number <= first_rename else ())
            with progress(f"rename, {number + 1} of {len(work)}", planned.nbytes) as advance:
                rewrite.write(
                    checkpoint,
                    planned,
                    to,
                    {"step": number, "files": rewrite.stamps_of(checkpoint), "asked": request},
                    threads=threads,
                    max_memory_bytes=max_memory_bytes,
                    restart=restart,
                    advance=advance,
                    sidecars=sidecars.files,
                    record=_format_files(sidecars.files) if to == destination and asked.target == "megatron" else None,
                )
            if number:
                shutil.rmtree(at)
            at = to
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
def _room_for(destination: str, identity: str, *, restart: bool) -> Iterator[Path]:
    """Hold a folder for what is between the steps, on the destination's disk if that is local.

    There, it has the identity of what is asked for in its name, and stays for somebody who can go on with it.
    """
    if "://" in destination:
        with tempfile.TemporaryDirectory(prefix="checkpoint-tools-") as folder:
            yield Path(folder)
        return
    room = Path(f"{destination}.steps-{identity}")
    with locked_folder(room):
        if restart:
            for each in room.iterdir():
                if each.is_dir():
                    shutil.rmtree(each)
        try:
            yield room
        except Exception:
            if not any(each.exists() for each in (*room.glob("*.partial"), partial_of(Path(destination)))):
                shutil.rmtree(room)
            raise
        shutil.rmtree(room)
