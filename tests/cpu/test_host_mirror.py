"""Parameters that the host updates come down only where somebody else has written them, and then always."""

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy, offload_model, reload_model
from fsdp_offload.core.engine import engine_of
from fsdp_offload.cpu_update import job as host_job
from fsdp_offload.cpu_update.mirror import Mirror
from fsdp_offload.device.lanes import TurnsLane, pieces_of
from tests import host_worker_gate
from tests.overlapping import POLICIES, Loop, policy_of, same
from tests.parity import SMALL, Net, Run, Zoo, attach, make_pair, train_step
from tests.policies import with_share
from tests.tiers import spread

ALL_OF_IT = replace(SMALL, host_fraction=1.0)


def fused_adamw(params: Any) -> Optimizer:
    return optim.AdamW(params, lr=0.02, fused=True)


def weights_down_bytes(optimizer: Optimizer) -> int:
    """Of parameters that came down in the last step."""
    host = engine_of(optimizer).host
    host.wait_quietly()
    return sum(job.weights_down_bytes for job in host._jobs.values())


def local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


# What comes down -----------------------------------------------------------------------------------------------------


@spread(fields=POLICIES, micro_batches={"1": 1, "2": 2})
def test_only_gradients_come_down(mesh: DeviceMesh, fields: dict[str, Any], micro_batches: int) -> None:
    policy = policy_of(fields, host_fraction=1.0)
    plain, loop = (Loop(mesh, fused_adamw, one, micro_batches=micro_batches) for one in (None, policy))
    everything = sum(param.nbytes for param in map(local, loop.model.parameters()))
    seen = []
    for at in range(5):
        plain.train(1, first=at)
        loop.train(1, first=at)
        seen.append(weights_down_bytes(loop.optimizer))
    assert seen == [everything, 0, 0, 0, 0]
    assert same(plain, loop)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "data": lambda p: p.data.copy_(p.data * 0.5),
    "data of the local tensor": lambda p: local(p).data.mul_(0.5),
    "no_grad": lambda p: _no_grad(p.mul_, 0.5),
    "foreach": lambda p: _no_grad(torch._foreach_mul_, [p], 0.5),
    "foreach on the local tensor": lambda p: torch._foreach_mul_([local(p)], 0.5),
    "numpy": lambda p: local(p).numpy().__imul__(0.5),
    "storage": lambda p: local(p).untyped_storage().fill_(0),
    "one element": lambda p: local(p).view(-1)[-1:].data.add_(1),
    "halves exchanged": lambda p: local(p).data.copy_(local(p).roll(local(p).shape[0] // 2, 0)),
    "-0.0": lambda p: local(p).view(-1)[:1].data.fill_(-0.0),
    "another storage": lambda p: setattr(getattr(p, "_local_tensor", p), "data", local(p) * 0.5),
}


def _no_grad(function: Callable[..., object], *args: Any) -> None:
    with torch.no_grad():
        function(*args)


@spread(how={how: how for how in WRITES}, sharded={"sharded": True, "whole": False})
def test_every_write_is_followed(mesh: DeviceMesh, how: str, sharded: bool) -> None:
    plain, loop = (written(mesh, policy, how, sharded=sharded) for policy in (None, ALL_OF_IT))
    assert all(torch.equal(local(one), local(other)) for one, other in zip(plain, loop, strict=True))


def written(mesh: DeviceMesh, policy: OffloadPolicy | None, how: str, *, sharded: bool) -> list[Tensor]:
    """Parameters after some steps, with a write of one of them in between."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 1))
    if sharded:
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    optimizer = fused_adamw(model.parameters())
    if policy is not None:
        attach(optimizer, model=model, policy=policy)

    def step() -> None:
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, 0.1 * number)
        optimizer.step()

    for _ in range(2):
        step()
    WRITES[how](model[1].weight)
    step()
    if policy is not None:
        assert 0 < weights_down_bytes(optimizer) < sum(local(param).nbytes for param in model.parameters())
    step()
    if policy is not None:
        assert weights_down_bytes(optimizer) == 0
    return list(model.parameters())


def test_without_the_comparison_writes_are_lost(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite can fail."""
    monkeypatch.setattr(Mirror, "compare", lambda self, changed, hasher: changed.fill_(False))
    with pytest.raises(AssertionError):
        test_every_write_is_followed(mesh, "data", sharded=True)


def test_the_sign_of_a_zero_is_followed() -> None:
    net = nn.Linear(4, 4, bias=False)
    optimizer = attach(optim.AdamW(net.parameters(), lr=0.0, weight_decay=0.0, fused=True), policy=ALL_OF_IT)
    for zero in (0.0, -0.0, 0.0, 0.0):
        written = not torch.equal(net.weight.data.view(torch.int32), torch.full((4, 4), zero).view(torch.int32))
        net.weight.data.fill_(zero)
        net.weight.grad = torch.zeros(4, 4)
        optimizer.step()
        assert bool(weights_down_bytes(optimizer)) == written


def test_a_write_that_is_undone_is_none() -> None:
    net = nn.Linear(16, 16)
    optimizer = attach(fused_adamw(net.parameters()), policy=ALL_OF_IT)
    for at in range(4):
        net(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        kept = net.weight.data.clone()
        net.weight.data.zero_()
        net.weight.data.copy_(kept)
        assert weights_down_bytes(optimizer) == (net.weight.nbytes + net.bias.nbytes if at == 0 else 0)


def test_parameters_without_a_gradient_may_be_written_meanwhile() -> None:
    """Their place in the mirror is as old as their last update."""

    def train(run: Run, at: int) -> None:
        run.optimizer.zero_grad()
        run.loss(at).backward()
        for number, param in enumerate(run.params.values()):
            if (at + number) % 3 == 0:
                param.grad = None
        run.optimizer.step()
        for number, param in enumerate(run.params.values()):
            if (at + number) % 3 == 0 and at % 2:
                param.data.mul_(0.9)

    pair = make_pair(Net, fused_adamw, policy=with_share(ALL_OF_IT, bucket_bytes=1 << 14, passing=1 << 16))
    pair.train(9, train)


@pytest.mark.parametrize("kind", ["transposed", "strided"])
def test_parameters_that_are_not_contiguous(kind: str) -> None:
    def make() -> nn.Module:
        net = nn.Linear(12, 16)
        memory = torch.randn(12, 32)
        net.weight = nn.Parameter(memory[:, :16].t() if kind == "strided" else memory[:, :16].contiguous().t())
        return net

    def train(run: Run, at: int) -> None:
        for param in run.params.values():
            param.grad = torch.ones_like(param) * (at + 1)
        run.optimizer.step()
        if at % 2:
            run.params["weight"].data.mul_(0.5)

    # The fused kernels of torch take any parameter's memory for dense.
    made = fused_adamw if kind == "transposed" else lambda params: optim.RMSprop(params, lr=0.02)
    pair = make_pair(make, made, policy=ALL_OF_IT)
    pair.train(5, train)


def test_another_storage_at_the_same_time(mesh: DeviceMesh) -> None:
    """The model sleeps, and its parameters get other memory, or the same: whatever it is, it is looked at."""
    plain, loop = (Loop(mesh, fused_adamw, one).train(3) for one in (None, policy_of({}, host_fraction=0.6)))
    plain.train(3, first=3)
    for at in range(3):
        offload_model(loop.model)
        reload_model(loop.model, free_host_memory=bool(at % 2))
        loop.train(1, first=3 + at)
    assert same(plain, loop)


def test_after_a_failure_the_mirror_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(Net, fused_adamw, policy=replace(ALL_OF_IT, bucket_bytes=1 << 20))
    pair.train(2)
    run, update = pair.offloaded, host_job.update_bucket
    weights, state = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))

    def failing(*args: Any) -> None:
        update(*args)
        raise ValueError("half way")

    with monkeypatch.context() as patched:
        patched.setattr(host_job, "update_bucket", failing)
        with pytest.raises(RuntimeError, match="half way"):
            train_step(run, 2)
    assert all(torch.equal(value, weights[name]) for name, value in run.model.state_dict().items())
    run.optimizer.load_state_dict(state)
    pair.plain.optimizer.load_state_dict(copy.deepcopy(state))  # which torch lists otherwise then
    pair.train(1)
    trained = [param for param in run.params.values() if param.grad is not None]
    assert weights_down_bytes(run.optimizer) == sum(param.nbytes for param in trained)


