"""Parameters on the host, on real streams: the same bits whichever lane is slow, other bits where a wait is missing."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy
from fsdp_offload.device.lanes import HostMark
from fsdp_offload.engine.executor import Pipeline
from fsdp_offload.engine.window import Window
from tests.overlapping import HABITS, NOT_IN_BACKWARD, POLICIES, Loop, Net, adamw, same
from tests.policies import with_share

SLEEP_CYCLES = 2_000_000  # about 1 ms
LONG_CYCLES = 40_000_000  # longer than the host takes to issue what follows, so that a missing wait is surely seen
SIZES = {"bucket_bytes": 256 << 10, "passing": 5 * (256 << 10)}
EVERY_POLICY = pytest.mark.parametrize("fields", POLICIES.values(), ids=POLICIES)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``slow("S")`` puts a busy kernel before each store, on its stream; ``"W"`` before each load for a gather."""

    def install(kind: str, cycles: int = SLEEP_CYCLES) -> None:
        issue, load = Pipeline._issue, Window._load

        def slowed(self: Pipeline, action: Any, update: Any) -> None:
            if action.kind == kind:
                with self._lanes[kind].running():
                    torch.cuda._sleep(cycles)
            issue(self, action, update)

        def slowly_loaded(self: Window, *arguments: Any, **options: Any) -> Any:
            if kind == "W":
                with self._loads.running():
                    torch.cuda._sleep(cycles)
            return load(self, *arguments, **options)

        monkeypatch.setattr(Pipeline, "_issue", slowed)
        monkeypatch.setattr(Window, "_load", slowly_loaded)

    yield install
    torch.cuda.synchronize()


def net() -> Net:
    return Net(width=128, layers=5)


def policy_of(fields: dict[str, Any], **more: Any) -> OffloadPolicy:
    return with_share(**{**SIZES, **fields, "parameters": True, **more})


@pytest.fixture(scope="module")
def expected(mesh: DeviceMesh) -> Loop:
    return Loop(mesh, adamw, None, net=net).train(8)


@pytest.mark.parametrize("kind", ["none", "L", "U", "S", "W"])
@EVERY_POLICY
def test_same_bits_whichever_lane_is_slow(
    mesh: DeviceMesh, expected: Loop, slow: Callable[..., None], fields: dict[str, Any], kind: str
) -> None:
    slow(kind)
    assert same(expected, Loop(mesh, adamw, policy_of(fields), net=net).train(8))


@pytest.mark.parametrize("fields", [POLICIES["forward"], POLICIES["iteration"]], ids=["forward", "iteration"])
def test_same_bits_where_the_window_comes_and_goes(mesh: DeviceMesh, expected: Loop, fields: dict[str, Any]) -> None:
    policy = OffloadPolicy(parameters=True, bucket_bytes=256 << 10, **fields)
    assert same(expected, Loop(mesh, adamw, policy, net=net).train(8))


@pytest.mark.parametrize("habit", ["clip", "evaluate", "save-and-load", "write-state"])
@EVERY_POLICY
def test_habits(mesh: DeviceMesh, slow: Callable[..., None], fields: dict[str, Any], habit: str) -> None:
    if fields.get("overlap") == "iteration" and habit in NOT_IN_BACKWARD and habit != "clip":
        habit = "evaluate"
    plain = Loop(mesh, adamw, None, net=net).train(9, HABITS[habit])
    slow("S")
    assert same(plain, Loop(mesh, adamw, policy_of(fields), net=net).train(9, HABITS[habit]))


@EVERY_POLICY
def test_a_gather_that_does_not_wait_for_its_load_is_seen(
    mesh: DeviceMesh, expected: Loop, slow: Callable[..., None], monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    slow("W", LONG_CYCLES)
    load = Window._load

    def unwaited(self: Window, *arguments: Any, **options: Any) -> Any:
        entry = load(self, *arguments, **options)
        if entry is not None:
            entry.loaded = HostMark()
        return entry

    monkeypatch.setattr(Window, "_load", unwaited)
    assert not same(expected, Loop(mesh, adamw, policy_of(fields), net=net).train(8))


def test_where_the_parameters_are(mesh: DeviceMesh) -> None:
    loop = Loop(mesh, adamw, policy_of(POLICIES["iteration"]), net=net)
    params = list(loop.model.parameters())
    assert {param.device.type for param in params} == {"cuda"}
    assert {param._local_tensor.device.type for param in params} == {"cpu"}
    assert all(param._local_tensor.is_pinned() for param in params)
    loop.train(6)
    assert all(value.to_local().device.type == "cpu" for value in loop.model.state_dict().values())
    other = torch.zeros_like(params[0], device="cuda")
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"lives on the host \(OffloadPolicy\(parameters=True\)\)"):
        params[0].add(other)
