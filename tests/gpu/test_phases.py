"""Phases on real streams: what leaves is gone, nothing grows, nothing blocks, and every wait is needed."""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy
from fsdp_offload.device.link import DeviceLink
from fsdp_offload.core.attached import Engine
from fsdp_offload.engine.executor import Pipeline
from tests.overlapping import POLICIES, Loop, Net, adamw, same
from tests.parity import attach, leaves
from tests.policies import with_share

KIB, MIB = 1 << 10, 1 << 20
SLEEP_CYCLES = 2_000_000  # about 1 ms: longer than the copies here
LONG_CYCLES = 40_000_000  # longer than the host takes to issue what follows, so that a missing wait is surely seen
BLOCKED_CYCLES = 1_000_000_000  # about 0.5 s: no call may last until the device has done that
PHASES = ("offload", "release", "reload")
SIZES = {"bucket_bytes": 256 * KIB, "passing": 5 * 256 * KIB, "staying": MIB}
EVERY_POLICY = pytest.mark.parametrize("fields", [{}, *POLICIES.values()], ids=["step", *POLICIES])

SHAPES = [(4096, 4096), (4096,), (8192, 2048), (1000, 4099)]
ROUNDING_BYTES = 2 * MIB  # torch's allocator does not divide a block if less than 1 MiB would be left of it
COUNTER_BYTES = 512  # what the allocator takes for one ``step`` of a fused optimizer, which is on the device


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.synchronize()


def go_through(optimizer: Optimizer, phases: Sequence[str]) -> None:
    """Nothing for a plain optimizer, which has no phases."""
    for phase in phases if is_offloaded(optimizer) else ():
        getattr(optimizer, f"{phase}_states")()


def is_offloaded(optimizer: Optimizer) -> bool:
    return "_offload_engine" in vars(optimizer)


def engine_of(optimizer: Optimizer) -> Engine:
    return vars(optimizer)["_offload_engine"].engine


def policy_of(fields: dict[str, Any], **more: Any) -> OffloadPolicy:
    return with_share(**{**SIZES, **fields, **more})


def net() -> Net:
    return Net(width=128, layers=5)


# Bytes ---------------------------------------------------------------------------------------------------------------


def make(device: torch.device, shapes: Sequence[tuple[int, ...]]) -> tuple[nn.Module, Optimizer]:
    model = nn.ParameterList(nn.Parameter(torch.randn(shape, device=device)) for shape in shapes)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def step(model: nn.Module, optimizer: Optimizer) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("resident_bytes", [0, 160 * MIB, 1 << 40])
def test_what_was_released_is_not_on_the_device(device: torch.device, resident_bytes: int) -> None:
    model, optimizer = make(device, SHAPES)
    before = torch.cuda.memory_allocated()
    policy = with_share(passing=96 * MIB, bucket_bytes=16 * MIB, staying=resident_bytes)
    attach(optimizer, model=model, policy=policy)
    step(model, optimizer)  # creates the state; what a step loads is known from the next one on
    for number in range(3):
        step(model, optimizer)
        torch.cuda.synchronize()
        report = optimizer.offload_report()
        counter_bytes = 2 * len(SHAPES) * COUNTER_BYTES  # and the example in the layout of each shape
        here = report.resident_state_bytes + report.ring_bytes + counter_bytes
        assert torch.cuda.memory_allocated() - before == pytest.approx(here, abs=ROUNDING_BYTES), f"cycle {number}"
        go_through(optimizer, ["offload", "release"])
        left = torch.cuda.memory_allocated() - before  # in program order: the copies may still run
        assert left == counter_bytes, f"cycle {number}"
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert optimizer.offload_report().resident_state_bytes == optimizer.offload_report().ring_bytes == 0
        go_through(optimizer, ["reload"])
        assert torch.cuda.memory_allocated() - before == pytest.approx(here, abs=ROUNDING_BYTES), f"cycle {number}"


