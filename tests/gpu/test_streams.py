"""Overlap on real streams: the same bits as without offload, and other bits as soon as one kind of wait is missing.

Every lane is slowed down in turn by a busy kernel in front of each of its actions, so that whatever should have waited
for that lane, and does not, reads old bytes.
"""

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.device.copy_queues import VARIABLE
from fsdp_offload.device.lanes import StreamLane
from fsdp_offload.engine.executor import Pipeline
from tests.overlapping import slow_down
from tests.policies import with_share

SLEEP_CYCLES = 4_000_000  # about 2 ms: longer than a copy of any bucket here
POLICY = with_share(passing=5 << 20, bucket_bytes=1 << 20)
STEPS = 6


def make(device: torch.device, *, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    sizes = [(512, 700), (64,), (300, 1100), (1, 1), (7, 12345), (128, 128), (1_000_003,)]
    model = nn.ParameterList(nn.Parameter(torch.randn(size, device=device)) for size in sizes)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for step in range(steps):
        for number, param in enumerate(model.parameters()):
            generator = torch.Generator(param.device).manual_seed(100 * step + number)
            param.grad = torch.randn(param.shape, device=param.device, generator=generator)
        optimizer.step()
        optimizer.zero_grad()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters and state, on the host."""
    states = [
        optimizer.state[param][name] for param in model.parameters() for name in ("step", "exp_avg", "exp_avg_sq")
    ]
    return [tensor.detach().cpu() for tensor in [*model.parameters(), *states]]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@functools.cache
def expected() -> list[torch.Tensor]:
    model, optimizer = make(torch.device("cuda"))
    train(model, optimizer)
    return everything(model, optimizer)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """As ``slow_down``, for one test."""
    yield lambda kind: slow_down(kind, SLEEP_CYCLES, monkeypatch.setattr)
    torch.cuda.synchronize()


def offloaded_result(device: torch.device, policy: OffloadPolicy = POLICY) -> list[torch.Tensor]:
    model, optimizer = make(device)
    offload_optimizer(optimizer, model=model, policy=policy)
    train(model, optimizer)
    return everything(model, optimizer)


@pytest.mark.parametrize("kind", ["none", "L", "U", "S"])
def test_same_bits_whichever_lane_is_slow(device, slow, kind):
    slow(kind)
    assert same(offloaded_result(device), expected())


def test_same_bits_serially(device):
    policy = with_share(passing=5 << 20, bucket_bytes=1 << 20, serial=True)
    assert same(offloaded_result(device, policy), expected())


def test_same_bits_when_the_last_stores_meet_the_next_step(device, slow):
    slow("S")
    model, optimizer = make(device)
    offload_optimizer(optimizer, model=model, policy=OffloadPolicy(bucket_bytes=8 << 20))
    train(model, optimizer)
    assert same(everything(model, optimizer), expected())


@pytest.mark.parametrize(
    ("slow_kind", "deaf_kind"),
    [("L", "U"), ("S", "L"), ("U", "S")],
    ids=["update-before-load", "load-before-store", "store-before-update"],
)
def test_other_bits_without_a_wait(device, slow, monkeypatch, slow_kind, deaf_kind):
    """The suite can fail: leave out the waits of one lane, and the result is wrong."""
    slow(slow_kind)
    wait = StreamLane.wait
    deaf: list[StreamLane] = []

    def deaf_wait(self: StreamLane, mark) -> None:
        if self not in deaf:
            wait(self, mark)

    monkeypatch.setattr(StreamLane, "wait", deaf_wait)
    model, optimizer = make(device)
    offload_optimizer(optimizer, model=model, policy=POLICY)
    train(model, optimizer, steps=2)  # the state exists, so all kinds of actions occur
    engine = optimizer.__dict__["_offload_engine"].engine
    deaf.append(engine._pipeline._lanes[deaf_kind])
    train(model, optimizer)
    torch.cuda.synchronize()
    broken = everything(model, optimizer)
    model, optimizer = make(device)
    train(model, optimizer, steps=2)
    train(model, optimizer)
    assert not same(broken, everything(model, optimizer))


def train_by_turns(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Other parameters in each step, so that buckets pass through other places of the ring."""
    train(model, optimizer, steps=1)
    for step in range(STEPS):
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, 0.1 * step - number) if (number + step) % 3 else None
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["none", "L", "U", "S"])
def test_same_bits_when_buckets_pass_through_other_places(device, slow, kind):
    slow(kind)
    runs = []
    for policy in (None, POLICY):
        model, optimizer = make(device)
        if policy is not None:
            offload_optimizer(optimizer, model=model, policy=policy)
        train_by_turns(model, optimizer)
        runs.append(everything(model, optimizer))
    assert same(*runs)


