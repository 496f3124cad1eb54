"""A step on real streams: the same bits as without offload, and other bits as soon as one kind of wait is missing.

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
from torch import Tensor, nn
from torch.optim import AdamW

from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.device.copy_queues import VARIABLE
from tests.overlapping import deafen, slow_down

SLEEP_CYCLES = 4_000_000  # about 2 ms: longer than a copy of any bucket here
POLICY = OffloadPolicy(device_bytes=5 << 20, bucket_bytes=1 << 20)
STEPS = 6
Trained = tuple[nn.Module, AdamW]


def make(policy: OffloadPolicy | None) -> Trained:
    torch.manual_seed(0)
    sizes = [(512, 700), (64,), (300, 1100), (1, 1), (7, 12345), (128, 128), (1_000_003,)]
    model = nn.ParameterList(nn.Parameter(torch.randn(size, device="cuda")) for size in sizes)
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
    return model, optimizer if policy is None else offload_optimizer(optimizer, model=model, policy=policy)


def train(pair: Trained, steps: int = STEPS, *, by_turns: bool = False) -> Trained:
    """``by_turns``: other parameters in each step, so that buckets pass through other places."""
    model, optimizer = pair
    for step in range(steps):
        for number, param in enumerate(model.parameters()):
            generator = torch.Generator("cuda").manual_seed(100 * step + number)
            param.grad = torch.randn(param.shape, device="cuda", generator=generator)
            if by_turns and step and (number + step) % 3 == 0:
                param.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return pair


def everything(pair: Trained) -> list[Tensor]:
    """All parameters and state, on the host."""
    model, optimizer = pair
    states = [
        optimizer.state[param][name] for param in model.parameters() for name in ("step", "exp_avg", "exp_avg_sq")
    ]
    return [tensor.detach().cpu() for tensor in [*model.parameters(), *states]]


@functools.cache
def expected(*, by_turns: bool = False) -> list[Tensor]:
    return everything(train(make(None), by_turns=by_turns))


def same(pair: Trained, *, by_turns: bool = False) -> bool:
    """As plain training; read at once, while stores may still run."""
    return all(map(torch.equal, everything(pair), expected(by_turns=by_turns)))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """As ``slow_down``, for one test."""
    yield lambda kind: slow_down(kind, SLEEP_CYCLES, monkeypatch.setattr)
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", ["none", "L", "U", "S"])
@pytest.mark.parametrize("by_turns", [False, True])
def test_same_bits_whichever_lane_is_slow(slow: Callable[[str], None], kind: str, by_turns: bool) -> None:
    expected(by_turns=by_turns)
    slow(kind)
    assert same(train(make(POLICY), by_turns=by_turns), by_turns=by_turns)


@pytest.mark.parametrize(
    ("slow_kind", "deaf"),
    [("L", "compute"), ("S", "load"), ("U", "store")],
    ids=["update-before-load", "load-before-store", "store-before-update"],
)
def test_other_bits_without_a_wait(
    slow: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, slow_kind: str, deaf: str
) -> None:
    """The suite can fail."""
    expected()
    slow(slow_kind)
    deafen(deaf, monkeypatch.setattr)
    trained = train(make(POLICY))
    torch.cuda.synchronize()
    assert not same(trained)


def test_a_stream_of_the_users_own() -> None:
    """Whatever stream is current in step() is the one on which parameters become new."""
    pair = make(POLICY)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train(pair)
        torch.cuda._sleep(SLEEP_CYCLES)
    side.synchronize()
    assert same(pair)


def test_two_optimizers_share_streams(slow: Callable[[str], None]) -> None:
    expected()
    slow("S")
    pairs = [make(POLICY), make(POLICY)]
    for step in range(STEPS):
        for model, optimizer in pairs:
            for number, param in enumerate(model.parameters()):
                generator = torch.Generator("cuda").manual_seed(100 * step + number)
                param.grad = torch.randn(param.shape, device="cuda", generator=generator)
            optimizer.step()
    assert all(map(same, pairs))


def test_a_steady_step_takes_no_memory() -> None:
    """From the driver, neither on the device nor pinned."""
    pair = make(POLICY)
    taken = []
    for _ in range(2):
        train(pair, 5)
        torch.cuda.synchronize()
        taken.append((torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.host_memory_stats()["num_host_alloc"]))
    assert taken[0] == taken[1]


# --- small copies of others ------------------------------------------------------------------------------------------

SMALL_COPY = """
import torch
from fsdp_offload.device.link import device_link

device = torch.device("cuda", 0)
lanes = device_link(device).lanes(serial=False)
loads = lanes.load
host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
target = torch.empty_like(host, device=device)
small_host = torch.empty(64 << 10, dtype=torch.uint8, pin_memory=True)
small = torch.empty_like(small_host, device=device)
copied, loaded = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
torch.cuda._sleep(40_000_000)
loads.wait(lanes.compute.mark())
for _ in range(10):
    loads.copy([(target, host)])
with loads.running():
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
