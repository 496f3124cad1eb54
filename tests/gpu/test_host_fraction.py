"""A share updated on the host, on real streams: the same bits whichever side is slow, others where a wait is missing.

The reference is the twin of the conformance suite, which updates CPU copies of the host's parameters.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy, is_offloaded, remove_offload
from fsdp_offload.cpu_update import HostUpdates
from fsdp_offload.engine.engine import engine_of
from tests import host_worker_gate
from tests.conformance import oracle
from tests.conformance.axes import Case
from tests.conformance.oracle import compare
from tests.conformance.programs import HABITS
from tests.gpu.streams import LONG_CYCLES, SIZES, offloaded, plain
from tests.overlapping import POLICIES, Loop
from tests.parity import attach, local

pytestmark = pytest.mark.usefixtures("mesh")

HELD_CYCLES = 2_000_000_000  # about 1 s
SlowStreams = Callable[..., None]


def case_of(overlap: str, fraction: float, program: tuple[str, ...] = ("usual",) * 8) -> Case:
    """Nobody looks before the end, as a look waits for the host."""
    return Case(overlap=overlap, host=fraction, optimizer="adamw-fused", looks="end", program=program)


@pytest.fixture
def slow_streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowStreams]:
    """``slow_streams("down")`` puts a busy kernel before what goes down (or up) for the host."""

    def install(which: str, cycles: int = LONG_CYCLES // 8) -> None:
        name = {"down": "_issue_downloads", "up": "_issue_uploads"}[which]
        method = getattr(HostUpdates, name)

        def slowed(self: HostUpdates, *args: Any) -> Any:
            lane = getattr(self._lanes, which)
            with lane.running():
                torch.cuda._sleep(cycles)
            return method(self, *args)

        monkeypatch.setattr(HostUpdates, name, slowed)

    yield install
    torch.cuda.synchronize()


@pytest.mark.parametrize("slow", ["down", "up"])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("overlap", POLICIES)
def test_same_bits(device: torch.device, slow_streams: SlowStreams, overlap: str, fraction: float, slow: str) -> None:
    slow_streams(slow)
    assert compare(case_of(overlap, fraction), device, HABITS) == []


def gradients_written_late(loop: oracle.Loop, at: int) -> None:
    loop.backward(at)
    torch.cuda._sleep(LONG_CYCLES)
    for param in loop.params:
        if param.grad is not None:
            param.grad.mul_(2)
    loop.step()


def weights_written_late(loop: oracle.Loop, at: int) -> None:
    """Writes that no version counts, of some parameters and not in each step, and late on the device."""
    loop.backward(at)
    if at % 2:
        torch.cuda._sleep(LONG_CYCLES)
        for number, param in enumerate(loop.params):
            if number % 3 == at % 3:
                local(param.detach()).data.mul_(0.9)
    loop.step()


LATE = {"gradients": gradients_written_late, "weights": weights_written_late}


@pytest.mark.parametrize("slow", ["", "down", "up"])
@pytest.mark.parametrize("overlap", ["step", "forward"])
@pytest.mark.parametrize("late", LATE)
def test_late_writes_are_waited_for(
    device: torch.device, slow_streams: SlowStreams, overlap: str, slow: str, late: str
) -> None:
    if slow:
        slow_streams(slow)
    assert compare(case_of(overlap, 1.0, (late,) * 6), device, LATE) == []


@pytest.mark.parametrize("late", LATE)
def test_other_bits_without_the_wait_for_late_writes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """The suite can fail: what goes down has to wait for what the user has issued before ``step()``."""
    download = HostUpdates._download
    monkeypatch.setattr(HostUpdates, "_download", lambda self, job, after: download(self, job, ()))
    assert compare(case_of("step", 1.0, (late,) * 6), device, LATE) != []


def test_a_slow_host_never_blocks_the_backward(device: torch.device) -> None:
    """The device updates its share while the host stands still; ``step()`` waits for the host."""

    def held(loop: oracle.Loop, at: int) -> None:
        if not is_offloaded(loop.optimizer):
            HABITS["usual"](loop, at)
            return
        before = {name: local(param.detach()).clone() for name, param in loop.named.items()}
        with host_worker_gate.closed(loop.optimizer):
            loop.backward(at)
            torch.cuda.synchronize()
            changed = {name for name, param in loop.named.items() if not torch.equal(local(param), before[name])}
            assert changed == before.keys() - loop.hosted()
        loop.step()

    case = case_of("iteration", 0.5, ("usual",) * 5 + ("held",))
    assert compare(case, device, {**HABITS, "held": held}) == []


def counters_of(loop: Loop) -> set[str]:
    return {loop.optimizer.state[param]["step"].device.type for param in loop.params}


def test_counters_are_where_they_are_read(mesh: DeviceMesh) -> None:
    """On the host while that updates; after a load and a removal where the optimizer put them."""
    loop = plain(mesh).train(2)
    assert counters_of(loop) == {"cuda"}
    attach(loop.optimizer, model=loop.model, policy=OffloadPolicy(**SIZES, host_fraction=0.4))
    loop.train(2, first=2)
    on_host = [shard.param for shard in engine_of(loop.optimizer).plan.host_shards()]
    for param in loop.params:
        counter = loop.optimizer.state[param]["step"]
        assert counter.device.type == ("cpu" if any(param is one for one in on_host) else "cuda")
        assert counter == 4
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())
    loop.train(1, first=4)
    remove_offload(loop.optimizer)
    assert counters_of(loop) == {"cuda"}
    loop.train(1, first=5)
    assert all(loop.optimizer.state[param]["step"] == 6 for param in loop.params)


def test_updates_begin_while_the_backward_runs(mesh: DeviceMesh) -> None:
    """What is final is updated while the device is busy with the layers before it, whenever buffers become free."""
    loop = offloaded(mesh, {"overlap": "iteration", "host_fraction": 1.0}).train(4)
    late = torch.cuda.Event()

    def hold(*_: object) -> None:
        torch.cuda._sleep(HELD_CYCLES)
        late.record()

    handle = loop.model.blocks[0].register_full_backward_pre_hook(hold)
    loop.model(loop.batch(4)).backward()
    engine = engine_of(loop.optimizer)
    shards = [engine.plan.shards[param] for param in loop.model.blocks[-1].parameters()]
    marks = [engine.host.ended[number] for shard in shards for number in shard.buckets]
    assert marks
    for mark in marks:
        mark.ended.result(60)
    assert not late.query(), "the updates waited for the whole backward"
    handle.remove()
    loop.step()