def test_other_bits_if_other_places_are_taken_at_once(device, slow, monkeypatch):
    """Stores of the step before still read the ring."""
    slow("S")
    model, optimizer = make(device)
    train_by_turns(model, optimizer)
    plain = everything(model, optimizer)
    monkeypatch.setattr(Pipeline, "_after_stores", lambda self: None)
    model, optimizer = make(device)
    offload_optimizer(optimizer, model=model, policy=POLICY)
    train_by_turns(model, optimizer)
    assert not same(plain, everything(model, optimizer))


def test_reading_state_waits_for_its_store(device, slow):
    slow("S")
    model, optimizer = make(device)
    offload_optimizer(optimizer, model=model, policy=POLICY)
    train(model, optimizer)
    assert same(everything(model, optimizer), expected())  # read at once, while stores still sleep


def test_a_stream_of_the_users_own(device):
    """Whatever stream is current in step() is the one on which parameters become new."""
    model, optimizer = make(device)
    offload_optimizer(optimizer, model=model, policy=POLICY)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train(model, optimizer)
        torch.cuda._sleep(SLEEP_CYCLES)
    side.synchronize()
    assert same(everything(model, optimizer), expected())


def test_two_optimizers_share_streams_and_ring(device, slow):
    slow("S")
    pairs = [make(device), make(device)]
    for model, optimizer in pairs:
        offload_optimizer(optimizer, model=model, policy=POLICY)
    for _ in range(1):
        for step in range(STEPS):
            for model, optimizer in pairs:
                for number, param in enumerate(model.parameters()):
                    generator = torch.Generator(device).manual_seed(100 * step + number)
                    param.grad = torch.randn(param.shape, device=device, generator=generator)
                optimizer.step()
    for model, optimizer in pairs:
        assert same(everything(model, optimizer), expected())


def test_no_device_allocation_in_a_steady_step(device):
    model, optimizer = make(device)
    offload_optimizer(optimizer, model=model, policy=POLICY)
    train(model, optimizer, steps=3)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.host_memory_stats()["num_host_alloc"]
    train(model, optimizer, steps=5)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.host_memory_stats()["num_host_alloc"]) == before


# --- small copies of others ------------------------------------------------------------------------------------------

SMALL_COPY = """
import torch
from fsdp_offload.device.link import device_link

device = torch.device("cuda", 0)
link = device_link(device)
state, parameters = link.lanes(serial=False)["L"], link.window_lane(serial=False)
host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
target = torch.empty_like(host, device=device)
small_host = torch.empty(64 << 10, dtype=torch.uint8, pin_memory=True)
small = torch.empty_like(small_host, device=device)
copied, loaded = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
torch.cuda._sleep(40_000_000)
begin = link.lanes(serial=False)["C"].mark()
for lane, copies in ((parameters, 2), (state, 8)):
    lane.wait(begin)
    for _ in range(copies):
        lane.copy(target, host)
state.wait(parameters.mark())
with state.running():
    loaded.record()
torch.cuda._sleep(20_000_000)  # about 10 ms of the 45 that the loads take
small.copy_(small_host, non_blocking=True)
copied.record()
torch.cuda.synchronize()
print("before" if copied.elapsed_time(loaded) > 0 else "after")
"""


@pytest.mark.parametrize(("queues", "copied"), [(None, "before"), ("1", "after")])
def test_a_small_copy_does_not_wait_for_all_loads(queues: str | None, copied: str) -> None:
    """It does where the driver has too few queues: then this test says nothing about the lanes."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= {} if queues is None else {VARIABLE: queues}
    done = subprocess.run(
        [sys.executable, "-c", SMALL_COPY], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [copied], done.stderr
