"""``clip_grad_norm_`` with updates in the backward: the bits of plain training, whatever the loop does."""

import copy
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_offload import clip_grad_norm_, offload_report
from fsdp_offload.checkpoint import ArenaStager, get_optimizer_state_dict
from fsdp_offload.engine import step as steps
from fsdp_offload.engine.engine import Engine, engine_of
from fsdp_offload.engine.homes import Plan
from fsdp_offload.engine.speculation import Speculation
from fsdp_offload.fsdp.dtensor import local_shard
from fsdp_offload.fsdp.gradients import let_read, watch
from tests.async_writers import Reading
from tests.conformance.oracle import ALWAYS, NEVER, different
from tests.conformance.programs import LOOKS
from tests.core.test_interrupts import Interrupted
from tests.overlapping import Loop, Net, adamw, clipping, pair, same, speculation_of, together

small_net = partial(Net, width=16, layers=2)
EVERYWHERE = pytest.mark.parametrize("parameters", [False, True])


def compare(loops: tuple[Loop, Loop], limits: list[float], first: int = 0, **options: Any) -> Speculation:
    """Train both, and compare them after each step."""
    for at, max_norm in enumerate(limits, start=first):
        for each in loops:
            each.clipped_step(at, max_norm, **options)
        assert same(*loops), at
    return speculation_of(loops[1])


def report_of(loop: Loop) -> str:
    return str(offload_report(loop.optimizer))


# Which steps stand, and which are taken back --------------------------------------------------------------------------


PROGRAMS: dict[str, tuple[list[float], dict[str, Any], tuple[int, int]]] = {
    "never_clipped": ([NEVER] * 8, {}, (7, 0)),
    "never_clipped, one by one": ([NEVER] * 8, {"foreach": False}, (7, 0)),
    "never_clipped by the largest": ([NEVER] * 8, {"norm_type": math.inf}, (7, 0)),
    "never_clipped by the sum": ([NEVER] * 8, {"norm_type": 1.0}, (7, 0)),
    "clipped_once": ([NEVER] * 7 + [ALWAYS] + [NEVER] * 4, {}, (10, 1)),
    "always clipped": ([ALWAYS] * 8, {}, (0, 1)),  # the first step shows that it binds; guesses do not begin
}


@EVERYWHERE
@pytest.mark.parametrize(("limits", "options", "counts"), PROGRAMS.values(), ids=PROGRAMS)
def test_steps(
    mesh: DeviceMesh, limits: list[float], options: dict[str, Any], counts: tuple[int, int], parameters: bool
) -> None:
    """Which stand, and which are taken back."""
    found = compare(pair(mesh, clipping(parameters=parameters)), limits, **options)
    assert (found.committed, found.rolled_back) == counts


def test_two_steps_show_whether_gradients_are_touched(mesh: DeviceMesh) -> None:
    """By a loop that does not clip: what it does from the second step on is seen as well."""
    plain, loop = pair(mesh, clipping(), net=small_net)
    for at in range(5):
        for each in (plain, loop):
            each.backward(at)
            for param in each.params if at else ():
                param.grad.mul_(0.5)
            each.step()
    assert same(plain, loop)


def test_it_goes_on_when_few_steps_are_clipped(mesh: DeviceMesh) -> None:
    limits = [NEVER] * 4 + [ALWAYS] * 6 + [NEVER] * 26
    found = compare(pair(mesh, clipping(), net=small_net), limits)
    assert found.rolled_back == 2  # the first is one of five, no more than a fifth, the second of six
    # The last two of those clipped, 8 and 9, are all that is left of the twenty up to 27; the host learns it in 28.
    assert found.committed == 3 + len(limits) - 29


