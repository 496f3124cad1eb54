"""Overlap with forward and backward gives the same bits, whatever the loop does; what it cannot repeat is refused."""

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy, offload_optimizer, remove_offload
from fsdp_offload.cpu_update.updates import HostUpdates
from fsdp_offload.device import link
from fsdp_offload.device.bucket_times import BucketTimes
from fsdp_offload.engine import step as stepping
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.engine.executor import Pipeline
from fsdp_offload.engine.homes import Plan
from fsdp_offload.engine.step import Stepping
from fsdp_offload.model import tune_resident as rehearsal
from fsdp_offload.model.hooks import Overlap
from fsdp_offload.model.tune_resident import Rehearsal
from fsdp_offload.planning.resident import IterationTimes
from fsdp_offload.planning.schedule import Action
from fsdp_offload.torch_compat import fully_shard as fully_shard_compat
from tests.async_writers import Reading
from tests.overlapping import HABITS, NOT_IN_BACKWARD, POLICIES, SIZES, Loop, adamw, same
from tests.parity import attach
from tests.policies import with_share

EVERY_POLICY = pytest.mark.parametrize("fields", POLICIES.values(), ids=POLICIES)


def policy_of(fields: dict[str, Any], **more: Any) -> OffloadPolicy:
    return with_share(**{**SIZES, **fields, **more})


def pair(mesh: DeviceMesh, policy: OffloadPolicy, make: Any = adamw, **kwargs: Any) -> tuple[Loop, Loop]:
    return Loop(mesh, make, None, **kwargs), Loop(mesh, make, policy, **kwargs)


