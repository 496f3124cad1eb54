"""Clipping by a global norm with updates in the backward: the bits of a plain optimizer, whatever the norm is."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy
from fsdp_offload.engine import speculation
from fsdp_offload.engine.speculation import OwnCounters, Speculation
from fsdp_offload.engine.step import Stepping
from fsdp_offload.engine.way_back import WayBack
from tests.clipping import (
    ALWAYS,
    NEVER,
    OPERATIONS,
    Operation,
    clipped,
    clipped_step,
    evaluated,
    speculation_of,
    within_bounds,
)
from tests.overlapping import SIZES, Loop, Net, adamw, same
from tests.policies import with_share


def policy_of(**more: Any) -> OffloadPolicy:
    return with_share(**{**SIZES, "overlap": "iteration", **more})


def train(loop: Loop, limits: list[float], **options: Any) -> Loop:
    for at, max_norm in enumerate(limits):
        clipped_step(loop, at, max_norm, **options)
    return loop


def pair(mesh: DeviceMesh, policy: OffloadPolicy, make: Any = adamw, **kwargs: Any) -> tuple[Loop, Loop]:
    return Loop(mesh, make, None, **kwargs), Loop(mesh, make, policy, **kwargs)


# Which steps stand, and which are taken back --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"norm_type": math.inf}, {"norm_type": 1.0}], ids=str)
def test_never_clipped(mesh: DeviceMesh, options: dict[str, Any]) -> None:
    plain, loop = pair(mesh, policy_of())
    for at in range(8):
        for each in (plain, loop):
            clipped_step(each, at, NEVER, **options)
        assert same(plain, loop)
    found = speculation_of(loop)
    assert (found.committed, found.taken_back) == (6, 0)


@pytest.mark.parametrize("options", [{}, {"foreach": False}], ids=str)
def test_clipped_once(mesh: DeviceMesh, options: dict[str, Any]) -> None:
    plain, loop = pair(mesh, policy_of())
    for at in range(12):
        for each in (plain, loop):
            clipped_step(each, at, ALWAYS if at == 7 else NEVER, **options)
        assert same(plain, loop), at
    found = speculation_of(loop)
    assert (found.committed, found.taken_back) == (9, 1)


def test_always_clipped(mesh: DeviceMesh) -> None:
    plain, loop = pair(mesh, policy_of())
    assert same(train(plain, [ALWAYS] * 8), train(loop, [ALWAYS] * 8))
    found = speculation_of(loop)
    assert (found.committed, found.taken_back) == (0, 0)
    assert loop.optimizer.offload_report().snapshot_bytes == 0  # type: ignore[attr-defined]


def test_updates_really_run_in_the_backward(mesh: DeviceMesh) -> None:
    """And the state that they have made is not that of the user yet."""
    loop = train(Loop(mesh, adamw, policy_of()), [NEVER] * 4)
    before = [state["step"].item() for state in loop.optimizer.state.values()]
    loop.backward(4)
    steps = vars(loop.optimizer)["_offload_engine"].engine.steps
    assert sorted(steps.begun.done) == sorted(step.bucket for step in steps.last)
    assert [state["step"].item() for state in loop.optimizer.state.values()] == before


@pytest.mark.parametrize("operation", dict.fromkeys(OPERATIONS), ids=lambda one: one.__name__)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_each_operation_alone(mesh: DeviceMesh, operation: Operation, micro_batches: int) -> None:
    loops = pair(mesh, policy_of(), net=partial(Net, width=16, layers=2), micro_batches=micro_batches)
    for at, one in enumerate([within_bounds] * 4 + [operation, within_bounds, operation, within_bounds]):
        for loop in loops:
            one(loop, at)
        assert same(*loops), (at, one.__name__)
    assert speculation_of(loops[1]).committed


FIELDS: dict[str, dict[str, Any]] = {
    "iteration": {},
    "resident": {"staying": 20_000},
    "half-resident": {"staying": 60_000},
    "serial": {"debug": "serial"},
    "guard": {"debug": "guard"},
    "snapshot": {"snapshot_bytes": 30_000},
    "host": {"host_fraction": 0.3},
    "auto": {"passing": "auto", "staying": "auto"},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_any_program(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    check_programs(mesh, fields, max_examples=4)  # more in tests/slow


def check_programs(mesh: DeviceMesh, fields: dict[str, Any], max_examples: int) -> None:
    @settings(max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        program=st.lists(st.sampled_from(OPERATIONS), min_size=4, max_size=12),
        slots=st.integers(3, 6),
        never_stops=st.booleans(),
        micro_batches=st.sampled_from([1, 1, 2]),
    )
    def check(program: list[Operation], slots: int, never_stops: bool, micro_batches: int) -> None:
        sizes = {} if "passing" in fields else {"passing": slots * SIZES["bucket_bytes"]}
        policy = policy_of(**fields, **sizes)
        kwargs = {"net": partial(Net, width=16, layers=2), "micro_batches": micro_batches}
        with pytest.MonkeyPatch.context() as patch:
            if never_stops:
                patch.setattr(speculation, "_STOPS_ABOVE", 1.0)
                patch.setattr(speculation, "_GOES_ON_BELOW", 1.0)
            loops = pair_with_reference(mesh, policy, **kwargs)
            for at, operation in enumerate([within_bounds, within_bounds, *program, within_bounds]):
                for loop in loops:
                    operation(loop, at)
                assert same(*loops), (at, [one.__name__ for one in program])

    check()


def pair_with_reference(mesh: DeviceMesh, policy: OffloadPolicy, **kwargs: Any) -> tuple[Loop, Loop]:
    """Beside a loop with ``policy`` one whose bits it must have: plain, or the host's share in ``step()``."""
    reference = None if not policy.host_fraction else with_share(policy, overlap="step")
    return Loop(mesh, adamw, reference, **kwargs), Loop(mesh, adamw, policy, **kwargs)