@EVERYWHERE
def test_updates_really_run_in_the_backward(mesh: DeviceMesh, parameters: bool) -> None:
    """And the state that they have made is not that of the user yet."""
    loop = Loop(mesh, adamw, clipping(parameters=parameters)).train_clipped([NEVER] * 4)
    states = loop.optimizer.state.unwaited  # who looks at an entry, and keeps it, has updates wait for step()
    before = [states.get(param)["step"].item() for param in loop.params]
    loop.backward(4)
    engine = engine_of(loop.optimizer)
    assert isinstance(engine, Engine)
    assert engine.core.done.keys() == set(engine.core.buckets)
    assert [states.get(param)["step"].item() for param in loop.params] == before
    assert len(loop.optimizer.state_dict()["state"]) == len(before)
    assert not engine.core.done, "who saves sees what there was before"


# The function itself --------------------------------------------------------------------------------------------------


def test_a_plain_optimizer_is_clipped_as_torch_does(mesh: DeviceMesh) -> None:
    one, other = (Loop(mesh, adamw, None, net=small_net) for _ in range(2))
    for loop in (one, other):
        loop.backward(0)
    norm = nn.utils.clip_grad_norm_(one.params, ALWAYS)
    assert torch.equal(norm.full_tensor(), clip_grad_norm_(other.optimizer, ALWAYS).full_tensor())
    assert all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in zip(one.params, other.params, strict=True))


@pytest.mark.parametrize("others", ["added later", "beside it"])
def test_the_order_of_the_norm_is_the_models(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, others: str) -> None:
    """Also for parameters that no attached optimizer had when it was attached; the norm's last bit depends on it."""
    loop = Loop(mesh, lambda params: adamw(params[::2]), clipping(), net=small_net)
    optimizers = [loop.optimizer]
    if others == "added later":
        loop.optimizer.add_param_group({"params": loop.params[1::2]})
    else:
        optimizers.insert(0, adamw(loop.params[1::2]))
    loop.backward(0)
    with torch.no_grad():
        loop.model(loop.batch(0))  # the root stays gathered
    orders: list[list[int]] = []
    get_norm = nn.utils.get_total_norm
    monkeypatch.setattr(
        nn.utils,
        "get_total_norm",
        lambda grads, *more: (orders.append(list(map(id, grads))), get_norm(grads, *more))[1],
    )
    clip_grad_norm_(optimizers, NEVER)
    assert orders == [[id(param.grad) for param in loop.params]]


def test_who_begins_to_clip_late_is_told_the_line_to_write(mesh: DeviceMesh) -> None:
    loop = Loop(mesh, adamw, clipping()).train(5)
    loop.backward(5)
    with pytest.raises(RuntimeError, match=r"has to call fsdp_offload\.clip_grad_norm_\(optimizer, max_norm\) from"):
        loop.clip(NEVER)
    loop.step()


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("switched_on", [0, 5])
def test_an_optimizer_that_writes_its_gradients_is_not_guessed(
    mesh: DeviceMesh, options: dict[str, Any], switched_on: int
) -> None:
    """As SGD with Nesterov's momentum does where it runs on lists of tensors."""
    loops = pair(mesh, clipping(), partial(torch.optim.SGD, lr=0.02, momentum=0.9, **options), net=small_net)
    for at, loop in together(loops, 10):
        loop.optimizer.param_groups[0]["nesterov"] = at >= switched_on
        loop.clipped_step(at, ALWAYS if at % 6 == 4 else NEVER)
    assert bool(speculation_of(loops[1]).committed) == (switched_on > 0)


@pytest.mark.parametrize("torch_resets", [True, False])  # torch 2.11 does not
def test_an_optimizer_that_begins_to_write_its_gradients(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, torch_resets: bool
) -> None:
    """The guess in which it does is taken back before it is refused; a load ends that."""
    if not torch_resets:
        monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
    plain, loop = pair(mesh, clipping(parameters=True), net=small_net)
    for each in (plain, loop):
        each.train_clipped([NEVER] * 4)
    saved = copy.deepcopy((plain.model.state_dict(), plain.optimizer.state_dict()))
    update = steps.update_bucket

    def writing(step: Any, ranges: Any, states: Any) -> None:
        update(step, ranges, states)
        for one in ranges:
            if one.gradient is not None:
                one.gradient.mul_(1.0)

    with monkeypatch.context() as patch:
        patch.setattr(steps, "update_bucket", writing)
        with pytest.raises(RuntimeError, match="has begun to write the gradients that it is given"):
            loop.backward(4)
    plain.backward(4)
    for each in (plain, loop):
        weights, state = copy.deepcopy(saved)
        each.optimizer.load_state_dict(state)
        each.model.load_state_dict(weights)
        each.optimizer.zero_grad()
        each.seen.clear()
        each.train_clipped([NEVER] * 4)
    assert same(plain, loop)