class Turns(TurnsLane):
    """Without streams: notes how much was copied in each turn."""

    def __init__(self, turn_bytes: int) -> None:
        self._in_use = threading.RLock()
        self._piece_bytes = 0
        self._turn_bytes = turn_bytes
        self.turns: list[int] = []

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _take_turns(self) -> Any:
        self.turns.append(self._piece_bytes)
        self._piece_bytes = 0


def test_uploads_are_divided_into_pieces() -> None:
    """So that small copies of others need not wait for long."""
    sources = [torch.arange(size, dtype=torch.uint8) for size in (60, 30, 20, 100, 5, 95, 1)]
    targets = [torch.zeros_like(source) for source in sources]
    lane = Turns(100)
    lane.copy_all(targets[:4], sources[:4])
    lane.copy_all(targets[4:], sources[4:])
    assert lane.turns == [90, 20, 100, 100]
    assert all(torch.equal(one, other) for one, other in zip(targets, sources, strict=True))


def test_loads_and_stores_are_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: None)
    sources = [torch.arange(size, dtype=torch.int16).to(torch.uint8) for size in (60, 340, 100, 0, 7)]
    targets = [torch.zeros_like(source) for source in sources]
    lane = Turns(100)
    for pair in zip(targets, sources, strict=True):
        lane.copy([pair])
    assert lane.turns == [60, 100, 100, 100, 40, 100]
    assert all(torch.equal(one, other) for one, other in zip(targets, sources, strict=True))