# The suite can fail ---------------------------------------------------------------------------------------------------


def commit_without_a_look(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Speculation, "problem_of", lambda *_: "")


def old_homes_are_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Speculation, "stores_elsewhere", lambda *_: [])


def one_bucket_of_parameters_is_not_taken_back(patch: pytest.MonkeyPatch) -> None:
    restore = WayBack.restore
    patch.setattr(WayBack, "restore", lambda self, numbers: restore(self, list(numbers)[1:]))


def counters_are_written_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnCounters, "get", lambda self, param: self._states.get(param))


def gradients_are_not_watched(patch: pytest.MonkeyPatch) -> None:
    def watch(self: Speculation, _: object) -> None:
        self.announced = True

    patch.setattr(Speculation, "watch", watch)


def what_was_put_off_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    restore = Speculation.restore

    def without(self: Speculation, step: Any) -> None:
        self._pending = []
        restore(self, step)

    patch.setattr(Speculation, "restore", without)


def a_forward_sees_new_parameters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stepping, "before_gather", lambda self, buckets, stream, in_backward: self.wait_for(buckets, stream))


def old_parameters_are_those_of_a_step_before(patch: pytest.MonkeyPatch) -> None:
    keep = WayBack.keep

    def only_once(self: WayBack, number: int) -> None:
        if number not in self._marks:
            keep(self, number)

    patch.setattr(WayBack, "keep", only_once)
    patch.setattr(WayBack, "begin", lambda self: None)


MUTANTS = [
    *(commit_without_a_look, old_homes_are_written, one_bucket_of_parameters_is_not_taken_back),
    *(counters_are_written_at_once, gradients_are_not_watched, what_was_put_off_is_forgotten),
    *(a_forward_sees_new_parameters, old_parameters_are_those_of_a_step_before),
]


@pytest.mark.parametrize("mutant", [None, *MUTANTS], ids=lambda one: getattr(one, "__name__", "none"))
def test_other_bits_with_a_mistake(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None] | None
) -> None:
    if mutant is not None:
        mutant(monkeypatch)
    loops = pair(mesh, policy_of(), net=partial(Net, width=16, layers=2))
    for at, operation in enumerate([within_bounds] * 8 + [clipped, within_bounds] + [within_bounds] * 6 + [evaluated]):
        for loop in loops:
            operation(loop, at)
    assert same(*loops) == (mutant is None)