def test_a_scaler_whose_scale_the_step_is_given(mesh: DeviceMesh) -> None:
    """As fused optimizers are: whether there is a step is decided in it."""
    plain, loop = pair(mesh, clipping(), partial(torch.optim.AdamW, lr=0.02, fused=True), net=small_net)
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    for at in range(8):
        for each, scaler in zip((plain, loop), scalers, strict=True):
            scaler.scale(each.model(each.batch(at)) * (math.inf if at == 5 else 1.0)).backward()
            if at < 3:
                each.clip(NEVER)
            scaler.step(each.optimizer)
            scaler.update()
            each.optimizer.zero_grad()
        assert same(plain, loop), at
    assert speculation_of(loop).rolled_back


def test_what_has_no_way_back_waits_for_the_step(mesh: DeviceMesh) -> None:
    """Whole parameters, which an optimizer sees as DTensors."""

    def muon(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.02, ns_steps=1)

    loops = pair(mesh, clipping(), muon, net=small_net)
    for loop in loops:
        loop.named = {name: param for name, param in loop.named.items() if param.dim() == 2}
    assert compare(loops, [NEVER, NEVER, ALWAYS, NEVER] * 2).committed == 0
    assert "updates wait for step(), as this optimizer does not work element by element" in report_of(loops[1])


def test_micro_batches_alone_are_no_touch(mesh: DeviceMesh) -> None:
    """``fully_shard`` itself adds to gradients, past torch's functions on DTensors."""
    found = compare(pair(mesh, clipping(), net=small_net, micro_batches=3), [NEVER] * 6)
    assert (found.committed, found.rolled_back) == (5, 0)


# Host memory ----------------------------------------------------------------------------------------------------------


def test_host_memory_is_counted_and_asked_for(mesh: DeviceMesh) -> None:
    state_bytes = offload_report(Loop(mesh, adamw, clipping()).optimizer).memory.host_bytes
    for limit_bytes, guessed in ((2 * state_bytes, False), (3 * state_bytes, True)):
        loops = pair(mesh, clipping(host_limit_bytes=limit_bytes))
        found = compare(loops, [NEVER] * 6)
        report = offload_report(loops[1].optimizer)
        assert report.memory.host_bytes <= limit_bytes
        assert (report.memory.spare_home_bytes == state_bytes) == guessed == bool(found.committed)
        assert ("to take a step back needs" in str(report)) != guessed
        param_bytes = sum(param.to_local().nbytes for param in loops[1].params)
        padding_bytes = report.memory.host_bytes - 2 * state_bytes - param_bytes
        assert not guessed or 0 <= padding_bytes < 64 * report.kept.moving_buckets * 16


@EVERYWHERE
def test_spare_homes_are_shared_with_snapshots(mesh: DeviceMesh, parameters: bool) -> None:
    spare = []
    for snapshot_bytes in (0, 30_000, 1 << 30):
        policy = clipping(snapshot_bytes=snapshot_bytes, parameters=parameters)
        loop = Loop(mesh, adamw, policy).train_clipped([NEVER] * 5)
        assert speculation_of(loop).committed == 4
        spare.append(offload_report(loop.optimizer).memory.spare_home_bytes)
    assert spare[0] == spare[2]
    assert spare[0] <= spare[1] <= spare[0] + 8 * 4096  # pages that both have


