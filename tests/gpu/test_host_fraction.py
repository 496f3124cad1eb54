"""A share updated on the host, on real streams: the same bits whichever side is slow, others where a wait is missing.

The reference is two plain optimizers: one on the device, and one with CPU copies of the host's parameters, whose
gradients and results are copied by hand.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy, remove_offload
from fsdp_offload.cpu_update.fingerprint import Fingerprint, Hasher
from fsdp_offload.cpu_update.job import HostJob
from fsdp_offload.cpu_update.mirror import Mirror
from fsdp_offload.cpu_update.updates import HostUpdates
from fsdp_offload.cpu_update.worker import host_worker
from tests import host_worker_gate
from tests.overlapping import POLICIES, Loop, Net, deafen
from tests.parity import attach, same_bits

LONG_CYCLES = 40_000_000  # longer than the host takes to issue what follows, so that a missing wait is surely seen
HELD_CYCLES = 2_000_000_000  # about 1 s
SIZES = {"bucket_bytes": 256 << 10, "device_bytes": 6 * (256 << 10)}
EVERY_POLICY = pytest.mark.parametrize("fields", POLICIES.values(), ids=POLICIES)
FRACTIONS = pytest.mark.parametrize("fraction", [0.4, 1.0])


def net() -> Net:
    return Net(width=128, layers=5)


def adamw(params: Any) -> Optimizer:
    return optim.AdamW(params, lr=0.02, fused=True)


def policy_of(fields: dict[str, Any], fraction: float, **more: Any) -> OffloadPolicy:
    return OffloadPolicy(**{**SIZES, **fields, **more}, host_fraction=fraction)


def host_names(loop: Loop) -> list[str]:
    return [shard.name for shard in vars(loop.optimizer)["_offload_engine"].engine.plan.host_shards()]


class Halves(Optimizer):
    """Plain optimizers: one for the device, and one for CPU copies of some parameters."""

    def __init__(self, params: dict[str, nn.Parameter], on_host: set[str], make: Callable[[Any], Optimizer]) -> None:
        self.copies = {params[name]: nn.Parameter(local(params[name]).cpu()) for name in params if name in on_host}
        self.host = make(list(self.copies.values())) if self.copies else None
        rest = [param for name, param in params.items() if name not in on_host]
        self.device = make(rest) if rest else None
        super().__init__(list(params.values()), {"lr": 0.02})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for inner in (self.device, self.host):
            if inner is not None:
                for group in inner.param_groups:
                    group["lr"] = self.param_groups[0]["lr"]
        for param, copy in self.copies.items():
            copy.data.copy_(local(param))
            copy.grad = None if param.grad is None else local(param.grad).cpu()
        if self.device is not None:
            self.device.step()
        if self.host is not None:
            self.host.step()
        for param, copy in self.copies.items():
            local(param).data.copy_(copy)

    def state_of(self, param: Tensor) -> dict[str, Any]:
        if param in self.copies:
            assert self.host is not None
            return self.host.state[self.copies[param]]
        assert self.device is not None
        return self.device.state[param]


def local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def reference(mesh: DeviceMesh, names: list[str], steps: int = 8) -> Loop:
    return Loop(mesh, lambda params: halves(params, names), None, net=net).train(steps)


def halves(params: Any, names: list[str]) -> Optimizer:
    all_names = [name for name, _ in net().named_parameters()]
    return Halves(dict(zip(all_names, params, strict=True)), set(names), adamw)


def differences(plain: Loop, offloaded: Loop) -> list[str]:
    assert isinstance(plain.optimizer, Halves)
    found = [] if plain.seen == offloaded.seen else ["losses"]
    offloaded.optimizer.synchronize()  # type: ignore[attr-defined]
    others = dict(offloaded.model.named_parameters())
    for name, param in plain.model.named_parameters():
        other = others[name]
        if not same_bits(local(param), local(other)):
            found.append(name)
        for key, value in plain.optimizer.state_of(param).items():
            if not same_bits(local(value).cpu(), local(offloaded.optimizer.state[other][key]).cpu()):
                found.append(f"{key} of {name}")
    return found


@pytest.fixture
def slow_streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """``slow_streams("down")`` puts a busy kernel before what goes down (or up) for the host."""

    def install(which: str) -> None:
        name = {"down": "_issue_downloads", "up": "_issue_uploads"}[which]
        method = getattr(HostJob, name)

        def slowed(self: HostJob, *args: Any) -> None:
            lane = self.lanes[which == "up"]
            with lane.running():
                torch.cuda._sleep(LONG_CYCLES // 8)
            method(self, *args)

        monkeypatch.setattr(HostJob, name, slowed)

    yield install
    torch.cuda.synchronize()


@pytest.mark.parametrize("slow", ["", "down", "up"])
@FRACTIONS
@EVERY_POLICY
def test_same_bits(
    mesh: DeviceMesh, slow_streams: Callable[[str], None], fields: dict[str, Any], fraction: float, slow: str
) -> None:
    if slow:
        slow_streams(slow)
    loop = Loop(mesh, adamw, policy_of(fields, fraction), net=net).train(8)
    names = host_names(loop)
    assert names
    assert differences(reference(mesh, names), loop) == []


def test_other_bits_without_the_wait_for_gradients(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite can fail."""

    def late(loop: Loop, step: int) -> None:
        loop.backward(step)
        torch.cuda._sleep(LONG_CYCLES)
        for param in loop.model.parameters():
            param.grad.mul_(2)
        loop.step()

    def train(loop: Loop) -> Loop:
        return loop.train(6, late)

    loop = train(Loop(mesh, adamw, policy_of({}, 1.0), net=net))
    expected = Loop(mesh, lambda params: halves(params, host_names(loop)), None, net=net)
    assert differences(train(expected), loop) == []
    monkeypatch.setattr(HostUpdates, "wait", lambda *_: None)
    broken = train(Loop(mesh, adamw, policy_of({}, 1.0), net=net))
    assert differences(expected, broken) != []


