"""Clipping with updates in the backward, on real streams: the same bits whichever lane is slow."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fsdp_offload.engine.executor import Pipeline
from fsdp_offload.engine.speculation import Speculation
from fsdp_offload.engine.way_back import WayBack
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy
from fsdp_offload.core.attached import engine_of
from fsdp_offload.device.lanes import StreamLane
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


def train(loop: Loop, clipped: Any, norm_type: float = 2.0) -> list[list[torch.Tensor]]:
    """What there is after each step."""
    found = []
    for at in range(STEPS):
        loop.backward(at)
        limit = 1e-3 if at in clipped else 1e9
        norm = nn.utils.clip_grad_norm_(loop.model.parameters(), limit, norm_type=norm_type)
        loop.seen.append(norm.full_tensor().item())
        loop.step()
        found.append([value.clone() for value in loop.everything()] if at % 3 == 2 else [])
    return found


def equal(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


def speculation_of(loop: Loop) -> Speculation:
    engine = engine_of(loop.optimizer)
    assert engine is not None
    return engine.steps.speculation


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``slow("U")`` puts a busy kernel before every action of that kind, on its own stream.

    "kept" is for parameters that go down, "back" for those that come up again.
    """

    def install(kind: str, cycles: int = SLEEP_CYCLES) -> None:
        issue, keep, bring_back = Pipeline._issue, Pipeline.keep_aside, Pipeline.bring_back

        def slowed(self: Pipeline, action: Any, update: Any) -> None:
            if action.kind == kind:
                with self._lanes[kind].running():
                    torch.cuda._sleep(cycles)
            issue(self, action, update)

        def slowly_kept(self: Pipeline, *args: Any, **kwargs: Any) -> Any:
            if kind == "kept":
                with self._lanes["S"].running():
                    torch.cuda._sleep(cycles)
            return keep(self, *args, **kwargs)

        def slowly_brought(self: Pipeline, *args: Any, **kwargs: Any) -> None:
            if kind == "back":
                with self._lanes["L"].running():
                    torch.cuda._sleep(cycles)
            bring_back(self, *args, **kwargs)

        monkeypatch.setattr(Pipeline, "bring_back", slowly_brought)
        monkeypatch.setattr(Pipeline, "_issue", slowed)
        monkeypatch.setattr(Pipeline, "keep_aside", slowly_kept)

    yield install
    torch.cuda.synchronize()


@pytest.fixture(scope="module")
def expected(mesh: DeviceMesh) -> dict[str, list[list[torch.Tensor]]]:
    return {name: train(Loop(mesh, adamw, None, net=net), clipped) for name, clipped in CLIPPED.items()}


@pytest.mark.parametrize("kind", ["none", "L", "U", "S", "kept", "back"])
@pytest.mark.parametrize("clipped", CLIPPED)
def test_same_bits_whichever_lane_is_slow(
    mesh: DeviceMesh,
    expected: dict[str, list[list[torch.Tensor]]],
    slow: Callable[..., None],
    clipped: str,
    kind: str,
) -> None:
    slow(kind)
    loop = Loop(mesh, adamw, policy_of(), net=net)
    assert equal(train(loop, CLIPPED[clipped]), expected[clipped])
    found = speculation_of(loop)
    taken_back = {"never": 0, "once": 1, "twice in a row": 2, "always": 0}[clipped]
    assert found.taken_back == taken_back
    assert (found.committed > 0) == (clipped != "always")


@pytest.mark.parametrize("more", [{"serial": True}, {"staying": 1 << 20}, {"passing": "auto"}], ids=str)
def test_other_policies(
    mesh: DeviceMesh, expected: dict[str, list[list[torch.Tensor]]], slow: Callable[..., None], more: dict[str, Any]
) -> None:
    slow("U")
    loop = Loop(mesh, adamw, policy_of(**more), net=net)
    assert equal(train(loop, CLIPPED["once"]), expected["once"])
    assert speculation_of(loop).taken_back == 1


@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
def test_other_norms(mesh: DeviceMesh, norm_type: float) -> None:
    plain, loop = (Loop(mesh, adamw, policy, net=net) for policy in (None, policy_of()))
    assert equal(train(plain, (7,), norm_type), train(loop, (7,), norm_type))


def test_other_bits_without_the_wait_for_old_parameters(
    mesh: DeviceMesh,
    expected: dict[str, list[list[torch.Tensor]]],
    slow: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The suite can fail."""
    slow("kept", LONG_CYCLES)
    assert equal(train(Loop(mesh, adamw, policy_of(), net=net), CLIPPED["once"]), expected["once"])
    monkeypatch.setattr(WayBack, "wait", lambda *_: None)
    assert not equal(train(Loop(mesh, adamw, policy_of(), net=net), CLIPPED["once"]), expected["once"])


def evaluated_before_the_step(loop: Loop, at: int) -> None:
    """A habit of a loop: it looks at the model between the backward and the step."""
    loop.backward(at)
    if at in (5, 6):
        with torch.no_grad():
            loop.seen.append(loop.model(loop.batch(999)).item())
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1e9)
    loop.step()


def test_other_bits_without_the_wait_for_parameters_that_come_back(
    mesh: DeviceMesh, slow: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suite can fail: who looks at the model would see new parameters."""
    plain = Loop(mesh, adamw, None, net=net).train(9, evaluated_before_the_step)
    slow("back", LONG_CYCLES)
    assert same(plain, Loop(mesh, adamw, policy_of(), net=net).train(9, evaluated_before_the_step))
    bring_back = Pipeline.bring_back

    def without_waits(self: Pipeline, *args: Any) -> None:
        wait = StreamLane.wait
        with monkeypatch.context() as patch:
            patch.setattr(StreamLane, "wait", lambda lane, mark: wait(lane, mark) if lane is self._lanes["L"] else None)
            bring_back(self, *args)

    monkeypatch.setattr(Pipeline, "bring_back", without_waits)
    assert not same(plain, Loop(mesh, adamw, policy_of(), net=net).train(9, evaluated_before_the_step))


def test_a_model_that_is_evaluated_before_the_step(mesh: DeviceMesh, slow: Callable[..., None]) -> None:
    """It sees the parameters from before, although updates run late."""
    plain = Loop(mesh, adamw, None, net=net).train(9, evaluated_before_the_step)
    slow("U", LONG_CYCLES)
    loop = Loop(mesh, adamw, policy_of(), net=net).train(9, evaluated_before_the_step)
    assert same(plain, loop)
    assert speculation_of(loop).taken_back >= 1


def test_nothing_is_left_on_the_device(mesh: DeviceMesh) -> None:
    loop = Loop(mesh, adamw, policy_of(), net=net)
    for first in (0, STEPS):
        for at in range(first, first + STEPS):
            loop.backward(at)
            nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3 if at % STEPS == 9 else 1e9)
            loop.step()
        loop.optimizer.synchronize()  # type: ignore[attr-defined]
        if not first:
            before = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() <= before
    assert speculation_of(loop).taken_back == 2
