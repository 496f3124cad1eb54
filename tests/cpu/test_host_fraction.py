"""A share of the state is updated on the host: the same bits as the same class on the CPU, whatever the loop does.

On the CPU both sides are the same device, so a plain optimizer with ``fused=True`` is the reference wherever the class
has a fused CPU kernel that is right, which the host uses whatever the user has chosen.
"""

import copy
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy, cpu_update, remove_offload
from fsdp_offload.cpu_update import CpuMark, HostJob, HostUpdates
from fsdp_offload.device.lanes import Mark
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.optimizers import capabilities_of
from tests import host_worker_gate
from tests.async_writers import Reading
from tests.cpu.test_parity_optimizers import FLAGS
from tests.overlapping import EVERY_POLICY, POLICIES, Loop, assert_same_each_step, assert_trained, pair, policy_of, same
from tests.parity import SMALL, Net, Zoo, attach, local
from tests.tiers import spread
from tests.twins import make_twins

BOTH = {"0.3": 0.3, "1.0": 1.0}
CPU = torch.device("cpu")


def policy(fraction: float | str, **more: Any) -> OffloadPolicy:
    return replace(SMALL, host_fraction=fraction, **more)


def host_names(optimizer: Optimizer) -> list[str]:
    return [shard.name for shard in engine_of(optimizer).plan.host_shards()]


def host_params(optimizer: Optimizer) -> list[Tensor]:
    return [shard.param for shard in engine_of(optimizer).plan.host_shards()]


def fused_adamw(params: Any) -> Optimizer:
    return optim.AdamW(params, lr=0.02, fused=True)


# The same bits -------------------------------------------------------------------------------------------------------


def elementwise_cases() -> Iterator[Any]:
    for cls, all_flags in FLAGS.items():
        capabilities = capabilities_of(cls)
        if not capabilities.takes_masters:
            continue
        fused = ("fused", "cpu", torch.float32) in capabilities.cuttable
        for flags in all_flags:
            label = "-".join([cls.__name__, *(f"{key}={value}" for key, value in flags.items())])
            yield pytest.param(cls, {**flags, **({"fused": True} if fused else {})}, id=label)


@spread(case={case.id: case.values for case in elementwise_cases()}, fraction=BOTH)
def test_same_bits(case: tuple[type[Optimizer], dict[str, Any]], fraction: float) -> None:
    cls, kwargs = case
    both = pair(None, policy(fraction), partial(cls, **kwargs), net=Zoo)
    keeps_state = bool(kwargs.get("momentum")) or cls is not optim.SGD
    assert bool(host_names(both[1].optimizer)) == keeps_state
    assert_same_each_step(*both, 8)
    assert_trained(both[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_fused_kernel_that_is_wrong_is_not_used(dtype: torch.dtype) -> None:
    """torch's fused SGD on the CPU does not update whole vectors in these dtypes: also where the user wants it."""
    models = [nn.Linear(16, 32, dtype=dtype) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=at == 1) for at, model in enumerate(models)
    ]
    attach(optimizers[1], policy=policy(1.0))
    for _ in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(3, 16, dtype=dtype)).sum().backward()
            optimizer.step()
        assert all(map(torch.equal, *(model.parameters() for model in models)))


def test_a_scaler_that_needs_that_kernel_is_refused_before_anything_changes() -> None:
    model = nn.Linear(16, 32).to(torch.bfloat16)
    optimizer = attach(optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True), policy=policy(1.0))
    before = [param.detach().clone() for param in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(3, 16, dtype=torch.bfloat16)).float().sum()).backward()
    with pytest.raises(RuntimeError, match=r"a GradScaler needs a fused SGD, .* Nothing has been changed"):
        scaler.step(optimizer)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("cls", [optim.SGD, optim.Adagrad, optim.AdamW])
def test_a_first_gradient_beside_others_that_have_state(cls: type[Optimizer]) -> None:
    """The host takes the fused kernel; torch's fused SGD fails where only some parameters have state."""

    flags = {"momentum": 0.9, "dampening": 0.1} if cls is optim.SGD else {}
    both = pair(None, policy(1.0), partial(cls, lr=0.02, foreach=False, **flags), net=lambda: Net().to(torch.float64))
    assert host_names(both[1].optimizer)
    for at in range(5):
        for run in both:
            run.backward(at)
            for name, param in run.named.items():
                if at < 2 and name.endswith("bias"):
                    param.grad = None
            run.step()
    for one, other in zip(*(run.params for run in both), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)  # another kernel than that of the plain optimizer
        assert both[0].optimizer.state[one].keys() == both[1].optimizer.state[other].keys()