NOT_WRITTEN_IN_BACKWARD = {name: fields for name, fields in POLICIES.items() if fields.get("overlap") != "iteration"}


def written_late(loop: Loop, step: int) -> None:
    """Writes that no version counts, of some parameters and not in each step, and late on the device."""
    loop.backward(step)
    if step % 2:
        torch.cuda._sleep(LONG_CYCLES)
        for number, param in enumerate(loop.model.parameters()):
            if number % 3 == step % 3:
                local(param).data.mul_(0.9)
    loop.step()


def weights_down_bytes(loop: Loop) -> int:
    """Of parameters that came down in the last step."""
    host = vars(loop.optimizer)["_offload_engine"].engine.host
    host.wait_quietly()
    return sum(job.weights_down_bytes for job in host._jobs.values())


@pytest.mark.parametrize("slow", ["", "down", "up"])
@pytest.mark.parametrize("fields", NOT_WRITTEN_IN_BACKWARD.values(), ids=NOT_WRITTEN_IN_BACKWARD)
def test_writes_are_followed_and_nothing_else_comes_down(
    mesh: DeviceMesh, slow_streams: Callable[[str], None], fields: dict[str, Any], slow: str
) -> None:
    if slow:
        slow_streams(slow)
    loop = Loop(mesh, adamw, policy_of(fields, 1.0), net=net)
    seen = []
    for step in range(6):
        loop.train(1, written_late, first=step)
        seen.append(weights_down_bytes(loop))
    everything = sum(local(param).nbytes for param in loop.model.parameters())
    assert seen[0] == everything
    assert [nbytes > 0 for nbytes in seen[1:]] == [True, False, True, False, True]
    expected = Loop(mesh, lambda params: halves(params, host_names(loop)), None, net=net).train(6, written_late)
    assert differences(expected, loop) == []


def test_other_bits_without_the_comparison(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mirror, "compare", lambda self, changed, hasher: changed.fill_(False))
    loop = Loop(mesh, adamw, policy_of({}, 1.0), net=net).train(6, written_late)
    expected = Loop(mesh, lambda params: halves(params, host_names(loop)), None, net=net).train(6, written_late)
    assert differences(expected, loop) != []