@EVERYWHERE
def test_parameters_and_state_that_come_later_have_a_way_back_as_well(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, parameters: bool
) -> None:
    """The plan is another one then."""

    def without_bias(params: Any) -> torch.optim.Optimizer:
        params[-1].requires_grad_(False)
        return torch.optim.AdamW(params, lr=0.02)

    loops = pair(mesh, clipping(parameters=parameters), without_bias, net=small_net)
    compare(loops, [NEVER] * 4)
    region = speculation_of(loops[1]).old._region
    assert region is not None
    memory, left, take = weakref.ref(region._owner), [], Plan.region
    del region
    monkeypatch.setattr(Plan, "region", lambda *args: left.append(memory() is not None) or take(*args))
    for loop in loops:
        loop.params[-1].requires_grad_(True)
    compare(loops, [NEVER, NEVER, NEVER, ALWAYS, NEVER], first=4)
    assert not left[-1], "there would be twice as much for a while"
    for loop in loops:
        loop.optimizer.param_groups[0]["amsgrad"] = True
        for state in loop.optimizer.state.values():
            state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
    before = speculation_of(loops[1]).committed
    found = compare(loops, [NEVER, NEVER, ALWAYS, NEVER, NEVER], first=9)
    assert (found.committed, found.rolled_back) == (before + 2, 2)  # not in the first two steps after the change


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_parameters_go_down_in_the_last_forward(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, micro_batches: int
) -> None:
    """Once each, before the backward needs the link for state; not in an evaluation, whose weights may be others."""
    loop = Loop(mesh, adamw, clipping(), net=small_net, micro_batches=micro_batches)
    loop.train_clipped([NEVER] * 5)
    all_bytes = sum(param.to_local().nbytes for param in loop.params)
    way_back, found = speculation_of(loop).ahead.way_back, [0]
    store, copy_ = way_back.core.lanes.store, way_back.core.lanes.store.copy
    old = {pair[0].data_ptr() for bucket in way_back.core.buckets for pair in bucket.old}

    def counted(pairs: Any) -> None:
        found[0] += sum(target.numel() for target, _ in pairs if target.data_ptr() in old)
        copy_(pairs)

    monkeypatch.setattr(store, "copy", counted)
    for _ in range(micro_batches - 1):
        loop.model(loop.batch(5)).backward()
        assert found == [0]
    loss = loop.model(loop.batch(6))
    assert found == [all_bytes]
    loss.backward()
    assert found == [all_bytes]
    loop.clip(NEVER)
    loop.step()
    loop.look()
    assert found == [all_bytes]


# Saves ----------------------------------------------------------------------------------------------------------------


def states_of(loop: Loop) -> dict[str, Any]:
    return {"model": loop.model.state_dict(), "optimizer": get_optimizer_state_dict(loop.model, loop.optimizer)}


@EVERYWHERE
def test_asynchronous_saves(mesh: DeviceMesh, tmp_path: Path, parameters: bool) -> None:
    """Also one that is begun between the backward and the step: it has what there was before."""
    plain, loop = pair(mesh, clipping(snapshot_bytes=30_000, parameters=parameters))
    stager = ArenaStager(loop.optimizer)
    futures = []
    for at in range(12):
        for each in (plain, loop):
            each.backward(at)
            each.clip(ALWAYS if at == 8 else NEVER)
        if at in (4, 5, 8, 10):
            futures.append(dcp.async_save(states_of(loop), checkpoint_id=tmp_path / str(at), async_stager=stager))
            wanted = copy.deepcopy(plain.everything())
        for each in (plain, loop):
            each.step()
        assert same(plain, loop), at
    for future in futures:
        future.result()
    stager.close()
    loaded = Loop(mesh, adamw, clipping()).train(1)
    dcp.load(states_of(loaded), checkpoint_id=tmp_path / "10")
    loaded.seen = wanted["seen"].tolist()
    loaded.optimizer.param_groups[0]["lr"] = wanted["group 0 lr"]  # which ``dcp.load`` alone does not set
    assert not different(loaded.everything(), wanted)