@pytest.mark.parametrize("cls", [optim.SGD, optim.Adagrad, optim.AdamW])
def test_a_gradient_with_other_strides_than_its_parameter(cls: type[Optimizer]) -> None:
    """torch's fused kernels go through both as they lie in memory: the host would add elements of other places."""
    torch.manual_seed(0)
    plain, offloaded = (nn.Parameter(start) for start in torch.randn(30, 20).expand(2, 30, 20).clone().transpose(1, 2))
    flags = {"momentum": 0.9} if cls is optim.SGD else {}
    optimizers = [cls([plain], lr=0.02, fused=True, **flags), cls([offloaded], lr=0.02, **flags)]
    attach(optimizers[1], policy=policy(1.0))
    for _ in range(3):
        offloaded.grad = torch.randn(20, 30)
        plain.grad = torch.empty_like(plain).copy_(offloaded.grad)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(plain, offloaded)


@spread(kind={kind: kind for kind in ("fp32", "remainder")}, fraction=BOTH)
def test_masters(kind: str, fraction: float) -> None:
    twins = make_twins(Zoo, fused_adamw, kind, policy=policy(fraction))
    twins.train(6)
    twins.assert_trained()


# Whatever the loop does ----------------------------------------------------------------------------------------------


def linear(layers: int = 1, sizes: tuple[int, int] = (16, 16), **more: Any) -> tuple[nn.Module, Optimizer]:
    """All of it is updated on the host."""
    net = nn.Sequential(*(nn.Linear(*sizes[:: 1 if at % 2 == 0 else -1], bias=False) for at in range(layers)))
    return net, attach(fused_adamw(net.parameters()), model=net, policy=policy(1.0, **more))


def backward(net: nn.Module, **options: Any) -> Tensor:
    loss = net(torch.ones(2, 16)).sum()
    loss.backward(**options)
    return loss