def test_other_bits_if_the_comparison_is_too_early(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes down has to wait for what the user has issued before ``step()``."""
    monkeypatch.setattr(HostUpdates, "wait", lambda *_: None)
    loop = Loop(mesh, adamw, policy_of({}, 1.0), net=net).train(6, written_late)
    expected = Loop(mesh, lambda params: halves(params, host_names(loop)), None, net=net).train(6, written_late)
    assert differences(expected, loop) != []


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64], ids=str
)
def test_fingerprints_on_the_device(device: torch.device, dtype: torch.dtype) -> None:
    """The same as on the CPU, and any byte counts."""
    hashers = Hasher(torch.device("cpu")), Hasher(device)
    tensors = [torch.randn(size, dtype=dtype) for size in (3, 1023, 70_001, 3_000_001)]
    found = []
    for hasher in hashers:
        there = [tensor.to(hasher.weights.device, copy=True) for tensor in tensors]
        made = Fingerprint(tensor.view(torch.uint8) for tensor in there)
        for at in (0, 2):
            out = torch.empty(made.rows, dtype=torch.int64, device=hasher.weights.device)
            made.write(out, hasher)
            found.append(out.cpu())
            there[at].view(torch.uint8)[-1] ^= 1
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])


def test_other_bits_without_the_wait_before_the_gather(
    mesh: DeviceMesh, slow_streams: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_streams("up")
    deafen("compute", monkeypatch.setattr)
    loop = Loop(mesh, adamw, policy_of({"overlap": "forward"}, 1.0), net=net).train(8)
    assert differences(reference(mesh, host_names(loop)), loop) != []


def test_a_slow_host_never_blocks_the_device(mesh: DeviceMesh) -> None:
    loop = Loop(mesh, adamw, policy_of({"overlap": "forward"}, 0.4), net=net).train(3)
    loop.optimizer.synchronize()
    names = set(host_names(loop))
    before = {name: local(param).clone() for name, param in loop.model.named_parameters()}
    with host_worker_gate.closed(loop.device):
        loop.backward(3)
        loop.step()
        torch.cuda.synchronize()
        changed = {name for name, param in loop.model.named_parameters() if not torch.equal(local(param), before[name])}
        assert changed == before.keys() - names
    loop.optimizer.synchronize()
    assert differences(reference(mesh, sorted(names), 4), loop) == []


def test_counters_are_where_they_are_read(mesh: DeviceMesh) -> None:
    """On the host while that updates; after a load and a removal where the optimizer put them."""
    loop = Loop(mesh, adamw, None, net=net).train(2)
    params = list(loop.model.parameters())
    assert {loop.optimizer.state[param]["step"].device.type for param in params} == {"cuda"}
    attach(loop.optimizer, model=loop.model, policy=policy_of({}, 0.4))
    loop.train(2, first=2)
    on_host = [shard.param for shard in vars(loop.optimizer)["_offload_engine"].engine.plan.host_shards()]
    for param in params:
        counter = loop.optimizer.state[param]["step"]
        assert counter.device.type == ("cpu" if any(param is one for one in on_host) else "cuda")
        assert counter == 4
    saved = loop.optimizer.state_dict()
    loop.optimizer.load_state_dict(saved)
    loop.train(1, first=4)
    remove_offload(loop.optimizer)
    assert {loop.optimizer.state[param]["step"].device.type for param in params} == {"cuda"}
    loop.train(1, first=5)
    assert all(loop.optimizer.state[param]["step"] == 6 for param in params)


def test_updates_begin_while_the_backward_runs(mesh: DeviceMesh) -> None:
    """What is final is updated while the device is busy with the layers before it, whenever buffers become free."""
    loop = Loop(mesh, adamw, policy_of({"overlap": "iteration"}, 1.0), net=net).train(4)
    late = torch.cuda.Event()

    def hold(*_: object) -> None:
        torch.cuda._sleep(HELD_CYCLES)
        late.record()

    handle = loop.model.blocks[0].register_full_backward_pre_hook(hold)
    loop.model(loop.batch(4)).backward()
    engine = vars(loop.optimizer)["_offload_engine"].engine
    shards = [engine.plan.shards[param] for param in loop.model.blocks[-1].parameters()]
    jobs = [engine.host._jobs[number] for shard in shards for number in shard.buckets]
    assert jobs
    assert all(job.done.wait(60) for job in jobs)
    assert not late.query(), "the updates waited for the whole backward"
    handle.remove()
    loop.step()


def test_a_device_lr_that_a_scheduler_writes(mesh: DeviceMesh) -> None:
    def make(params: Any) -> Optimizer:
        return optim.AdamW(params, lr=torch.tensor(0.02, device="cuda"), fused=True)

    results = []
    for gated in (False, True):
        loop = Loop(mesh, make, policy_of({"overlap": "forward"}, 1.0), net=net)
        for step in range(5):
            loop.backward(step)
            if gated and step > 1:  # the first step waits for the state that it creates, the second is measured alone
                with host_worker_gate.closed(loop.device):
                    loop.step()  # writes the lr when the host has not read it
            else:
                loop.step()
                loop.optimizer.synchronize()
        loop.optimizer.synchronize()
        results.append([local(param).clone() for param in loop.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@FRACTIONS
def test_nothing_is_left_on_the_device(mesh: DeviceMesh, fraction: float) -> None:
    loop = Loop(mesh, adamw, policy_of({"overlap": "iteration"}, fraction), net=net).train(4)
    loop.optimizer.synchronize()
    before, pinned = torch.cuda.memory_allocated(), host_worker(loop.device)._slot_bytes
    loop.train(10, first=4)
    loop.optimizer.synchronize()
    assert torch.cuda.memory_allocated() <= before
    assert host_worker(loop.device)._slot_bytes == pinned
