"""Overlap on real streams: what no axis of ``test_conformance`` has, and other bits where a wait is missing."""

import traceback
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from fsdp_offload import clip_grad_norm_
from fsdp_offload.engine.engine import Engine, engine_of
from tests.conformance.oracle import ALWAYS, NEVER
from tests.gpu.streams import LONG_CYCLES, SLEEP_CYCLES, Slow, offloaded, plain
from tests.overlapping import EVERY_POLICY, POLICIES, Loop, Net, deafen, same, speculation_of

BESIDE = pytest.mark.parametrize("overlap", ["forward", "iteration"])


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # nothing was captured before the refusal
def test_a_graph_of_forward_and_backward_is_refused(mesh: DeviceMesh) -> None:
    """As torchtitan's trainer captures one. Torch may add that streams of ``fully_shard`` have not joined again."""
    loop = offloaded(mesh, {}).train(2)
    tokens = loop.batch(20)
    with pytest.raises(RuntimeError) as raised, torch.cuda.graph(torch.cuda.CUDAGraph()):
        loop.model(tokens)
    assert "disable_cuda_graphs" in "".join(traceback.format_exception(raised.value))


@pytest.fixture(scope="module")
def expected(mesh: DeviceMesh) -> Loop:
    return plain(mesh).train(8)


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

    plainly = plain(mesh, make).train(6)
    slow("U", LONG_CYCLES)
    assert same(plainly, offloaded(mesh, fields, make).train(6, others_take_what_is_free))


@BESIDE
def test_gradients_live_until_updates_have_read_them(
    mesh: DeviceMesh, expected: Loop, slow: Slow, overlap: str
) -> None:
    slow("U", LONG_CYCLES)
    assert same(expected, offloaded(mesh, POLICIES[overlap]).train(8, others_take_what_is_free))


def test_if_the_link_is_late_some_updates_run_on_into_the_forward(
    mesh: DeviceMesh, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdp_offload.core.loop.BACKWARD", 0.0)
    expected = plain(mesh).train(14)
    slow("U", LONG_CYCLES)
    loop = offloaded(mesh, POLICIES["iteration"]).train(14, others_take_what_is_free)
    assert engine_of(loop.optimizer).core.reductions.later
    assert same(expected, loop)


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


def clipped_now_and_then(loop: Loop, at: int) -> None:
    loop.clipped_step(at, ALWAYS if at % 12 == 9 else NEVER)


ON_CPU = {f"on the CPU {share}": {"overlap": "iteration", "host_fraction": share} for share in (0.4, 1.0)}
HABITS = {name: (fields, None) for name, fields in {**POLICIES, **ON_CPU}.items()}
HABITS["clipped"] = POLICIES["iteration"], clipped_now_and_then


@pytest.mark.parametrize(("fields", "habit"), HABITS.values(), ids=HABITS)
def test_nothing_is_left_on_the_device(mesh: DeviceMesh, fields: dict[str, Any], habit: Any) -> None:
    loop, taken = offloaded(mesh, fields), []
    for first in (0, 12):
        loop.train(12, habit, first)
        loop.optimizer.synchronize()
        host = engine_of(loop.optimizer).host
        taken.append((torch.cuda.memory_allocated(), 0 if host is None else host._buffer_bytes))
    assert taken[1][0] <= taken[0][0]
    assert taken[1][1] == taken[0][1]
    assert speculation_of(loop).rolled_back == (2 if habit else 0)


@BESIDE
def test_auto_grows_where_compute_waits(mesh: DeviceMesh, slow: Slow, overlap: str) -> None:
    plainly = plain(mesh).train(20)
    slow("L", 10 * SLEEP_CYCLES)  # far slower than this forward, also on a slow host
    loop = offloaded(mesh, {"overlap": overlap, "device_bytes": "auto"})
    before = engine_of(loop.optimizer).core.cache.lasting_bytes
    assert same(plainly, loop.train(20))
    assert engine_of(loop.optimizer).core.cache.lasting_bytes > before


@pytest.mark.parametrize("kind", ["none", "L", "U", "S"])
@BESIDE
def test_same_bits_with_blocks_that_come_and_go(
    mesh: DeviceMesh, expected: Loop, slow: Slow, overlap: str, kind: str
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

    plainly = plain(mesh, prepare=compile_blocks).train(6)
    assert same(plainly, offloaded(mesh, fields, prepare=compile_blocks).train(6))


def test_a_guess_that_stands_does_not_wait_for_the_device(mesh: DeviceMesh) -> None:
    """The host waits for the factor alone: compute goes on with work that was issued before."""
    loop = offloaded(mesh, POLICIES["iteration"]).train_clipped([NEVER] * 5)
    torch.cuda.synchronize()
    loop.backward(5)
    clip_grad_norm_(loop.optimizer, NEVER)  # without a look at the norm, which would wait
    behind = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    behind.record()
    loop.step()
    assert not behind.query()
    assert speculation_of(loop).rolled_back == 0