def test_a_home_that_is_read_is_not_written(mesh: DeviceMesh) -> None:
    """The old home of a step that stands is the spare one of the next, which waits for ``step()`` if it is read."""
    loops = pair(mesh, clipping())
    compare(loops, [NEVER] * 5)
    engine = engine_of(loops[1].optimizer)
    assert engine is not None
    shards = list(engine.plan.shards.values())
    engine.wait_all_home()
    read = [(shard.home, [leaf.clone() for leaf in shard.home.all_leaves()]) for shard in shards]
    reader = Reading()
    engine.lending.lend(reader, [shard.home for shard in shards])
    committed = [speculation_of(loops[1]).committed]
    for at in range(5, 8):
        compare(loops, [NEVER], first=at)
        committed.append(speculation_of(loops[1]).committed)
        if reader.reading:
            assert all(torch.equal(a, b) for home, old in read for a, b in zip(home.all_leaves(), old, strict=True))
        if at == 5:
            assert reader.reading
    assert committed[1:3] == [committed[0] + 1] * 2  # into the spare homes, which nobody reads


class FinishingSoon(Reading):
    """Is done when it has been asked so many times."""

    def __init__(self, asked: int) -> None:
        super().__init__()
        self.left = asked

    def is_reading(self) -> bool:
        self.left -= 1
        self.reading = self.reading and self.left > 0
        return self.reading


@pytest.mark.parametrize("asked", [1, 3, 20, 60, 200])
def test_a_writer_that_finishes_in_a_backward(mesh: DeviceMesh, asked: int) -> None:
    loops = pair(mesh, clipping())
    compare(loops, [NEVER] * 5)
    engine = engine_of(loops[1].optimizer)
    assert engine is not None
    engine.wait_all_home()
    spare = [shard.all_homes[1 - shard.which] for shard in engine.plan.shards.values()]
    engine.lending.lend(FinishingSoon(asked), spare[1::2])
    compare(loops, [ALWAYS, NEVER, NEVER], first=5)


# Errors, and what users hold ------------------------------------------------------------------------------------------


@EVERYWHERE
@pytest.mark.parametrize("nth", [1, 4])
def test_an_update_that_fails_in_the_backward(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, nth: int, parameters: bool
) -> None:
    """Parameters, state and counters are those from before it; fully_shard itself does not go on after that."""
    plain, loop = pair(mesh, clipping(parameters=parameters))
    compare((plain, loop), [NEVER] * 5)
    update, calls = steps.update_bucket, []

    def failing(*args: Any) -> None:
        update(*args)
        calls.append(0)
        if len(calls) == nth:
            raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(steps, "update_bucket", failing)
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
@EVERYWHERE
def test_clipped_gradients_are_seen_clipped(
    mesh: DeviceMesh, look_at: Callable[[Any], torch.Tensor], parameters: bool
) -> None:
    """The product is put off no longer than until somebody looks, in whatever way."""
    found = []
    for loop in pair(mesh, clipping(parameters=parameters), net=small_net):
        loop.train_clipped([NEVER] * 4)
        loop.backward(4)
        loop.clip(ALWAYS)
        found.append([look_at(param.grad).clone() for param in loop.params])
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


def test_a_view_of_gradients_that_are_zeroed_in_place(mesh: DeviceMesh) -> None:
    """It is kept, and written in a later step: what counts no version could not be seen then."""
    plain, loop = pair(mesh, clipping())
    views: dict[Loop, list[torch.Tensor]] = {}
    for at, each in together((plain, loop), 8):
        each.optimizer.zero_grad(set_to_none=False)
        each.backward(at)
        if at == 4:
            views[each] = [param.grad.to_local().data for param in each.params]
        if at > 4:
            torch._foreach_mul_(views[each], 0.3)
        each.clip(NEVER)
        each.optimizer.step()
    assert (speculation_of(loop).committed, speculation_of(loop).rolled_back) == (3, 1)