def test_autograd_notices_the_update() -> None:
    """A backward through weights that have been updated since is an error, as without offload."""
    net, optimizer = linear(2)
    loss = backward(net, retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_steps_in_a_row_count_each_range_of_a_parameter(mesh: DeviceMesh) -> None:
    """With the same gradients, and nothing in between that waits for the host."""
    nets = [nn.Sequential(nn.Linear(40, 56), nn.Linear(56, 24)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    for net in nets:
        fully_shard(net, mesh=mesh)
    optimizers = [fused_adamw(net.parameters()) for net in nets]
    attach(optimizers[1], model=nets[1], policy=OffloadPolicy(overlap="forward", host_fraction=1.0, bucket_bytes=1024))
    for at in range(3):
        for net, optimizer in zip(nets, optimizers, strict=True):
            net(torch.full((3, 40), 0.1 * at)).square().sum().backward()
            for _ in range(2):
                optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, *(map(local, net.state_dict().values()) for net in nets)))


# Checkpoints ---------------------------------------------------------------------------------------------------------


def test_removed_and_attached_again_with_other_fractions() -> None:
    plain, loop = pair(None, policy(0.7), fused_adamw, net=Net)
    for fraction in (0.0, 1.0, 0.3):
        assert_same_each_step(plain, loop, 2)
        loop.remove()
        assert_same_each_step(plain, loop, 1)
        attach(loop.optimizer, policy=policy(fraction))
    assert_same_each_step(plain, loop, 2)


@spread(snapshot_bytes={"spare": 1 << 20, "none": 0}, fraction=BOTH)
def test_homes_that_are_read_are_not_written(fraction: float, snapshot_bytes: int) -> None:
    """The update runs in a spare home; where there is none, the step waits for the reader."""
    both = pair(None, policy(fraction, snapshot_bytes=snapshot_bytes), fused_adamw, net=Net)
    assert_same_each_step(*both, 2)
    engine = engine_of(both[1].optimizer)
    for _ in range(3):
        reader = Reading()
        homes = [shard.home for shard in engine.plan.shards.values()]
        lent = [leaf for home in homes for leaves in home.leaves.values() for leaf in leaves]
        before = [leaf.clone() for leaf in lent]
        engine.lending.lend(reader, homes)
        assert_same_each_step(*both, 1)
        assert all(torch.equal(one, other) for one, other in zip(lent, before, strict=True)) == bool(snapshot_bytes)
        assert bool(reader.waited) == (not snapshot_bytes)
        reader.reading = False


# Who waits for whom --------------------------------------------------------------------------------------------------


def two_sides(mesh: DeviceMesh, fields: dict[str, Any], **more: Any) -> Loop:
    return Loop(mesh, fused_adamw, policy_of(fields, **{"host_fraction": 0.5, **more})).train(3)


def plain(mesh: DeviceMesh, steps: int = 4) -> Loop:
    return Loop(mesh, fused_adamw, None).train(steps)


def changed_on(loop: Loop, before: dict[Tensor, Tensor]) -> dict[str, set[bool]]:
    """Whether parameters of the host's and of the device's share have changed."""
    found: dict[str, set[bool]] = {"host": set(), "device": set()}
    of_host = host_params(loop.optimizer)
    for param, start in before.items():
        side = "host" if any(param is one for one in of_host) else "device"
        found[side].add(not torch.equal(param.detach().to_local(), start))
    return found


Waits = list[bool]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Gates open when somebody waits for the host."""
    seen: Waits = []
    wait = CpuMark.wait

    def waiting(self: CpuMark) -> Mark:
        if host_worker_gate.is_closed() and not self.ended.done():
            seen.append(True)
            host_worker_gate.open_all()
        return wait(self)

    monkeypatch.setattr(CpuMark, "wait", waiting)
    return seen


@EVERY_POLICY
def test_step_waits(mesh: DeviceMesh, waits: Waits, fields: dict[str, Any]) -> None:
    """While the host stands still, the backward updates the device's share, or nothing, and does not wait."""
    loop = two_sides(mesh, fields)
    before = {param: param.detach().to_local().clone() for param in loop.model.parameters()}
    with host_worker_gate.closed(loop.optimizer):
        loop.backward(3)
        assert changed_on(loop, before) == {"host": {False}, "device": {fields.get("overlap") == "iteration"}}
        assert not waits
        loop.step()
        host = engine_of(loop.optimizer).host
        assert all(mark.ended.done() for mark in host.ended.values())
    assert changed_on(loop, before) == {"host": {True}, "device": {True}}
    assert waits
    assert same(plain(mesh), loop)


def test_a_look_behind_the_backward_waits(mesh: DeviceMesh, waits: Waits) -> None:
    """Reads give state and counters from after the update.

    Where updates wait for ``step()``, a look is the habit ``read-between``.
    """
    loop, expected = two_sides(mesh, POLICIES["iteration"]), plain(mesh)
    with host_worker_gate.closed(loop.optimizer):
        loop.backward(3)
        for name in host_names(loop.optimizer):
            state = loop.optimizer.state[loop.model.get_parameter(name)]
            for key, value in expected.optimizer.state[expected.model.get_parameter(name)].items():
                assert torch.equal(local(state[key]), local(value))
        assert waits
        loop.step()
    assert same(expected.train(3, first=4), loop.train(3, first=4))


# Faults --------------------------------------------------------------------------------------------------------------


class BoomError(Exception):
    pass


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Updates on the host of parameters with these names fail."""
    names: list[str] = []
    update = cpu_update.update_bucket

    def maybe(step: Any, ranges: Any, states: Any) -> None:
        if any(bound.shard.name in names for bound in ranges):
            raise BoomError("out of order")
        update(step, ranges, states)

    monkeypatch.setattr(cpu_update, "update_bucket", maybe)
    return names


@EVERY_POLICY
def test_an_exception_in_the_thread(mesh: DeviceMesh, failing: list[str], fields: dict[str, Any]) -> None:
    alone, loop = plain(mesh, 3), two_sides(mesh, fields)
    parts = loop.model, loop.optimizer, loop.schedulers[0]
    saved, seen = copy.deepcopy([part.state_dict() for part in parts]), [*loop.seen]
    broken = host_names(loop.optimizer)[-1]
    failing.append(broken)
    with pytest.raises(RuntimeError, match=f"BoomError: out of order.*{broken}.* may be half updated") as error:
        loop.train(2, first=3)
    refused = error.value if isinstance(error.value.__cause__, BoomError) else error.value.__cause__
    assert isinstance(refused.__cause__, BoomError)
    failing.clear()
    for action in (loop.optimizer.step, loop.optimizer.state_dict, lambda: remove_offload(loop.optimizer)):
        with pytest.raises(RuntimeError, match=r"refused: .*BoomError"):
            action()
    assert any("BoomError" in note for note in loop.optimizer.offload_report().notes)
    for part, state in zip(parts, saved, strict=True):
        part.load_state_dict(state)
    loop.optimizer.zero_grad()
    loop.seen = seen
    assert same(alone.train(3, first=3), loop.train(3, first=3))


def test_a_look_tells_of_an_update_that_fails_meanwhile(mesh: DeviceMesh, failing: list[str], waits: Waits) -> None:
    loop = two_sides(mesh, POLICIES["iteration"])
    (param, *_) = host_params(loop.optimizer)
    failing.append(host_names(loop.optimizer)[0])
    with host_worker_gate.closed(loop.optimizer):
        loop.backward(3)
        with pytest.raises(RuntimeError, match=r"a look at the state refused: .*BoomError"):
            loop.optimizer.state[param]
    assert waits


def test_later_buckets_of_a_failed_step_are_left_alone(failing: list[str]) -> None:
    # One layer each: 512 parameters have the state of one bucket on the host, which is four times that of a device.
    net, optimizer = linear(4, (16, 32), bucket_bytes=1024)
    backward(net)
    optimizer.step()
    before = [param.detach().clone() for param in net.parameters()]
    backward(net)
    failing.append("1.weight")
    with pytest.raises(RuntimeError, match=r"1\.weight may be half updated"):
        optimizer.step()
    assert [*map(torch.equal, before, net.parameters())] == [False, True, True, True]


def test_a_step_that_is_interrupted_while_it_waits_for_new_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host has made in it is not in ``optimizer.state``: the next step must not begin anew in silence."""
    plain, run = pair(None, policy(0.5), fused_adamw, net=Net)

    def interrupted(self: HostUpdates) -> Any:
        raise KeyboardInterrupt

    start = [one.copy() for one in (plain, run)]
    with monkeypatch.context() as patch:
        patch.setattr(HostUpdates, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.train(1)
    for action in (run.optimizer.step, run.optimizer.state_dict):
        with pytest.raises(RuntimeError, match=r"refused: .*KeyboardInterrupt"):
            action()
    for one, its in zip((plain, run), start, strict=True):
        one.restore(its)
    run.clear()
    run.seen.clear()
    assert_same_each_step(plain, run, 3)


class LostMark:
    """Of a copy that the device could not make."""

    def synchronize(self) -> None:
        raise BoomError("lost")


@pytest.mark.parametrize("which", ["_issue_downloads", "_issue_uploads", "_download"])
def test_a_copy_that_fails_is_the_step_s_failure(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    net, optimizer = linear()
    download = HostUpdates._download

    def failing(self: HostUpdates, job: HostJob, *args: Any) -> Any:
        if which != "_download":
            raise BoomError("lost")
        slot = download(self, job, *args)
        job.arrived = LostMark()  # type: ignore[assignment]
        return slot

    backward(net)
    optimizer.step()
    monkeypatch.setattr(HostUpdates, which, failing)
    backward(net)
    with pytest.raises(RuntimeError, match="BoomError: lost"):
        optimizer.step()


# Lifetimes -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_garbage_collection")
def test_thread_and_memory_go_with_the_last_optimizer() -> None:
    nets, optimizers = map(list, zip(*(linear() for _ in range(2)), strict=True))
    engines = [weakref.ref(engine_of(optimizer)) for optimizer in optimizers]
    for net, optimizer in zip(nets, optimizers, strict=True):
        backward(net)
        optimizer.step()
    threads = [one for one in threading.enumerate() if one.name.startswith("fsdp_offload host updates")]
    assert len(threads) == 2
    memory = [weakref.ref(engine_of(one).host._buffers) for one in optimizers]
    del optimizer
    optimizers.pop()
    assert [engine() is None for engine in engines] == [False, True]
    assert [slots() is None for slots in memory] == [False, True]
    optimizers.pop()
    assert [engine() is None for engine in engines] == [True, True]
    assert [slots() is None for slots in memory] == [True, True]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_gradients_are_let_go_when_they_have_been_read() -> None:
    net, optimizer = linear(4)
    backward(net)
    gradients = [weakref.ref(param.grad) for param in net.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    assert [gradient() for gradient in gradients] == [None] * 4


def test_weights_loaded_after_the_optimizer_was_dropped_stay(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was dropped between a backward and ``step()``, while the host was at work."""
    loop = two_sides(mesh, POLICIES["iteration"])
    weights = {name: value.detach().clone() for name, value in loop.model.state_dict().items()}
    reached, opened, update = threading.Semaphore(0), threading.Event(), HostUpdates._update

    def updating(self: HostUpdates, job: HostJob) -> None:
        reached.release()
        assert opened.wait(host_worker_gate.TIMEOUT_SECONDS)
        update(self, job)

    monkeypatch.setattr(HostUpdates, "_update", updating)
    loop.backward(3)
    ended = [mark.ended for mark in engine_of(loop.optimizer).host.ended.values()]
    assert reached.acquire(timeout=host_worker_gate.TIMEOUT_SECONDS)
    engine = weakref.ref(engine_of(loop.optimizer))
    del loop.optimizer, loop.schedulers[0]
    gc.collect()
    assert engine() is None
    timer = threading.Timer(0.2, opened.set)
    timer.start()
    loop.model.load_state_dict(weights)
    timer.join()
    assert all(one.result(60) for one in ended)
    assert all(torch.equal(local(param), local(weights[name])) for name, param in loop.model.named_parameters())


FORKING = """
from tests.cpu.test_host_fraction import fused_adamw, host_names, policy
from tests.forks import in_forked_child
from tests.overlapping import assert_same_each_step, pair
from tests.parity import Net

def train():
    both = pair(None, policy(0.5), fused_adamw, net=Net)
    assert_same_each_step(*both, 2)
    return bool(host_names(both[1].optimizer))

of_parent = pair(None, policy(0.5), fused_adamw, net=Net)
assert_same_each_step(*of_parent, 2)
assert in_forked_child(train) == 0
assert_same_each_step(*of_parent, 2)
"""


def test_a_forked_child_has_threads_of_its_own() -> None:
    """In a fresh process: once autograd has threads, torch refuses a backward in a forked child."""
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


EXITING = """
import torch
from torch import nn
from fsdp_offload import OffloadPolicy, offload_optimizer

net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
optimizer = torch.optim.AdamW(net.parameters(), fused=True)
offload_optimizer(optimizer, policy=OffloadPolicy(host_fraction=1.0, bucket_bytes=1 << 20))
engine = vars(optimizer)["_offload_engine"].engine
for _ in range(2):
    net(torch.ones(1, 512)).sum().backward()
    optimizer.step()
engine.host.finish = engine.host.wait = lambda: None  # leaves the threads at work
net(torch.ones(1, 512)).sum().backward()
optimizer.step()
"""


SAVING = """
import atexit
atexit.register(lambda: print(len(optimizer.state_dict()["state"])))
"""


@pytest.mark.long
@pytest.mark.parametrize("ending", ["", SAVING, "raise SystemExit(3)", "raise ValueError"])
def test_the_interpreter_ends_while_the_thread_works(ending: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EXITING + ending],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == {"raise SystemExit(3)": 3, "raise ValueError": 1}.get(ending, 0)
    assert done.stdout == ("16\n" if ending == SAVING else "")
    assert "Fatal" not in done.stderr
    assert "terminate" not in done.stderr


@pytest.mark.parametrize("waits", [True, False])
def test_an_interrupt_while_slots_grow_loses_none(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """Neither while the host works, nor while memory is locked for larger ones."""
    host = HostUpdates(optim.AdamW, capabilities_of(optim.AdamW), policy(1.0), CPU)
    host.reserve(1024)
    slots = host._buffers
    with monkeypatch.context() as patch:
        place, name = (HostUpdates, "wait") if waits else (cpu_update, "Region")
        patch.setattr(place, name, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            host.reserve(2048)
    assert host._buffers is slots
    assert slots.qsize() == 2
    assert host.missing_bytes(2048) == 2 * 1024
