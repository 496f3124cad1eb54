"""Clipping with updates in the backward, on real streams: the same bits whichever lane is slow."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy, clip_grad_norm_, is_offloaded
from fsdp_offload.core.engine import Engine, engine_of
from fsdp_offload.core.guesses import WayBack
from tests.clipping import guesses_of
from tests.overlapping import Loop, Net, adamw, same
from tests.policies import with_share

SLEEP_CYCLES = 2_000_000  # about 1 ms: longer than anything else that a group does here
LONG_CYCLES = 40_000_000  # longer than the host takes to issue what follows, so that a missing wait is surely seen
STEPS = 12
CLIPPED = {"never": (), "once": (7,), "twice in a row": (8, 9), "always": range(STEPS)}


def net() -> Net:
    return Net(width=128, layers=5)


def policy_of(**more: Any) -> OffloadPolicy:
    return with_share(**{"overlap": "iteration", "bucket_bytes": 256 << 10, "passing": 5 * (256 << 10), **more})


def clip(loop: Loop, limit: float, norm_type: float = 2.0) -> None:
    is_ours = is_offloaded(loop.optimizer)
    clipped: Any = clip_grad_norm_ if is_ours else nn.utils.clip_grad_norm_
    norm = clipped(loop.optimizer if is_ours else loop.params, limit, norm_type=norm_type)
    loop.seen.append(norm.full_tensor().item())


def train(loop: Loop, clipped: Any, norm_type: float = 2.0) -> list[list[Tensor]]:
    """What there is after each step."""
    found = []
    for at in range(STEPS):
        loop.backward(at)
        clip(loop, 1e-3 if at in clipped else 1e9, norm_type)
        loop.step()
        found.append([value.clone() for value in loop.everything()] if at % 3 == 2 else [])
    return found


def equal(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


def slow_down(loop: Loop, kind: str, cycles: int = SLEEP_CYCLES) -> Loop:
    """Put a busy kernel before everything that a lane is given, on its own stream."""
    engine = engine_of(loop.optimizer)
    assert isinstance(engine, Engine)
    lane: Any = getattr(engine.core.lanes, kind)
    copy, run = lane.copy, lane.run

    def sleep() -> None:
        with lane.running():
            torch.cuda._sleep(cycles)

    def slowly_copied(*args: Any) -> None:
        sleep()
        copy(*args)

    def slowly_run(*args: Any, **kwargs: Any) -> None:
        sleep()
        run(*args, **kwargs)

    lane.copy, lane.run = slowly_copied, slowly_run
    return loop


@pytest.fixture(scope="module")
def expected(mesh: DeviceMesh) -> dict[str, list[list[Tensor]]]:
    return {name: train(Loop(mesh, adamw, None, net=net), clipped) for name, clipped in CLIPPED.items()}


@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("kind", ["compute", "load", "update", "store"])
@pytest.mark.parametrize("clipped", CLIPPED)
def test_same_bits_whichever_lane_is_slow(
    mesh: DeviceMesh, expected: dict[str, list[list[Tensor]]], clipped: str, kind: str, parameters: bool
) -> None:
    loop = slow_down(Loop(mesh, adamw, policy_of(parameters=parameters), net=net), kind)
    assert equal(train(loop, CLIPPED[clipped]), expected[clipped])
    found = guesses_of(loop)
    assert found.taken_back == {"never": 0, "once": 1, "twice in a row": 2, "always": 1}[clipped]
    assert (found.committed > 0) == (clipped != "always")


def test_other_bits_without_the_wait_for_old_parameters(
    mesh: DeviceMesh, expected: dict[str, list[list[Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suite can fail."""

    def slow() -> Loop:
        return slow_down(Loop(mesh, adamw, policy_of(), net=net), "store", LONG_CYCLES)

    assert equal(train(slow(), CLIPPED["once"]), expected["once"])
    keep = WayBack.keep

    def unnoted(self: WayBack, bucket: Any) -> None:
        before = [dict(item.used) for item in bucket.weights]
        keep(self, bucket)
        for item, used in zip(bucket.weights, before, strict=True):
            item.used = used

    monkeypatch.setattr(WayBack, "keep", unnoted)
    assert not equal(train(slow(), CLIPPED["once"]), expected["once"])


def evaluated_before_the_step(loop: Loop, at: int) -> None:
    """A habit of a loop: it looks at the model between the backward and the step."""
    loop.backward(at)
    if at in (5, 6):
        with torch.no_grad():
            loop.seen.append(loop.model(loop.batch(999)).item())
    clip(loop, 1e9)
    loop.step()


@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("kind", ["load", "update"])
def test_a_model_that_is_evaluated_before_the_step(mesh: DeviceMesh, kind: str, parameters: bool) -> None:
    """It sees the parameters from before, although updates run late, or they come back late."""
    plain = Loop(mesh, adamw, None, net=net).train(9, evaluated_before_the_step)
    loop = slow_down(Loop(mesh, adamw, policy_of(parameters=parameters), net=net), kind, LONG_CYCLES)
    assert same(plain, loop.train(9, evaluated_before_the_step))
    assert guesses_of(loop).taken_back >= 1


def test_a_step_that_stands_does_not_wait_for_the_device(mesh: DeviceMesh) -> None:
    """The host waits for the factor alone: compute goes on with work that was issued before."""
    loop = Loop(mesh, adamw, policy_of(), net=net)
    for at in range(5):
        loop.backward(at)
        clip_grad_norm_(loop.optimizer, 1e9)
        loop.step()
    torch.cuda.synchronize()
    loop.backward(5)
    clip_grad_norm_(loop.optimizer, 1e9)
    behind = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    behind.record()
    loop.step()
    assert not behind.query()
    assert guesses_of(loop).taken_back == 0


def test_nothing_is_left_on_the_device(mesh: DeviceMesh) -> None:
    loop = Loop(mesh, adamw, policy_of(), net=net)
    for first in (0, STEPS):
        for at in range(first, first + STEPS):
            loop.backward(at)
            clip(loop, 1e-3 if at % STEPS == 9 else 1e9)
            loop.step()
        loop.optimizer.synchronize()  # type: ignore[attr-defined]
        if not first:
            before = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() <= before
    assert guesses_of(loop).taken_back == 2
