"""Overlap on real streams: the same bits whichever lane is slow, and other bits as soon as a wait is missing."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy
from fsdp_offload.device.lanes import Copy, TurnsLane
from fsdp_offload.device.link import Allocated, DeviceLink
from fsdp_offload.engine.executor import Pipeline
from fsdp_offload.model import tune_staging as elastic
from tests.overlapping import POLICIES, Loop, Net, adamw, same, slow_down
from tests.policies import with_share

SLEEP_CYCLES = 2_000_000  # about 1 ms: longer than anything else that a group does here
LONG_CYCLES = 40_000_000  # longer than the host takes to issue what follows, so that a missing wait is surely seen
SIZES = {"bucket_bytes": 256 << 10, "passing": 5 * (256 << 10)}
EVERY_POLICY = pytest.mark.parametrize("fields", POLICIES.values(), ids=POLICIES)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """As ``slow_down``, for one test."""
    yield lambda kind, cycles=SLEEP_CYCLES: slow_down(kind, cycles, monkeypatch.setattr)
    torch.cuda.synchronize()


def net() -> Net:
    return Net(width=128, layers=5)


def policy_of(fields: dict[str, Any], **more: Any) -> OffloadPolicy:
    return with_share(**{**SIZES, **fields, **more})


@pytest.fixture(scope="module")
def expected(mesh: DeviceMesh) -> Loop:
    return Loop(mesh, adamw, None, net=net).train(8)


@pytest.mark.parametrize("kind", ["none", "L", "U", "S"])
@EVERY_POLICY
def test_same_bits_whichever_lane_is_slow(
    mesh: DeviceMesh, expected: Loop, slow: Callable[..., None], fields: dict[str, Any], kind: str
) -> None:
    slow(kind)
    assert same(expected, Loop(mesh, adamw, policy_of(fields), net=net).train(8))


@EVERY_POLICY
def test_same_bits_serially(mesh: DeviceMesh, expected: Loop, fields: dict[str, Any]) -> None:
    assert same(expected, Loop(mesh, adamw, policy_of(fields, serial=True), net=net).train(8))


@pytest.mark.parametrize("capturable", [False, True])
@EVERY_POLICY
def test_tensors_that_a_scheduler_writes(
    mesh: DeviceMesh, slow: Callable[..., None], fields: dict[str, Any], capturable: bool
) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        lr = torch.tensor(0.02, device="cuda")
        return torch.optim.AdamW(params, lr=lr, fused=not capturable, foreach=capturable, capturable=capturable)

    plain = Loop(mesh, make, None, net=net).train(6)
    slow("U")
    assert same(plain, Loop(mesh, make, policy_of(fields), net=net).train(6))


def test_other_bits_without_the_wait_before_the_gather(
    mesh: DeviceMesh, expected: Loop, slow: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suite can fail."""
    slow("U", LONG_CYCLES)
    monkeypatch.setattr(Pipeline, "wait_updated", lambda *_: None)
    assert not same(expected, Loop(mesh, adamw, policy_of({"overlap": "forward"}), net=net).train(8))


