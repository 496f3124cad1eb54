"""Interrupts and faults at random lines of ours on two ranks: all of a step or nothing of it on each, or it says so.

A collective needs both ranks, so a rank that leaves an iteration alone leaves the other one in the next collective for
ever: with NCCL a watchdog ends that, here the other rank's next collective raises instead of being issued. Three
programs, drawn with their lines:

- both ranks are interrupted between the same two collectives, each at a line of its own;
- one rank is, and the next collective of the other one raises;
- one rank is, behind the last collective of the iteration, and the other one ends it.

Training goes on then: as plain training in which each rank has stepped or not, for these may differ; or, if one of them
says that its state is half updated, from what both load.

What cannot be shown: a rank that is interrupted inside a collective, and training that goes on behind an interrupt of
the forward or of the backward, which leaves ``fully_shard`` itself half way.
"""

import os
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy
from tests.core.test_interrupts import BEHIND, LOOPS, POLICIES, RUNS, WARM, Interrupted, left_by, values
from tests.distributed.launch import agree, mesh, spawn
from tests.overlapping import Loop, adamw
from tests.parity import same_value

pytestmark = pytest.mark.distributed

PROGRAMS = int(os.environ.get("INTERRUPTS", "24"))
_NAMES = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
COLLECTIVES = [*((dist, name) for name in _NAMES if hasattr(dist, name)), (functional, "all_reduce")]
"""By the names of torch 2.11 and of 2.13: those of ``fully_shard``, and of the norm."""

PROGRAM = os.environ.get("PROGRAM", "")


OUTCOMES = {"before", "said", "before, and on", "behind, and on", "said, loaded, and on", "behind, loaded, and on"}


class OtherRankIsGoneError(RuntimeError):
    """A collective that cannot end."""


class InterruptedBetween(Interrupted):
    """Raises ``kind`` at line ``at`` behind as many collectives; where it has not by the next one, that raises."""

    def __init__(self, collectives: int = -1, at: int | None = None, kind: type[BaseException] = KeyboardInterrupt):
        super().__init__(at, kind)
        self.collectives, self.issued = collectives, 0
        self.lines_behind: dict[int, int] = defaultdict(int)

    def is_here(self) -> bool:
        self.lines_behind[self.issued] += 1
        return self.issued == self.collectives and self.lines_behind[self.issued] == self.at

    def __enter__(self) -> "InterruptedBetween":
        self._patch = pytest.MonkeyPatch()
        for owner, name in COLLECTIVES:
            self._patch.setattr(owner, name, self._counted(getattr(owner, name)))
        super().__enter__()
        return self

    def _counted(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            if self.issued == self.collectives:
                raise OtherRankIsGoneError
            self.issued += 1
            return collective(*args, **options)

        return counted

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        self._patch.undo()
        return super().__exit__(kind, *rest) or kind is OtherRankIsGoneError


def run_programs(rank: int, world_size: int, first: int, count: int) -> None:
    device_mesh = mesh(world_size)
    known: dict[tuple[str, str], Known] = {}
    outcomes: dict[str, int] = defaultdict(int)
    for seed in range(first, first + count):
        rng = random.Random(seed)
        key = rng.choice(list(POLICIES)), rng.choice(list(LOOPS))
        if key not in known:
            known[key] = Known(device_mesh, *key)
        problems = []
        try:
            outcome = run_program(device_mesh, rank, rng, known[key])
            outcomes[outcome] += 1
        except AssertionError as error:
            problems = [f"program {seed}, {key}: {error}"]
        found = agree(problems)
        assert not found, found
    assert count < 100 or set(outcomes) >= OUTCOMES, outcomes


class Known:
    """What is the same in all programs of a loop under a policy."""

    def __init__(self, device_mesh: DeviceMesh, policy: str, name: str) -> None:
        self.iterate, self.plainly = LOOPS[name]
        self.policy = OffloadPolicy(bucket_bytes=8192, device_bytes=12 * 8192, **POLICIES[policy])
        plain = Loop(device_mesh, adamw, None).train(WARM, self.plainly)
        before = values(plain)
        self.sides = [before, values(plain.train(1, self.plainly, WARM))]
        with InterruptedBetween() as counting:
            loop = Loop(device_mesh, adamw, self.policy).train(WARM, self.iterate)
            loop.copy()
            counting.issued = 0
            counting.lines_behind.clear()
            self.iterate(loop, WARM)
        assert same_value(values(loop), self.sides[1])
        self.lines = dict(counting.lines_behind)
        self.collectives = counting.issued


def run_program(device_mesh: DeviceMesh, rank: int, rng: random.Random, known: Known) -> str:
    """Interrupt one iteration, and go on if both ranks can."""
    last = known.collectives
    how = rng.choice(["both", "one", "alone"])
    behind = last if how == "alone" else rng.choice([last, rng.randrange(last + 1)])
    kind, whose = rng.choice([KeyboardInterrupt, LookupError]), rng.randrange(2)
    ats = [rng.random(), rng.random()]
    at = 1 + int(ats[rank] * known.lines.get(behind, 1)) if how == "both" or rank == whose else None
    if how == "alone" and at is None:
        behind = -1  # goes on
    loop = Loop(device_mesh, adamw, known.policy).train(WARM, known.iterate)
    saved = loop.copy()
    interrupted = InterruptedBetween(behind, at, kind)
    try:
        outcome, problem = left_by(loop, known.iterate, interrupted, known.sides), ""
    except Exception as error:  # noqa: BLE001  # for both ranks
        outcome, problem = "", f"{error}"
    where = f"{how}, {interrupted.where or 'not interrupted'}"
    found: list[Any] = [None, None]
    dist.all_gather_object(found, (problem and f"{where}: {problem}", outcome, RUNS["backward"]))
    assert not any(problem for problem, *_ in found), found
    if any(in_backward for *_, in_backward in found):
        return outcome
    plain = Loop(device_mesh, adamw, None).train(WARM, known.plainly)
    if says_so := any(other == "said" for _, other, _ in found):
        loop.restore(saved)
    elif outcome == "before":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plain.optimizer, "step", lambda: None)
            known.plainly(plain, WARM)
    else:
        known.plainly(plain, WARM)
    loop.train(BEHIND, known.iterate, WARM + 1)
    plain.train(BEHIND, known.plainly, WARM + 1)
    assert same_value(values(loop), values(plain)), f"{where}: other bits later"
    return f"{outcome}, {'loaded, ' if says_so else ''}and on"


def test_an_interrupt_on_two_ranks_leaves_all_of_a_step_or_nothing_on_each(tmp_path: Path) -> None:
    spawn(run_programs, 2, tmp_path, *((int(PROGRAM), 1) if PROGRAM else (0, PROGRAMS)))