@EVERY_POLICY
def test_serially(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    plain, offloaded = pair(mesh, policy_of(fields, serial=True))
    assert same(plain.train(6), offloaded.train(6))


@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("habit", sorted(NOT_IN_BACKWARD))
def test_habits_that_updates_in_the_backward_are_not_for(mesh: DeviceMesh, habit: str, parameters: bool) -> None:
    loop = Loop(mesh, adamw, policy_of({"overlap": "iteration"}, parameters=parameters))
    with pytest.raises(RuntimeError, match=r"[Uu]se\s+overlap='forward'"):
        loop.train(9, HABITS[habit])


@EVERY_POLICY
def test_updates_and_loads_really_begin_in_the_backward(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    loop = Loop(mesh, adamw, policy_of(fields)).train(3)
    engine = vars(loop.optimizer)["_offload_engine"].engine
    loop.backward(3)
    begun = engine.steps.begun
    if fields.get("overlap") == "iteration":
        assert sorted(begun.done) == sorted(step.bucket for step in engine.steps.last)
    else:
        loaded = [action for action in engine._pipeline._issued if action.kind == "L"]
        assert len(loaded) >= 3  # as many as the ring has room for
        assert not begun.done


@EVERY_POLICY
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_loads_begin_ahead_of_the_first_gradients(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], micro_batches: int
) -> None:
    """Of the last backward before the step, and what is loaded then is what is updated."""
    issue, reduced, seen = Pipeline._issue, Overlap._reduced, []

    def issued(self: Pipeline, action: Action, update: Callable[[int], None]) -> None:
        seen.append(action.kind)
        issue(self, action, update)

    def counted(self: Overlap, number: int, event: object) -> None:
        seen.append("gradients")
        reduced(self, number, event)

    monkeypatch.setattr(Pipeline, "_issue", issued)
    monkeypatch.setattr(Overlap, "_reduced", counted)
    loop = Loop(mesh, adamw, policy_of(fields), micro_batches=micro_batches).train(4)
    for step in (4, 5):
        seen.clear()
        loop.train(1, first=step)
        reductions_before = seen[: seen.index("L")].count("gradients")
        assert reductions_before <= seen.count("gradients") * (micro_batches - 1) // micro_batches
        buckets = len(vars(loop.optimizer)["_offload_engine"].engine.steps.last)
        assert [seen.count(kind) for kind in "LUS"] == [buckets] * 3  # nothing is loaded twice
    assert same(Loop(mesh, adamw, None, micro_batches=micro_batches).train(6), loop)


def test_what_is_kept_is_computed_on_one_clock(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_links", {})
    seen: list[IterationTimes] = []
    monkeypatch.setattr(Rehearsal, "_choose", lambda self, engine, iteration: seen.append(iteration))
    Loop(mesh, adamw, policy_of({"overlap": "iteration"}, staying="auto")).train(10)
    assert len(seen) == 2
    for times in seen:
        # Since the loads began, ahead of the first gradients.
        assert 0 < min(times.final_ms.values()) <= min(times.updated_ms.values())


def no_room(*_: object) -> NoReturn:
    raise torch.OutOfMemoryError("full")


def test_a_failure_before_the_rest_is_updated_is_one(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some has been updated in the backward, and for what it had not known of there is no room."""
    loop = Loop(mesh, adamw, policy_of({"overlap": "iteration"})).train(4)
    loop.backward(4)
    steps, states = engine_of(loop.optimizer).steps, loop.optimizer.state.unwaited
    begun = steps.begun
    assert begun.done
    steps.go_on(begun, begun.steps[:1])

    monkeypatch.setattr(Pipeline, "_enter", no_room)
    with pytest.raises(torch.OutOfMemoryError):
        steps.advance(begun, states)
    with pytest.raises(RuntimeError, match="an earlier step"):
        loop.optimizer.step()


@pytest.mark.parametrize(
    ("fields", "staging"),
    [(fields, "fixed") for fields in POLICIES.values()]
    + [(POLICIES[name], "auto") for name in ("forward", "iteration")],
)
def test_no_room_for_staging_loses_nothing(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], staging: str
) -> None:
    """Released, it has to be taken again, and there is no room for once: the step can be taken later."""
    monkeypatch.setattr(link, "_links", {})
    policy = policy_of(fields, **({"passing": "auto"} if staging == "auto" else {}))
    plain, loop = pair(mesh, policy)
    plain.train(8)
    loop.train(4)
    engine = vars(loop.optimizer)["_offload_engine"].engine
    loop.optimizer.offload_states()
    loop.optimizer.release_states()

    with monkeypatch.context() as patch:
        patch.setattr(link.DeviceLink, "block", no_room)
        with pytest.raises(torch.OutOfMemoryError):
            loop.optimizer.reload_states()
    assert not engine.steps.failure
    assert engine.steps.begun is None
    loop.backward(4)
    loop.step()
    loop.train(3, first=5)
    assert same(plain, loop)


@EVERY_POLICY
@pytest.mark.parametrize("host_fraction", [0.0, 0.5])
def test_updates_come_after_the_hyperparameters_that_are_copied_for_them(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], host_fraction: float
) -> None:
    """On the current stream, behind what of the backward has been issued by then: an update may run beside that."""
    issued: list[str] = []

    def noted(owner: Any, name: str, what: str) -> None:
        method = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            issued.append(what)
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    noted(Stepping, "_start", "copied")
    noted(Pipeline, "updates_after_compute", "ordered")
    noted(stepping, "update_bucket", "updated")
    noted(HostUpdates, "submit", "updated")
    Loop(mesh, adamw, policy_of(fields, host_fraction=host_fraction)).train(5)
    assert issued.count("updated") > 5
    # Of "copied" and "ordered", which one was last when each update was issued.
    last = ""
    for what in issued:
        assert what != "updated" or last == "ordered"
        last = last if what == "updated" else what


def test_the_second_of_two_optimizers_may_not_be_the_one_that_updates_in_the_backward(mesh: DeviceMesh) -> None:
    """The first would step with gradients that are gone, after everything had been updated."""
    plain, loop = pair(mesh, policy_of({}))
    second = torch.optim.SGD(list(loop.model.parameters())[3:5], lr=0.1)
    with pytest.raises(RuntimeError, match=r"2 of these parameters \(blocks\.0.*in the backward"):
        attach(second, model=loop.model, policy=policy_of(POLICIES["iteration"]))
    assert same(plain.train(2), loop.train(2))


@pytest.mark.parametrize("looks", [False, True], ids=["for-good", "as-a-guess"])
def test_a_plain_optimizer_may_not_step_where_the_backward_updates(mesh: DeviceMesh, looks: bool) -> None:
    """It is told which parameter has two optimizers; a guess is taken back, so that the other one may go on alone."""
    plain, loop = pair(mesh, policy_of(POLICIES["iteration"]))

    def clip(one: Loop) -> None:
        if looks:
            nn.utils.clip_grad_norm_(one.model.parameters(), 1e9)

    for step in range(4):
        for one in (plain, loop):
            one.backward(step)
            clip(one)
            one.optimizer.step()
            one.optimizer.zero_grad()
    for one in (plain, loop):
        one.second = torch.optim.SGD(list(one.model.parameters())[3:5], lr=0.1)
        one.backward(4)
    before = [param.detach().clone() for param in plain.model.parameters()]
    with pytest.raises(RuntimeError, match=r"SGD\.step\(\): blocks\.0.*of an AdamW.*in the backward") as refused:
        loop.second.step()
    assert str(refused.value).endswith("Nothing has been changed.") == looks
    if looks:
        assert all(map(torch.equal, loop.model.parameters(), before))
        remove_offload(loop.optimizer)
        for one in (plain, loop):
            one.second.step()
    else:
        for one in (plain, loop):
            one.optimizer.step()
    assert same(plain, loop)


@pytest.mark.filterwarnings("ignore:offload_optimizer")
def test_in_the_step_a_model_without_groups_to_hook_is_none() -> None:
    model = nn.Linear(3, 3)
    optimizer = offload_optimizer(torch.optim.AdamW(model.parameters()), model=model)
    assert not engine_of(optimizer).loads_in_backward  # type: ignore[union-attr]


def test_a_torch_with_other_hook_points(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads begin in step() where the policy can do without them."""
    monkeypatch.setattr(fully_shard_compat, "_READ", (*fully_shard_compat._READ, "_gone"))
    plain, offloaded = pair(mesh, policy_of({}))
    assert not engine_of(offloaded.optimizer).loads_in_backward  # type: ignore[union-attr]
    assert same(plain.train(5), offloaded.train(5))
    with pytest.raises(NotImplementedError, match=r"no \['_gone'\].*use OffloadPolicy\(overlap='step'\)"):
        Loop(mesh, adamw, policy_of({"overlap": "forward"}))


def test_a_load_between_backward_and_step_while_homes_are_read(mesh: DeviceMesh) -> None:
    """The backward has stored into spare homes, and nothing of that counts: later steps store where the state lives."""
    plain, offloaded = pair(mesh, policy_of({"overlap": "iteration"}, snapshot_bytes=1 << 20))
    for loop in (plain, offloaded):
        loop.train(3)
        weights = {name: value.detach().clone() for name, value in loop.model.state_dict().items()}
        saved = copy.deepcopy(loop.optimizer.state_dict())
        engine = engine_of(loop.optimizer)
        if engine is not None:
            engine.wait_all_home()
            engine.lending.lend(Reading(), [shard.home for shard in engine.plan.shards.values()])
        loop.backward(3)
        loop.model.load_state_dict(weights)
        loop.optimizer.load_state_dict(saved)
        loop.optimizer.zero_grad()
    assert same(plain.train(4, first=4), offloaded.train(4, first=4))


@EVERY_POLICY
def test_the_hooks_of_one_optimizer_survive_another(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    loop = Loop(mesh, lambda params: torch.optim.AdamW(params[::2], lr=0.02), policy_of(fields))
    other = torch.optim.AdamW(list(loop.model.parameters())[1::2], lr=0.01)
    with pytest.warns(UserWarning, match="nothing to gain"):
        offload_optimizer(other, model=loop.model, policy=policy_of(fields))
    remove_offload(other)
    loop.train(3)
    loop.backward(3)
    overlap = vars(loop.optimizer)["_offload_engine"].overlap
    assert overlap._clock.has_reduced
    assert hasattr(overlap._groups[0]._group, "_fsdp_offload_points")


@pytest.mark.parametrize("fields", [POLICIES["step"], POLICIES["iteration"]], ids=["step", "iteration"])
def test_resident_state_does_not_turn_overlap_off(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    loop = Loop(mesh, adamw, policy_of(fields, staying=60_000)).train(3)
    loop.backward(3)
    assert vars(loop.optimizer)["_offload_engine"].engine.steps.begun is not None


@pytest.mark.parametrize("change", ["stays", "resized", "lasts"])
def test_the_backward_updates_behind_a_change_of_places(mesh: DeviceMesh, change: str) -> None:
    """Else it would keep all gradients, which may have no room any more."""
    plain, offloaded = pair(mesh, policy_of(POLICIES["iteration"]))
    plain.train(4)
    offloaded.train(4)
    engine = vars(offloaded.optimizer)["_offload_engine"].engine
    if change == "stays":
        kept = engine.steps.buckets_of(offloaded.model.blocks[0].parameters())
        engine.keep_on_device(kept, offloaded.optimizer.state.unwaited)
    elif change == "resized":
        engine.resize_staging(1 << 20)
    else:
        engine.let_staging_last()
    offloaded.backward(4)
    assert engine.steps.begun.has_updated
    offloaded.step()
    assert same(plain.train(4, first=4), offloaded.train(3, first=5))


@EVERY_POLICY
def test_state_that_comes_to_stay_on_the_device(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    """What ``DeviceShare.staying_is_learnt`` does when it has measured enough, twice."""
    plain, offloaded = pair(mesh, policy_of(fields))
    engine = vars(offloaded.optimizer)["_offload_engine"].engine
    for first, layers in ((0, [0]), (4, [1, 2])):
        plain.train(4, first=first)
        offloaded.train(4, first=first)
        kept = engine.steps.buckets_of(p for layer in layers for p in offloaded.model.blocks[layer].parameters())
        before = offloaded.optimizer.offload_report()  # type: ignore[attr-defined]
        engine.keep_on_device(kept, offloaded.optimizer.state.unwaited)
        after = offloaded.optimizer.offload_report()  # type: ignore[attr-defined]
        nbytes = sum(8 * p.numel() for layer in layers for p in offloaded.model.blocks[layer].parameters())
        assert after.memory.kept_state_bytes == before.memory.kept_state_bytes + nbytes
        assert after.memory.host_state_bytes == before.memory.host_state_bytes - nbytes
    assert same(plain.train(4, first=8), offloaded.train(4, first=8))
    times = offloaded.optimizer.offload_report()  # type: ignore[attr-defined]
    assert times.loaded_bytes < times.host_state_bytes * 1.2


@EVERY_POLICY
def test_staging_goes_where_less_state_passes_through_it(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(link, "_links", {})  # staging of our own
    plain, offloaded = pair(mesh, policy_of(fields, passing=1 << 20))
    engine = vars(offloaded.optimizer)["_offload_engine"].engine
    for first, params in ((0, offloaded.model.extra.parameters()), (4, offloaded.model.parameters())):
        plain.train(4, first=first)
        offloaded.train(4, first=first)
        keep = {n for n in engine.steps.buckets_of(params) if engine._pipeline.buckets[n].copies}
        engine.keep_on_device(keep, offloaded.optimizer.state.unwaited)
        there = sum(block.memory.numel() for block in engine._link._ring.values())
        assert there == offloaded.optimizer.offload_report().memory.device_bytes  # type: ignore[attr-defined]
    assert there == 0
    assert same(plain.train(4, first=8), offloaded.train(4, first=8))


def test_auto_says_what_it_has_chosen(mesh: DeviceMesh) -> None:
    policy = policy_of({"overlap": "forward", "staying": "auto", "staying_limit_bytes": 1 << 30})
    plain, offloaded = pair(mesh, policy)
    assert same(plain.train(9), offloaded.train(9))
    assert "device_bytes='auto'" in str(offloaded.optimizer.offload_report())  # type: ignore[attr-defined]


@pytest.mark.parametrize("limit_bytes", [60_000, 1 << 30])
def test_auto_says_what_does_not_fit(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, limit_bytes: int) -> None:
    monkeypatch.setattr(rehearsal, "groups_to_keep", lambda times, tolerance_ms: (len(times.groups), 0.0))
    policy = policy_of({"overlap": "forward", "staying": "auto", "staying_limit_bytes": limit_bytes})
    report = Loop(mesh, adamw, policy).train(8).optimizer.offload_report()  # type: ignore[attr-defined]
    assert 0 < report.memory.kept_state_bytes <= limit_bytes
    assert ("does not fit" in str(report)) == (report.memory.host_state_bytes > 0) == (limit_bytes == 60_000)


def _as_over_a_slow_link(bucket_times: Any) -> Any:
    def slow(self: Pipeline) -> dict[int, BucketTimes]:
        return {
            number: BucketTimes(1000.0, one.update_ms, 1000.0 * (number + 1))
            for number, one in bucket_times(self).items()
        }

    return slow


def test_state_comes_to_stay_although_some_had_no_gradient(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that is far too slow, and a weight that is frozen while it is measured."""
    monkeypatch.setattr(Pipeline, "bucket_times", _as_over_a_slow_link(Pipeline.bucket_times))

    class FrozenWhileMeasured(Loop):
        def backward(self, step: int, **options: Any) -> None:
            self.model.blocks[0].up.weight.requires_grad_(step not in (3, 4, 5, 6, 7))
            super().backward(step, **options)

    policy = policy_of({"overlap": "forward", "staying": "auto", "staying_limit_bytes": 1 << 30})
    plain, offloaded = (FrozenWhileMeasured(mesh, adamw, one) for one in (None, policy))
    assert same(plain.train(11), offloaded.train(11))
    assert offloaded.optimizer.offload_report().memory.kept_state_bytes > 0  # type: ignore[attr-defined]


def test_state_that_should_stay_is_laid_out_anew_in_the_same_step(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has been chosen are buckets, and after that step others have their numbers."""
    monkeypatch.setattr(Pipeline, "bucket_times", _as_over_a_slow_link(Pipeline.bucket_times))

    def more_state_in_the_fifth_step(loop: Loop, step: int) -> None:
        loop.backward(step)
        if step == 4:
            loop.optimizer.param_groups[0]["amsgrad"] = True
            for state in loop.optimizer.state.values():
                state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
        loop.step()

    policy = policy_of({"overlap": "forward", "staying": "auto", "staying_limit_bytes": 60_000})
    plain, offloaded = (Loop(mesh, adamw, one) for one in (None, policy))
    plain.train(11, more_state_in_the_fifth_step)
    offloaded.train(5, more_state_in_the_fifth_step)
    assert offloaded.optimizer.offload_report().memory.kept_state_bytes == 0  # type: ignore[attr-defined]
    offloaded.train(6, more_state_in_the_fifth_step, first=5)
    assert same(plain, offloaded)
    assert offloaded.optimizer.offload_report().memory.kept_state_bytes > 0  # type: ignore[attr-defined]


def test_no_room_for_what_should_stay(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Pipeline, "bucket_times", lambda self: {0: BucketTimes(1000.0, 0.1, 1000.0)})
    monkeypatch.setattr(Plan, "keep_on_device", out_of_memory)
    policy = policy_of({"overlap": "forward", "staying": "auto", "staying_limit_bytes": 1 << 30})
    plain, offloaded = pair(mesh, policy)
    assert same(plain.train(10), offloaded.train(10))
    assert "there is no room" in str(offloaded.optimizer.offload_report())  # type: ignore[attr-defined]
