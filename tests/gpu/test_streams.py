"""A step on real streams, without ``fully_shard``: streams of others, captures, memory, small copies of others."""

import functools
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from fsdp_offload.device.copy_queues import VARIABLE
from fsdp_offload.device.lanes import device_link
from tests.gpu.streams import SLEEP_CYCLES, Slow, Trained, make, policy_of, train

POLICY = policy_of()
STEPS = range(6)


def everything(pair: Trained) -> list[Tensor]:
    """All parameters and state, on the host."""
    model, optimizer = pair
    states = [
        optimizer.state[param][name] for param in model.parameters() for name in ("step", "exp_avg", "exp_avg_sq")
    ]
    return [tensor.detach().cpu() for tensor in [*model.parameters(), *states]]


@functools.cache
def expected() -> list[Tensor]:
    return everything(train(make(None), steps=STEPS))


def same(pair: Trained) -> bool:
    """As plain training; read at once, while stores may still run."""
    return all(map(torch.equal, everything(pair), expected()))


def test_a_stream_of_the_users_own() -> None:
    """Whatever stream is current in step() is the one on which parameters become new."""
    pair = make(POLICY)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train(pair, steps=STEPS)
        torch.cuda._sleep(SLEEP_CYCLES)
    side.synchronize()
    assert same(pair)


def test_two_optimizers_share_streams(slow: Slow) -> None:
    expected()
    slow("S")
    pairs = [make(POLICY), make(POLICY)]
    train(*pairs, steps=STEPS)
    assert all(map(same, pairs))


@pytest.mark.parametrize("most_pieces", [0, 3])
def test_loads_that_are_put_off(slow: Slow, most_pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come when an update or a gather waits for them; with 0, none comes before."""
    monkeypatch.setattr(device_link(torch.device("cuda", 0)).lanes(serial=False).load, "most_pieces", most_pieces)
    expected()
    slow("L")
    assert same(train(make(POLICY), steps=STEPS))


def test_capture_is_refused() -> None:
    pair = make(POLICY, capturable=True)
    model, optimizer = train(pair, steps=[0])
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.synchronize()  # type: ignore[attr-defined]
    captured = torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        captured += 1
        with pytest.raises(RuntimeError, match="CUDA graph"):
            optimizer.step()
    optimizer.step()  # still whole


# --- small copies of others ------------------------------------------------------------------------------------------

SMALL_COPY = """
import torch
from fsdp_offload.device.lanes import device_link

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
