"""Clipping by a global norm with updates in the backward: the bits of a plain optimizer, whatever the norm is."""

import contextlib
import copy
import math
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_offload import OffloadPolicy
from fsdp_offload.checkpoint import ArenaStager, get_optimizer_state_dict
from fsdp_offload.engine import speculation
from fsdp_offload.engine import step as stepping
from fsdp_offload.engine.executor import Pipeline
from fsdp_offload.engine.speculation import OwnCounters, Speculation
from fsdp_offload.engine.step import Stepping
from fsdp_offload.engine.way_back import WayBack
from fsdp_offload.torch_compat.dtensor import local_shard
from tests.async_writers import Reading
from tests.clipping import (
    ALWAYS,
    LOOKS,
    NEVER,
    OPERATIONS,
    Operation,
    clip,
    clipped,
    clipped_step,
    evaluated,
    parameters_looked_at,
    speculation_of,
    within_bounds,
)
from tests.overlapping import SIZES, Loop, Net, adamw, look, same
from tests.parity import leaves
from tests.policies import with_share
from tests.tiers import spread


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


def test_clipped_once(mesh: DeviceMesh) -> None:
    plain, loop = pair(mesh, policy_of())
    for at in range(12):
        for each in (plain, loop):
            clipped_step(each, at, ALWAYS if at == 7 else NEVER)
        assert same(plain, loop), at
    found = speculation_of(loop)
    assert (found.committed, found.taken_back) == (9, 1)


def test_always_clipped(mesh: DeviceMesh) -> None:
    plain, loop = pair(mesh, policy_of())
    assert same(train(plain, [ALWAYS] * 8), train(loop, [ALWAYS] * 8))
    found = speculation_of(loop)
    assert (found.committed, found.taken_back) == (0, 0)
    assert loop.optimizer.offload_report().memory.spare_home_bytes == 0  # type: ignore[attr-defined]


def test_updates_really_run_in_the_backward(mesh: DeviceMesh) -> None:
    """And the state that they have made is not that of the user yet."""
    loop = train(Loop(mesh, adamw, policy_of()), [NEVER] * 4)
    before = [state["step"].item() for state in loop.optimizer.state.values()]
    loop.backward(4)
    steps = vars(loop.optimizer)["_offload_engine"].engine.steps
    assert sorted(steps.begun.done) == sorted(step.bucket for step in steps.last)
    assert [state["step"].item() for state in loop.optimizer.state.values()] == before


@spread(operation={one.__name__: one for one in OPERATIONS}, micro_batches={"1": 1, "2": 2})
def test_each_operation_alone(mesh: DeviceMesh, operation: Operation, micro_batches: int) -> None:
    loops = pair(mesh, policy_of(), net=partial(Net, width=16, layers=2), micro_batches=micro_batches)
    for at, one in enumerate([within_bounds] * 4 + [operation, within_bounds, operation, within_bounds]):
        for loop in loops:
            one(loop, at)
        assert same(*loops), (at, one.__name__)
    assert speculation_of(loops[1]).committed


# Several optimizers, writers, faults ----------------------------------------------------------------------------------


small_net = partial(Net, width=16, layers=2)


def test_a_scaler_whose_scale_the_step_is_given(mesh: DeviceMesh) -> None:
    """As fused optimizers are: whether there is a step is decided in it."""

    def fused(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.02, fused=True)

    plain, loop = pair(mesh, policy_of(), fused, net=small_net)
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    for at in range(8):
        for each, scaler in zip((plain, loop), scalers, strict=True):
            scaler.scale(each.model(each.batch(at)) * (math.inf if at == 5 else 1.0)).backward()
            scaler.step(each.optimizer)
            scaler.update()
            each.optimizer.zero_grad()
        assert same(plain, loop), at


