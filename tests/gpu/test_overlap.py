"""Overlap on real streams: the same bits whichever lane is slow, and other bits as soon as a wait is missing."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from fsdp_offload import OffloadPolicy
from fsdp_offload.core.engine import Engine, engine_of
from tests.overlapping import POLICIES, Loop, Net, adamw, deafen, same, slow_down

SLEEP_CYCLES = 2_000_000  # about 1 ms: longer than anything else that a group does here
LONG_CYCLES = 40_000_000  # longer than the host takes to issue what follows, so that a missing wait is surely seen
SIZES = {"bucket_bytes": 256 << 10, "device_bytes": 6 * (256 << 10)}
EVERY_POLICY = pytest.mark.parametrize("fields", POLICIES.values(), ids=POLICIES)
BESIDE = pytest.mark.parametrize("overlap", ["forward", "iteration"])
Slow = Callable[..., None]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """As ``slow_down``, for one test."""
    yield lambda kind, cycles=SLEEP_CYCLES: slow_down(kind, cycles, monkeypatch.setattr)
    torch.cuda.synchronize()


def net() -> Net:
    return Net(width=128, layers=5)


def offloaded(mesh: DeviceMesh, fields: dict[str, Any], make: Callable[[Any], Optimizer] = adamw, **more: Any) -> Loop:
    return Loop(mesh, make, OffloadPolicy(**{**SIZES, **fields}), net=net, **more)


@pytest.fixture(scope="module")
def expected(mesh: DeviceMesh) -> Loop:
    return Loop(mesh, adamw, None, net=net).train(8)


@EVERY_POLICY
def test_same_bits_serially(mesh: DeviceMesh, expected: Loop, fields: dict[str, Any]) -> None:
    assert same(expected, offloaded(mesh, {**fields, "serial": True}).train(8))


def others_take_what_is_free(loop: Loop, step: int) -> None:
    """Fill memory that somebody has let go of on the compute stream, whoever still reads it."""
    loop.backward(step)
    loop.step()
    sizes = (*[1] * 64, *[1 << 10] * 16, *[1 << 15] * 16, 1 << 16, 1 << 18, 1 << 20)
    _ = [torch.full((numel,), 7.0, device="cuda") for numel in sizes]


@pytest.mark.parametrize("capturable", [False, True])
@EVERY_POLICY
def test_tensors_that_a_scheduler_writes(
    mesh: DeviceMesh, slow: Slow, fields: dict[str, Any], capturable: bool
) -> None:
    """And that live until the last update has read them."""

    def make(params: Any) -> Optimizer:
        lr = torch.tensor(0.02, device="cuda")
        return AdamW(params, lr=lr, fused=not capturable, foreach=capturable, capturable=capturable)

    plain = Loop(mesh, make, None, net=net).train(6)
    slow("U", LONG_CYCLES)
    assert same(plain, offloaded(mesh, fields, make).train(6, others_take_what_is_free))


def test_a_scale_that_its_scaler_writes(mesh: DeviceMesh, slow: Slow) -> None:
    """Right after the step, in place, while fused updates are still to read it."""

    def train(loop: Loop) -> list[Tensor]:
        scaler = torch.amp.GradScaler("cuda", init_scale=4.0, growth_interval=1)
        for step in range(6):
            scaler.scale(loop.model(loop.batch(step))).backward()
            scaler.step(loop.optimizer)
            scaler.update()
            loop.optimizer.zero_grad()
        return loop.everything()

    plain = train(Loop(mesh, adamw, None, net=net))
    slow("U", LONG_CYCLES)
    assert all(map(torch.equal, plain, train(offloaded(mesh, POLICIES["forward"]))))


@BESIDE
def test_gradients_live_until_updates_have_read_them(
    mesh: DeviceMesh, expected: Loop, slow: Slow, overlap: str
) -> None:
    slow("U", LONG_CYCLES)
    assert same(expected, offloaded(mesh, POLICIES[overlap]).train(8, others_take_what_is_free))


@pytest.mark.parametrize("deaf", ["compute", "store", "load"])
def test_other_bits_without_a_wait(
    mesh: DeviceMesh, expected: Loop, slow: Slow, monkeypatch: pytest.MonkeyPatch, deaf: str
) -> None:
    """The suite can fail: gathers and stores do not wait for updates, loads not for stores."""
    slow("S" if deaf == "load" else "U", LONG_CYCLES)
    deafen(deaf, monkeypatch.setattr)
    assert not same(expected, offloaded(mesh, POLICIES["forward"]).train(8))


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
    assert same(expected, offloaded(mesh, POLICIES["iteration"]).train(8))
    deafen("update", monkeypatch.setattr)
    # Streams come from a pool: now and then the reductions of a model have the one of our updates, and are in order.
    loops = [offloaded(mesh, POLICIES["iteration"]).train(8) for _ in range(2)]
    assert not all(same(expected, loop) for loop in loops)


@EVERY_POLICY
def test_nothing_is_left_on_the_device(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    loop = offloaded(mesh, fields).train(4)
    loop.optimizer.synchronize()
    before = torch.cuda.memory_allocated()
    loop.train(10, first=4)
    loop.optimizer.synchronize()
    assert torch.cuda.memory_allocated() <= before


@BESIDE
def test_auto_grows_where_compute_waits(mesh: DeviceMesh, slow: Slow, overlap: Any) -> None:
    expected = Loop(mesh, adamw, None, net=net).train(20)
    slow("L", 10 * SLEEP_CYCLES)  # far slower than this forward, also on a slow host
    loop = Loop(mesh, adamw, OffloadPolicy(overlap=overlap, bucket_bytes=256 << 10), net=net)
    before = engine_of(loop.optimizer).staging_bytes()
    assert same(expected, loop.train(20))
    assert engine_of(loop.optimizer).staging_bytes() > before


@pytest.mark.parametrize("kind", ["none", "L", "U", "S"])
@BESIDE
def test_same_bits_with_blocks_that_come_and_go(
    mesh: DeviceMesh, expected: Loop, slow: Slow, overlap: Any, kind: str
) -> None:
    """Memory of a block is given out again, to activations and to other blocks, while its copies may still run."""

    taken: list[Tensor] = []

    def resize(loop: Loop, step: int) -> None:
        engine = engine_of(loop.optimizer)
        assert isinstance(engine, Engine)
        loop.backward(step)
        loop.step()
        for pool in engine.core.cache.pools:
            engine.core.cache.resize(pool, pool.least if step % 2 else pool.most)
        taken.extend(torch.full((1 << 18,), 7, dtype=torch.uint8, device="cuda") for _ in range(8))

    slow(kind)
    assert same(expected, offloaded(mesh, POLICIES[overlap]).train(8, resize))
    torch.cuda.synchronize()
    assert all(bool((one == 7).all()) for one in taken), "memory that was given back has been written"


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's compiler has much to say: about .grad, TensorFloat32
@EVERY_POLICY
def test_same_bits_with_compiled_blocks(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    def compile_blocks(model: Net) -> None:
        for block in model.blocks:
            block.compile()

    plain = Loop(mesh, adamw, None, net=net, prepare=compile_blocks).train(6)
    assert same(plain, offloaded(mesh, fields, prepare=compile_blocks).train(6))
