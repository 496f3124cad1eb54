"""Asynchronous saves by several ranks, of which one fails. Staging alone is in ``test_no_collectives.py``.

The planner's collectives run in the writing threads, so they have a process group of their own, as in ``examples/``.
That every rank's part of every file is the state of the call is the axis ``save`` of the conformance suite, and
``tests/core/test_saves.py`` where writers are held.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fsdp_offload import OffloadPolicy
from fsdp_offload.checkpoint import ArenaStager, get_optimizer_state_dict
from tests.async_writers import FailingWriter, HeldWriter, copied, loaded, not_the_same
from tests.distributed import models
from tests.distributed.launch import spawn_cases
from tests.distributed.test_sharded_checkpoints import TINY, adamw, compared, new_run, train
from tests.parity import Run
from tests.tiers import world_sizes

pytestmark = pytest.mark.distributed

SPARE = replace(TINY, snapshot_bytes=1 << 30)


def state_of(run: Run, step: int) -> dict[str, Any]:
    optimizer = get_optimizer_state_dict(run.model, run.optimizer)
    return {"model": get_model_state_dict(run.model), "optimizer": optimizer, "step": step}


def fails_on_one_rank(folder: Path, policy: OffloadPolicy) -> Iterator[str]:
    """All ranks are told, none of them waits for ever, and the next save is complete."""
    plain, run = (new_run(models.shard_even, adamw, chosen) for chosen in (None, policy))
    group = dist.new_group(backend="gloo")
    stager, kept = ArenaStager(run.optimizer), []
    for step in range(3):
        kind = FailingWriter if dist.get_rank() == dist.get_world_size() - 1 else HeldWriter
        writer = kind(folder / f"bad{step}")
        future = dcp.async_save(state_of(run, step), storage_writer=writer, async_stager=stager, process_group=group)
        writer.let_go()
        for side in (plain, run):
            train(side, step, step + 1)
        kept.append(future)
        if "no space left on device" not in str(future.exception()):
            yield f"save {step} ended with {future.exception()!r}"
    yield from compared(plain, run, "after saves that failed")
    state = copied(state_of(run, 4))
    dcp.async_save(state_of(run, 4), checkpoint_id=folder / "good", async_stager=stager, process_group=group).result()
    yield from not_the_same(state, loaded(folder / "good", state))
    if list(folder.glob("bad*/.metadata")):
        yield "a checkpoint that failed looks complete"


@world_sizes(3, 2)
def test_a_writer_that_fails_on_one_rank(world_size: int, tmp_path: Path) -> None:
    cases = {name: partial(fails_on_one_rank, tmp_path / name, one) for name, one in (("all", SPARE), ("none", TINY))}
    spawn_cases(cases, world_size, tmp_path)