def test_pieces_fill_as_few_turns_as_possible_about_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: None)
    source = torch.arange(10_000, dtype=torch.int16).to(torch.uint8)
    target = torch.zeros_like(source)
    cuts = [(0, 300), (300, 300), (300, 9_000), (9_000, 10_000)]
    lane = Turns(4096)
    copies = [(target[begin:end], source[begin:end]) for begin, end in cuts]
    assert [one.numel() for one, _ in pieces_of(copies, 4096)] == [300, 3284, 3584, 1832, 1000]
    lane.copy(copies)
    assert lane.turns == [3584, 3584]
    assert torch.equal(target, source)
    assert pieces_of([], 4096) == []


# Memory --------------------------------------------------------------------------------------------------------------


def test_its_memory_is_counted_and_goes_with_it() -> None:
    net = nn.Linear(64, 64, bias=False)
    plain, mirrored = (
        attach(fused_adamw([nn.Parameter(net.weight.detach().clone())]), policy=replace(SMALL, host_fraction=fraction))
        for fraction in (0.0, 1.0)
    )
    of_plain, of_mirrored = (one.offload_report().memory.host_bytes for one in (plain, mirrored))
    assert of_mirrored - of_plain == net.weight.nbytes
    policy = replace(ALL_OF_IT, host_limit_bytes=of_plain + net.weight.nbytes // 2)
    with pytest.raises(MemoryError):
        attach(fused_adamw(net.parameters()), policy=policy)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("cls", [optim.AdamW, optim.RMSprop, optim.SGD])
def test_other_dtypes(cls: type[Optimizer], dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"momentum": 0.9} if cls is optim.SGD else {}
    # The kernel that the host takes; torch's fused SGD is wrong in bf16.
    if dtype is torch.float64 or (cls is optim.AdamW and not dtype.is_complex):
        options |= {"fused": True} if cls is not optim.RMSprop else {}
    pair = make_pair(Zoo, lambda params: cls(params, lr=0.02, **options), dtype=dtype, policy=ALL_OF_IT)
    pair.train(3)
    assert weights_down_bytes(pair.offloaded.optimizer) == 0
    for run in pair:
        next(iter(run.params.values())).data.mul_(0.5)
    pair.train(1)
    assert weights_down_bytes(pair.offloaded.optimizer) > 0


# What a step starts from ---------------------------------------------------------------------------------------------


def test_betas_in_a_tuple_that_somebody_writes(mesh: DeviceMesh) -> None:
    """The step counts with what they were when it was called, also where the host has not begun yet."""

    def make(params: Any) -> Optimizer:
        return optim.AdamW(params, betas=(torch.tensor(0.9), torch.tensor(0.999)), foreach=False, capturable=False)

    results = []
    for gated in (False, True):
        loop = Loop(mesh, make, policy_of({"overlap": "forward"}, host_fraction=1.0))
        for at in range(5):
            loop.backward(at)
            if gated and at > 1:  # the first step waits for the state that it makes, the second is measured alone
                with host_worker_gate.closed():
                    loop.step()
                    _write_betas(loop.optimizer)
            else:
                loop.step()
                loop.optimizer.synchronize()  # type: ignore[attr-defined]
                _write_betas(loop.optimizer)
        loop.optimizer.synchronize()  # type: ignore[attr-defined]
        results.append([local(param).clone() for param in loop.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def _write_betas(optimizer: Optimizer) -> None:
    for beta in optimizer.param_groups[0]["betas"]:
        beta.mul_(0.9)


@spread(
    pairs=True,
    found_inf={"finite": False, "inf": True},
    scale={"1024": 2.0**10, "3000": 3000.0},
    dtype={"fp32": torch.float32, "bf16": torch.bfloat16},
)
def test_gradients_are_unscaled_as_without_offload(dtype: torch.dtype, scale: float, found_inf: bool) -> None:
    def train(run: Run, at: int) -> list[float]:
        scaler = run.parts.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=scale))
        run.optimizer.zero_grad()
        scaler.scale(run.loss(at)).backward()
        if found_inf and at == 1:
            next(iter(run.params.values())).grad.view(-1)[0] = torch.inf
        scaler.step(run.optimizer)
        sums = [float(p.grad.double().abs().sum()) for p in run.params.values() if p.grad is not None]
        scaler.update(scale)
        return sums

    pair = make_pair(Net, fused_adamw, dtype=dtype, policy=replace(SMALL, host_fraction=0.5))
    pair.train(4, train)