def test_what_has_no_way_back_waits_for_the_step(mesh: DeviceMesh) -> None:
    """Whole parameters, which an optimizer sees as DTensors."""

    def muon(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.02, ns_steps=1)

    loops = pair(mesh, policy_of(), muon, net=small_net)
    assert same(*(train(loop, [NEVER, NEVER, ALWAYS, NEVER] * 2) for loop in loops))
    assert speculation_of(loops[1]).committed == 0
    assert "updates wait for step(), as this optimizer does not work element by element" in str(
        loops[1].optimizer.offload_report()  # type: ignore[attr-defined]
    )


@pytest.mark.parametrize("is_told", [False, True])
def test_what_an_optimizer_does_with_gradients_is_not_the_loop(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """One that sees the user's own tensors is at work while they are watched."""

    def muon(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.02, ns_steps=1)

    if is_told:
        monkeypatch.setattr(stepping, "bare", lambda grads: contextlib.nullcontext())
    loop = Loop(mesh, muon, policy_of(passing=2 * SIZES["bucket_bytes"]), net=small_net).train(4)
    assert speculation_of(loop).announced == is_told


def test_host_memory_is_counted_and_asked_for(mesh: DeviceMesh) -> None:
    state_bytes = Loop(mesh, adamw, policy_of()).optimizer.offload_report().memory.host_bytes  # type: ignore[attr-defined]
    for limit_bytes, speculates in ((2 * state_bytes, False), (3 * state_bytes, True)):
        plain, loop = pair(mesh, policy_of(host_limit_bytes=limit_bytes))
        assert same(train(plain, [NEVER] * 6), train(loop, [NEVER] * 6))
        report = loop.optimizer.offload_report()  # type: ignore[attr-defined]
        assert report.memory.host_bytes <= limit_bytes
        assert (report.memory.spare_home_bytes == state_bytes) == speculates == bool(speculation_of(loop).committed)
        param_bytes = sum(param.to_local().nbytes for param in loop.model.parameters())
        if speculates:
            assert (
                0 <= report.memory.host_bytes - 2 * state_bytes - param_bytes < 64 * report.kept.buckets * 4
            )  # padding
        else:
            assert "to take a step back needs" in str(report)


def test_spare_homes_are_shared_with_snapshots(mesh: DeviceMesh) -> None:
    spare: list[int] = []
    for snapshot_bytes in (0, 30_000, 1 << 30):
        loop = train(Loop(mesh, adamw, policy_of(snapshot_bytes=snapshot_bytes)), [NEVER] * 5)
        assert speculation_of(loop).committed == 3
        spare.append(loop.optimizer.offload_report().memory.spare_home_bytes)  # type: ignore[attr-defined]
    assert spare[0] == spare[2]
    assert spare[0] <= spare[1] <= spare[0] + 4 * 4096  # a page that both have


def test_asynchronous_saves(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Also one that is begun between the backward and the step: it has what there was before."""
    plain, loop = pair(mesh, policy_of(snapshot_bytes=30_000))
    stager = ArenaStager(loop.optimizer)
    futures = []
    for at in range(12):
        for each in (plain, loop):
            each.backward(at)
            clip(each, ALWAYS if at == 8 else NEVER)
        if at in (4, 5, 8, 10):
            state = {"optimizer": get_optimizer_state_dict(loop.model, loop.optimizer)}
            futures.append(dcp.async_save(state, checkpoint_id=tmp_path / str(at), async_stager=stager))
            wanted = {name: copy.deepcopy(value) for name, value in plain.optimizer.state_dict()["state"].items()}
        for each in (plain, loop):
            each.step()
        assert same(plain, loop), at
    for future in futures:
        future.result()
    stager.close()
    loaded = Loop(mesh, adamw, policy_of()).train(1)
    state = {"optimizer": get_optimizer_state_dict(loaded.model, loaded.optimizer)}
    dcp.load(state, checkpoint_id=tmp_path / "10")
    found = loaded.optimizer.state_dict()["state"]
    for number, one in wanted.items():
        assert all(torch.equal(leaves(one[name])[0], leaves(found[number][name])[0]) for name in one), number


def test_a_home_that_is_read_is_not_written(mesh: DeviceMesh) -> None:
    """The old home of a step that stands is the spare one of the next, which waits for ``step()`` if it is read."""
    plain, loop = pair(mesh, policy_of())
    train(plain, [NEVER] * 5)
    train(loop, [NEVER] * 5)
    engine = vars(loop.optimizer)["_offload_engine"].engine
    shards = list(engine.plan.shards.values())
    engine.wait_all_home()
    read = [
        (shard, shard.home, {name: [leaf.clone() for leaf in v] for name, v in shard.home.leaves.items()})
        for shard in shards
    ]
    reader = Reading()
    engine.lending.lend(reader, [shard.home for shard in shards])
    committed = [speculation_of(loop).committed]
    for at in range(5, 8):
        for each in (plain, loop):
            clipped_step(each, at, NEVER)
        committed.append(speculation_of(loop).committed)
        if reader.reading:
            for _, home, before in read:
                assert all(
                    torch.equal(leaf, old)
                    for name in before
                    for leaf, old in zip(home.leaves[name], before[name], strict=True)
                )
        if at == 5:
            assert reader.reading
    assert same(plain, loop)
    assert committed[1] == committed[0] + 1  # into the spare homes, which nobody reads


class FinishingSoon(Reading):
    """Is done when it has been asked so many times."""

    def __init__(self, asked: int) -> None:
        super().__init__()
        self.left = asked

    def is_reading(self) -> bool:
        self.left -= 1
        self.reading = self.reading and self.left > 0
        return self.reading


@pytest.mark.parametrize("asked", [1, 60, 200, 300, 500, 1000])
def test_a_writer_that_finishes_in_a_backward(mesh: DeviceMesh, asked: int) -> None:
    """Where state is stored has been decided by then: what would go into its old home waits for ``step()``."""
    plain, loop = pair(mesh, policy_of())
    train(plain, [NEVER] * 5)
    train(loop, [NEVER] * 5)
    engine = vars(loop.optimizer)["_offload_engine"].engine
    engine.wait_all_home()
    spare = [shard.places[1 - shard.side] for shard in engine.plan.shards.values()]
    engine.lending.lend(FinishingSoon(asked), spare[1::2])
    for at in range(5, 8):
        for each in (plain, loop):
            clipped_step(each, at, ALWAYS if at == 5 else NEVER)
        assert same(plain, loop), at


def test_state_that_comes_to_stay_between_two_steps(mesh: DeviceMesh) -> None:
    """As what "auto" measures may want it: it has no second home then."""
    plain, loop = pair(mesh, policy_of())
    train(plain, [NEVER] * 5)
    train(loop, [NEVER] * 5)
    engine = vars(loop.optimizer)["_offload_engine"].engine
    kept = engine.steps.buckets_of(loop.model.blocks[1].parameters())
    engine.keep_on_device(kept, loop.optimizer.state.unwaited)
    committed = speculation_of(loop).committed
    for at in range(5, 10):
        for each in (plain, loop):
            clipped_step(each, at, ALWAYS if at == 8 else NEVER)
        assert same(plain, loop), at
    assert speculation_of(loop).committed > committed
    assert speculation_of(loop).taken_back == 1


@pytest.mark.parametrize("nth", [1, 4])
def test_an_update_that_fails_in_the_backward(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """Parameters, state and counters are those from before it; fully_shard itself does not go on after that."""
    plain, loop = pair(mesh, policy_of())
    train(plain, [NEVER] * 5)
    train(loop, [NEVER] * 5)
    update, calls = stepping.update_bucket, []

    def failing(*args: Any) -> None:
        update(*args)
        calls.append(0)
        if len(calls) == nth:
            raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(stepping, "update_bucket", failing)
        with pytest.raises(ZeroDivisionError):
            loop.backward(5)
    assert len(calls) == nth
    for each in (plain, loop):
        each.seen = []
        for module in each.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    assert same(plain, loop)
    loop.optimizer.state_dict()


@pytest.mark.parametrize("look_at", LOOKS)
def test_clipped_gradients_are_seen_clipped(mesh: DeviceMesh, look_at: Callable[[Any], torch.Tensor]) -> None:
    """The product is put off no longer than until somebody looks, in whatever way."""
    found = []
    for loop in pair(mesh, policy_of(), net=small_net):
        train(loop, [NEVER] * 4)
        loop.backward(4)
        clip(loop, ALWAYS)
        found.append([look_at(param.grad).clone() for param in loop.model.parameters()])
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


def test_a_view_of_gradients_that_are_zeroed_in_place(mesh: DeviceMesh) -> None:
    """It is kept, and written in a later step: what counts no version could not be seen then."""
    plain, loop = pair(mesh, policy_of())
    views: dict[Loop, list[torch.Tensor]] = {}
    for at in range(8):
        for each in (plain, loop):
            each.optimizer.zero_grad(set_to_none=False)
            each.backward(at)
            if at == 4:
                views[each] = [param.grad.to_local().data for param in each.model.parameters()]
            if at > 4:
                torch._foreach_mul_(views[each], 0.3)
            clip(each, NEVER)
            each.optimizer.step()
        assert same(plain, loop), at
    found = speculation_of(loop)
    assert (found.committed, found.taken_back) == (2, 1)


def test_parameters_and_gradients_have_their_class_back(mesh: DeviceMesh) -> None:
    """Whether the step stood or was taken back."""
    loop = train(Loop(mesh, adamw, policy_of()), [NEVER] * 4)
    for at, max_norm in enumerate([NEVER, ALWAYS, NEVER], start=4):
        loop.backward(at)
        grads = [param.grad for param in loop.model.parameters()]
        clip(loop, max_norm)
        loop.optimizer.step()
        assert {type(tensor) for tensor in (*grads, *loop.model.parameters())} == {DTensor}
        loop.optimizer.zero_grad()
    loop.backward(7)
    assert DTensor not in {type(param) for param in loop.model.parameters()}
    loop.model.head.weight.norm()
    assert {type(param) for param in loop.model.parameters()} == {DTensor}
    assert (speculation_of(loop).committed, speculation_of(loop).taken_back) == (4, 2)


def test_micro_batches_alone_are_no_touch(mesh: DeviceMesh) -> None:
    """``fully_shard`` itself adds to gradients, past torch's functions on DTensors."""
    loop = Loop(mesh, adamw, policy_of(), net=small_net, micro_batches=3).train(4)
    assert not speculation_of(loop).announced


def parameters_go_down(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each copy that is issued from now on, the bytes."""
    keep_aside, found = Pipeline.keep_aside, []

    def counted(self: Pipeline, copies: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(sum(param.numel() for _, param in copies))
        return keep_aside(self, copies, *args, **kwargs)

    monkeypatch.setattr(Pipeline, "keep_aside", counted)
    return found


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_parameters_go_down_in_the_last_forward(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, micro_batches: int
) -> None:
    """Once each, before the backward needs the link for state; not in an evaluation, whose weights may be others."""
    loop = Loop(mesh, adamw, policy_of(), micro_batches=micro_batches)
    train(loop, [NEVER] * 5)
    found = parameters_go_down(loop, monkeypatch)
    for _ in range(micro_batches - 1):
        assert not found
        loop.model(loop.batch(5)).backward()  # at its end the first loads begin
    loss = loop.model(loop.batch(6))
    all_bytes = sum(param.to_local().nbytes for param in loop.optimizer.param_groups[0]["params"])
    assert sum(found) == all_bytes
    loss.backward()
    clip(loop, NEVER)
    loop.step()
    look(loop)
    assert sum(found) == all_bytes


def test_weights_written_after_the_forward_come_back(mesh: DeviceMesh) -> None:
    """What has gone down in the forward is not what the update finds."""
    plain, loop = pair(mesh, policy_of())
    for at in range(9):
        for each in (plain, loop):
            loss = each.model(each.batch(at))
            if at == 6:
                with torch.no_grad():
                    for param in each.optimizer.param_groups[0]["params"][::3]:
                        param.mul_(1.5)
            loss.backward()
            clip(each, ALWAYS if at == 6 else NEVER)
            each.step()
        assert same(plain, loop), at
    assert speculation_of(loop).taken_back == 1


def test_the_report_says_how_often(mesh: DeviceMesh) -> None:
    loop = train(Loop(mesh, adamw, policy_of()), [NEVER] * 6 + [ALWAYS] + [NEVER] * 3)
    report = str(loop.optimizer.offload_report())  # type: ignore[attr-defined]
    assert "1 of 8 such steps were taken back; in 1 of the last 10 steps gradients were changed" in report
    train(loop, [ALWAYS] * 4)
    report = str(loop.optimizer.offload_report())  # type: ignore[attr-defined]
    assert "so that updates wait for step() until few are" in report
    assert "clips" not in str(Loop(mesh, adamw, policy_of()).train(4).optimizer.offload_report())  # type: ignore[attr-defined]


def test_it_goes_on_when_few_steps_are_clipped(mesh: DeviceMesh) -> None:
    plain, loop = pair(mesh, policy_of(), net=small_net)
    limits = [NEVER] * 4 + [ALWAYS] * 6 + [NEVER] * 26
    assert same(train(plain, limits), train(loop, limits))
    found = speculation_of(loop)
    assert found.taken_back == 2  # of seven, more than a fifth
    # The last two of those clipped, 8 and 9, are all that is left of the twenty up to 27; the host learns it in 28.
    assert found.committed == 2 + len(limits) - 29


def test_gradients_are_as_they_were_afterwards(mesh: DeviceMesh) -> None:
    """Of the same class, and kept alive by nobody."""
    loop = train(Loop(mesh, adamw, policy_of()), [NEVER] * 4)
    loop.backward(4)
    watched = [param.grad for param in loop.model.parameters()]
    assert all(isinstance(grad, DTensor) for grad in watched)
    clip(loop, NEVER)
    loop.optimizer.step()
    assert {type(grad) for grad in watched} == {DTensor}
    references = [weakref.ref(local_shard(grad)) for grad in watched]
    del watched
    loop.optimizer.zero_grad()
    loop.model(loop.batch(5))
    assert not any(reference() for reference in references)


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


def parameters_are_not_watched(patch: pytest.MonkeyPatch) -> None:
    watch = speculation.watch
    patch.setattr(speculation, "watch", lambda one, watcher: one.requires_grad or watch(one, watcher))


def a_forward_sees_new_parameters(patch: pytest.MonkeyPatch) -> None:
    parameters_are_not_watched(patch)  # else gathering them takes the step back, too
    patch.setattr(Stepping, "before_gather", lambda self, buckets, stream, in_backward: self.wait_for(buckets, stream))


def old_parameters_are_those_of_a_step_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WayBack, "forget", lambda self: None)
    patch.setattr(WayBack, "_forget_written", lambda self, number: False)


def an_update_counts_as_written_by_somebody(patch: pytest.MonkeyPatch) -> None:
    """What is stored then are new values."""
    keep = WayBack.keep
    patch.setattr(WayBack, "note_updated", lambda self, number: (self._kept.discard(number), keep(self, number)))


MUTANTS = [
    *(commit_without_a_look, old_homes_are_written, one_bucket_of_parameters_is_not_taken_back),
    *(counters_are_written_at_once, gradients_are_not_watched, what_was_put_off_is_forgotten),
    *(parameters_are_not_watched, a_forward_sees_new_parameters, old_parameters_are_those_of_a_step_before),
    an_update_counts_as_written_by_somebody,
]


@pytest.mark.parametrize("mutant", [None, *MUTANTS], ids=lambda one: getattr(one, "__name__", "none"))
def test_other_bits_with_a_mistake(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None] | None
) -> None:
    if mutant is not None:
        mutant(monkeypatch)
    loops = pair(mesh, policy_of(), net=partial(Net, width=16, layers=2))
    program = [*[within_bounds] * 8, clipped, *[within_bounds] * 5, evaluated, parameters_looked_at]
    for at, operation in enumerate(program):
        for loop in loops:
            operation(loop, at)
    assert same(*loops) == (mutant is None)