def test_other_bits_without_the_wait_for_gradients(
    mesh: DeviceMesh, expected: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    reduce = _fsdp_param_group.foreach_reduce

    def late(*args: Any, **kwargs: Any) -> Any:
        reduce_stream = next(arg for arg in args if isinstance(arg, torch.cuda.Stream))
        with torch.cuda.stream(reduce_stream):
            torch.cuda._sleep(LONG_CYCLES)
        return reduce(*args, **kwargs)

    monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", late)
    assert same(expected, Loop(mesh, adamw, policy_of({"overlap": "iteration"}), net=net).train(8))
    monkeypatch.setattr(Pipeline, "updates_after", lambda *_: None)
    # Streams come from a pool: now and then the reductions of a model have the one of our updates, and are in order.
    loops = [Loop(mesh, adamw, policy_of({"overlap": "iteration"}), net=net).train(8) for _ in range(2)]
    assert not all(same(expected, loop) for loop in loops)


def test_other_bits_if_gradients_are_let_go(
    mesh: DeviceMesh, slow: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients have to live until the update has read them, although zero_grad has been called."""

    def fill_free_memory(loop: Loop, step: int) -> None:
        loop.backward(step)
        loop.step()
        for size in (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22):
            torch.full((size,), 7.0, device="cuda")

    plain = Loop(mesh, adamw, None, net=net).train(6, fill_free_memory)
    slow("U")
    policy = policy_of({"overlap": "forward"})
    assert same(plain, Loop(mesh, adamw, policy, net=net).train(6, fill_free_memory))


@EVERY_POLICY
def test_nothing_is_left_on_the_device(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    loop = Loop(mesh, adamw, policy_of(fields), net=net).train(4)
    loop.optimizer.synchronize()
    before = torch.cuda.memory_allocated()
    loop.train(10, first=4)
    loop.optimizer.synchronize()
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize("limited", [False, True])
def test_auto_keeps_what_the_forward_would_wait_for(mesh: DeviceMesh, slow: Callable[..., None], limited: bool) -> None:
    limit = 3 * (256 << 10) if limited else None
    expected = Loop(mesh, adamw, None, net=net).train(11)
    slow("L", 10 * SLEEP_CYCLES)  # far slower than this forward, also on a slow host
    policy = policy_of({"overlap": "forward"}, staying="auto", staying_limit_bytes=limit)
    loop = Loop(mesh, adamw, policy, net=net).train(11)
    assert same(expected, loop)
    report = loop.optimizer.offload_report()
    if limited:
        assert 0 <= report.resident_state_bytes <= limit < report.host_state_bytes
    else:
        assert report.resident_state_bytes > report.host_state_bytes


@pytest.mark.parametrize("kind", ["none", "L", "U", "S"])
@pytest.mark.parametrize("fields", [POLICIES["forward"], POLICIES["iteration"]], ids=["forward", "iteration"])
def test_same_bits_with_staging_that_comes_and_goes(
    mesh: DeviceMesh,
    expected: Loop,
    slow: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    kind: str,
) -> None:
    """Memory of a block is given out again, to activations and to other blocks, while its copies may still run."""
    attached: list[bool] = []
    monkeypatch.setattr(DeviceLink, "allocated_bytes", lambda link: Allocated(0, 1 << 30 if attached else 0))
    monkeypatch.setattr(elastic, "why_not_behind_backward", lambda moving_ms, backward_ms: "")  # however slow they are
    slow(kind)
    policy = with_share(passing="auto", bucket_bytes=256 << 10, **fields)
    loop = Loop(mesh, adamw, policy, net=net)
    attached.append(True)
    assert same(expected, loop.train(8))
    assert loop.optimizer.offload_report().ring_bytes > 4 * policy.bucket_bytes


def test_a_backward_that_is_too_short_for_the_transfers(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured order leaves what the forward needs last for last."""
    expected = Loop(mesh, adamw, None, net=net).train(10)
    copy_pieces = TurnsLane.copy_pieces

    def slow_copy(self: TurnsLane, pieces: Iterable[Copy]) -> None:
        with self.running():
            torch.cuda._sleep(SLEEP_CYCLES)
        copy_pieces(self, pieces)

    monkeypatch.setattr(TurnsLane, "copy_pieces", slow_copy)
    loop = Loop(mesh, adamw, policy_of({"overlap": "iteration"}), net=net).train(10)
    assert same(expected, loop)
    steps = vars(loop.optimizer)["_offload_engine"].engine.steps
    assert sorted(steps.measured_order) == sorted(steps.backward_order) != []
    assert steps.measured_order != steps.backward_order


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's compiler has much to say: about .grad, TensorFloat32
@EVERY_POLICY
def test_same_bits_with_compiled_blocks(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    def compile_blocks(model: Net) -> None:
        for block in model.blocks:
            block.compile()

    plain = Loop(mesh, adamw, None, net=net, prepare=compile_blocks).train(6)
    assert same(plain, Loop(mesh, adamw, policy_of(fields), net=net, prepare=compile_blocks).train(6))