@EVERY_POLICY
def test_what_was_released_is_not_on_the_device_beside_a_model(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    """As with a plain optimizer without its state. Gradients are gone as well, which updates beside the model read."""
    Loop(mesh, adamw, None, net=net).train(1)  # what libraries take the first time is not ours
    gc.collect()
    before = torch.cuda.memory_allocated()
    plain = Loop(mesh, adamw, None, net=net).train(3)
    moments = [state[name] for state in plain.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    state_bytes = sum(leaf.untyped_storage().nbytes() for moment in moments for leaf in leaves(moment))
    without_state = torch.cuda.memory_allocated() - before - state_bytes
    assert state_bytes > 2 * MIB
    del plain, moments
    gc.collect()
    before = torch.cuda.memory_allocated()
    loop = Loop(mesh, adamw, policy_of(fields), net=net)
    for at in range(0, 9, 3):
        loop.train(3, first=at)
        assert torch.cuda.memory_allocated() - before > without_state + SIZES["passing"]
        go_through(loop.optimizer, ["offload", "release"])
        # Each tensor of the plain one's state took a multiple of 512 bytes.
        assert torch.cuda.memory_allocated() - before == pytest.approx(without_state, abs=128 * KIB)


def resident_set_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_two_thousand_cycles_take_no_more_than_a_few(device: torch.device) -> None:
    model, optimizer = make(device, [(512, 512), (65,), (100, 33), (300, 257)])
    policy = with_share(bucket_bytes=256 * KIB, passing=MIB, staying=MIB)
    attach(optimizer, model=model, policy=policy)

    def cycles(count: int) -> tuple[int, int, int]:
        for _ in range(count):
            step(model, optimizer)
            go_through(optimizer, PHASES)
        go_through(optimizer, ["offload", "release"])
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), resident_set_bytes()

    allocated, reserved, resident_set = cycles(100)
    host_bytes = optimizer.offload_report().host_bytes
    after = cycles(2000)
    assert after[0] == allocated
    assert after[1] == reserved
    assert after[2] - resident_set < 8 * MIB  # 4 KiB a cycle would be seen
    assert optimizer.offload_report().host_bytes == host_bytes


# The same bits, whichever lane is slow -------------------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``slow("S")`` puts a busy kernel before all that runs in that lane: actions, and copies of resident state."""

    def install(kind: str, cycles: int = SLEEP_CYCLES) -> None:
        issue, copy_down, copy_up = Pipeline._issue, Pipeline.copy_down, Pipeline.copy_up

        def sleep(pipeline: Pipeline, lane: str) -> None:
            if lane == kind:
                with pipeline._lanes[lane].running():
                    torch.cuda._sleep(cycles)

        def issuing(self: Pipeline, action: Any, update: Any) -> None:
            sleep(self, action.kind)
            issue(self, action, update)

        def copying_down(self: Pipeline, copies: Any) -> Any:
            sleep(self, "S")
            return copy_down(self, copies)

        def copying_up(self: Pipeline, copies: Any) -> Any:
            sleep(self, "L")
            return copy_up(self, copies)

        monkeypatch.setattr(Pipeline, "_issue", issuing)
        monkeypatch.setattr(Pipeline, "copy_down", copying_down)
        monkeypatch.setattr(Pipeline, "copy_up", copying_up)

    yield install
    torch.cuda.synchronize()


def freed_places(optimizer: Optimizer) -> list[tuple[int, int]]:
    """What is about to be released: addresses and bytes of staging and of resident state's block on the device."""
    engine = engine_of(optimizer)
    leaving = [leaf for home in engine.phases._leaving for leaves in home.leaves.values() for leaf in leaves]
    begins = [leaf.data_ptr() for leaf in leaving if leaf.numel()]
    places = [(min(begins), max(begins) - min(begins) + KIB)] if begins else []
    blocks = [block.memory for block in engine._link._ring.values()]
    return places + [(memory.data_ptr(), memory.numel()) for memory in blocks]


def take(places: list[tuple[int, int]]) -> list[Tensor]:
    """Tensors full of sevens, over freed memory: what reads it now is wrong, and so is what still writes it."""
    taken: list[Tensor] = []
    for address, nbytes in places:
        for _ in range(256):
            if any(one.data_ptr() <= address < one.data_ptr() + one.numel() for one in taken):
                break  # perhaps by what was meant for another place
            taken.append(torch.full((nbytes,), 7, dtype=torch.uint8, device="cuda"))
        else:
            raise AssertionError(f"the allocator has not given {nbytes} bytes out again: {memory_at(address)}")
    return taken


def memory_at(address: int) -> str:
    """What the allocator says about it, for a message."""
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"]:
            if block["address"] <= address < block["address"] + block["size"]:
                return f"{block['size']} bytes, {block['state']}, of the pool of stream {segment['stream']}"
    return "no segment has that address"


def assert_untouched(taken: list[Tensor]) -> None:
    torch.cuda.synchronize()
    assert all(bool((tensor == 7).all()) for tensor in taken), "released memory was written"


def megatron(loop: Loop, at: int) -> None:
    """Offload, release what others take at once, reload between the backward and the step."""
    go_through(loop.optimizer, ["offload"])
    places = freed_places(loop.optimizer) if is_offloaded(loop.optimizer) else []
    go_through(loop.optimizer, ["release"])
    taken = take(places) if at > 1 else []
    loop.backward(at)
    assert_untouched(taken)
    del taken
    go_through(loop.optimizer, ["reload"])
    loop.step()


def at_once(loop: Loop, at: int) -> None:
    """All phases right after the step, while its last updates and stores still run."""
    loop.backward(at)
    loop.step()
    go_through(loop.optimizer, ["offload"])
    places = freed_places(loop.optimizer) if is_offloaded(loop.optimizer) else []
    go_through(loop.optimizer, ["release"])
    taken = take(places) if at > 1 else []
    go_through(loop.optimizer, ["reload", "offload", "reload"])
    assert_untouched(taken)


@pytest.fixture(scope="module")
def expected(mesh: DeviceMesh) -> Loop:
    return Loop(mesh, adamw, None, net=net).train(8)


@pytest.mark.parametrize("habit", [megatron, at_once])
@pytest.mark.parametrize("kind", ["none", "L", "U", "S"])
@EVERY_POLICY
def test_same_bits_whichever_lane_is_slow(
    mesh: DeviceMesh,
    expected: Loop,
    slow: Callable[..., None],
    fields: dict[str, Any],
    kind: str,
    habit: Callable[[Loop, int], None],
) -> None:
    slow(kind)
    assert same(expected, Loop(mesh, adamw, policy_of(fields), net=net).train(8, habit))


@pytest.mark.parametrize("kind", ["L", "S"])
@EVERY_POLICY
def test_state_is_right_in_every_phase(
    mesh: DeviceMesh, slow: Callable[..., None], fields: dict[str, Any], kind: str
) -> None:
    """Whoever reads ``optimizer.state`` waits for the copy that is bringing it."""

    def looking(loop: Loop, at: int) -> None:
        loop.backward(at)
        loop.step()
        for phase in (*PHASES, "offload", "reload"):
            go_through(loop.optimizer, [phase])
            for state in loop.optimizer.state.values():
                loop.seen.extend(leaf.cpu().double().sum().item() for leaf in leaves(state["exp_avg"]))

    plain = Loop(mesh, adamw, None, net=net).train(5, looking)
    slow(kind, LONG_CYCLES)
    assert same(plain, Loop(mesh, adamw, policy_of(fields), net=net).train(5, looking))


@EVERY_POLICY
def test_what_was_written_last_leaves(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    """The current stream is still to write resident state when it is told to leave: updates run on another one."""

    def writing(loop: Loop, at: int) -> None:
        loop.backward(at)
        loop.step()
        states = [loop.optimizer.state[param] for param in loop.model.parameters() if param in loop.optimizer.state]
        torch.cuda._sleep(LONG_CYCLES)
        for state in states:
            state["exp_avg"].mul_(0.5)
        go_through(loop.optimizer, PHASES)

    loops = [Loop(mesh, adamw, one, net=net).train(6, writing) for one in (None, policy_of(fields))]
    assert same(*loops)


# Every wait is needed ------------------------------------------------------------------------------------------------


def test_other_bits_if_release_does_not_wait_for_what_leaves(
    mesh: DeviceMesh, expected: Loop, slow: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resident state is read by the copy when others have filled its memory. Where a ring goes too, that waits."""
    slow("S", LONG_CYCLES)
    policy = policy_of({}, staying=1 << 30)
    assert same(expected, Loop(mesh, adamw, policy, net=net).train(8, megatron))
    monkeypatch.setattr(Pipeline, "wait_on_current", lambda *_: None)
    assert not same(expected, Loop(mesh, adamw, policy, net=net).train(8, megatron))


def test_other_bits_if_updates_do_not_wait_for_what_comes_back(
    mesh: DeviceMesh, expected: Loop, slow: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow("L", LONG_CYCLES)
    assert same(expected, Loop(mesh, adamw, policy_of({}), net=net).train(8, megatron))
    copy_up = Pipeline.copy_up

    def without_the_wait(self: Pipeline, copies: Any) -> Any:
        mark = copy_up(self, copies)
        self._before_updates.clear()
        return mark

    monkeypatch.setattr(Pipeline, "copy_up", without_the_wait)
    assert not same(expected, Loop(mesh, adamw, policy_of({}), net=net).train(8, megatron))


def test_others_write_into_staging_if_its_release_does_not_wait(
    mesh: DeviceMesh, expected: Loop, slow: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stores still read the staging memory when somebody else has it."""
    slow("S", LONG_CYCLES)
    policy = policy_of({}, staying=0)
    assert same(expected, Loop(mesh, adamw, policy, net=net).train(8, megatron))

    def without_the_wait(self: DeviceLink, number: int) -> None:
        self._ring.pop(number)

    monkeypatch.setattr(DeviceLink, "_drop", without_the_wait)
    assert not same(expected, Loop(mesh, adamw, policy, net=net).train(8, megatron))


# Nothing blocks ------------------------------------------------------------------------------------------------------


@EVERY_POLICY
def test_no_phase_blocks_the_host(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    """Each returns before the device has done what it was given earlier."""
    loop = Loop(mesh, adamw, policy_of(fields), net=net).train(4, megatron)  # host memory is there, and cached blocks
    go_through(loop.optimizer, PHASES)
    for phase in (*PHASES, *PHASES):
        torch.cuda.synchronize()
        torch.cuda._sleep(BLOCKED_CYCLES)
        passed = torch.cuda.Event()
        passed.record()
        go_through(loop.optimizer, [phase])
        assert not passed.query(), f"{phase}_states() waited for the device"
    torch.cuda.synchronize()