def test_a_view_of_a_parameter_that_streams_stays_one(mesh: DeviceMesh) -> None:
    """A parameter that somebody has a view of does not change its home."""
    plain, loop = pair(mesh, clipping(parameters=True), net=small_net)
    views: dict[Loop, list[torch.Tensor]] = {}
    for at, each in together((plain, loop), 9):
        each.clipped_step(at, ALWAYS if at == 6 else NEVER)
        if each is loop:
            loop.optimizer.synchronize()  # type: ignore[attr-defined]
        if at == 3:
            views[each] = [param.detach().to_local() for param in each.params[::2]]
        each.seen += [float(view.double().sum()) for view in views.get(each, ())]


def test_parameters_and_gradients_have_their_class_back(mesh: DeviceMesh) -> None:
    """Whether the step stood or was taken back."""
    loop = Loop(mesh, adamw, clipping()).train_clipped([NEVER] * 4)
    for at, max_norm in enumerate([NEVER, ALWAYS, NEVER], start=4):
        loop.backward(at)
        grads = [param.grad for param in loop.params]
        loop.clip(max_norm)
        loop.optimizer.step()
        assert {type(tensor) for tensor in (*grads, *loop.params)} == {DTensor}
        loop.optimizer.zero_grad()
    loop.backward(7)
    assert DTensor not in {type(param) for param in loop.params}
    loop.model.head.weight.norm()
    assert {type(param) for param in loop.params} == {DTensor}
    assert (speculation_of(loop).committed, speculation_of(loop).rolled_back) == (5, 2)


class Told:
    """Notes the threads that share what it watches."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def shares(self, tensors: Sequence[Tensor]) -> None:
        self.threads.append(threading.current_thread().name)


def test_an_interrupted_gather_hides_no_write(mesh: DeviceMesh) -> None:
    """An interrupt at any line leaves the watcher on."""
    grad, told = DTensor.from_local(torch.ones(3), mesh), Told()
    watch([grad], told)  # type: ignore[arg-type]
    with Interrupted() as counting:
        let_read(lambda: None)
    for at in range(1, counting.lines + 1):
        with Interrupted(at):
            let_read(lambda: None)
        told.threads.clear()
        assert grad._local_tensor is not None
        assert told.threads == ["MainThread"], f"line {at}"


def test_a_gather_of_another_thread_that_ends_later_hides_no_write(mesh: DeviceMesh) -> None:
    """While ``fully_shard`` reads, no watcher is told; each thread reads for itself."""
    grad, told = DTensor.from_local(torch.ones(3), mesh), Told()
    here, there, gone = threading.Event(), threading.Event(), threading.Event()

    def other() -> None:
        here.wait()
        let_read(lambda: (there.set(), gone.wait(), grad._local_tensor))

    watch([grad], told)  # type: ignore[arg-type]
    thread = threading.Thread(target=other)
    thread.start()
    let_read(lambda: (here.set(), there.wait(), grad._local_tensor))
    gone.set()
    thread.join()
    assert not told.threads
    assert grad._local_tensor is not None
    assert told.threads == ["MainThread"]


@EVERYWHERE
def test_gradients_are_kept_alive_by_nobody(mesh: DeviceMesh, parameters: bool) -> None:
    loop = Loop(mesh, adamw, clipping(parameters=parameters)).train_clipped([NEVER] * 4)
    loop.backward(4)
    references = [weakref.ref(local_shard(param.grad)) for param in loop.params]
    loop.clip(NEVER)
    loop.step()
    loop.model(loop.batch(5))
    assert not any(reference() for reference in references)


def test_the_report_says_how_often(mesh: DeviceMesh) -> None:
    loop = Loop(mesh, adamw, clipping()).train_clipped([NEVER] * 6 + [ALWAYS] + [NEVER] * 3)
    told = "1 of 9 steps that it began were undone before step(); clipping changed gradients in 1 of the last 9"
    assert told in report_of(loop)
    assert '! overlap="iteration": the loop clips; clipping changed gradients in' in report_of(
        loop.train_clipped([ALWAYS] * 4)
    )
    assert "clips" not in report_of(Loop(mesh, adamw, clipping()).train(4))
