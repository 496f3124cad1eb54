"""The plan beside a real device: peaks to within a few per cent, and recorded iterations."""

from pathlib import Path

import pytest
import torch

from examples.benchmarks.figures import record_iterations
from examples.benchmarks.timeline import Lane
from examples.benchmarks.train import GPT, Bench
from fsdp_offload import OffloadPolicy
from fsdp_offload.plan import plan
from tests.overlapping import Loop, adamw

pytestmark = pytest.mark.gpu


def test_peaks_and_host_bytes_are_as_predicted(mesh: torch.distributed.DeviceMesh) -> None:
    layers, width, vocabulary, sequences, length = 6, 1024, 8192, 4, 2048
    with torch.device("meta"):
        model = GPT(layers, width, vocabulary)
    asked = {"tokens_per_step": sequences * length, "sequence_length": length, "clip": False}
    asked |= {"micro_batches": 1, "checkpointing": "none"}
    made = plan(model, machine="H200", ranks=1, **asked)
    device = torch.device(mesh.device_type, torch.accelerator.current_device_index())
    bench = Bench(device, layers, width, sequences, length, clip=True, vocabulary=vocabulary)
    for one in made.forecasts[:6]:  # parameters stay
        policy = one.policy
        learns = policy is not None and policy.device_bytes == "auto" and policy.runs_on_into_forward
        with bench.settled(policy) as (optimizer, clip):
            torch.accelerator.reset_peak_memory_stats(device)
            bench.iterate(optimizer, 3, clip=clip)
            peak_bytes = torch.accelerator.max_memory_allocated(device)
            host_bytes = 0 if policy is None else optimizer.offload_report().memory.host_bytes
        if not learns:  # else it depends on waits, and another machine is planned for
            assert one.device.peak_bytes == pytest.approx(peak_bytes, rel=0.03)
        assert one.host_bytes == pytest.approx(host_bytes, rel=0.01)


def test_a_recording_shows_all_lanes(mesh: torch.distributed.DeviceMesh, tmp_path: Path) -> None:
    policy = OffloadPolicy(bucket_bytes=4096, device_bytes=5 * 4096, overlap="iteration")
    loop = Loop(mesh, adamw, policy)
    loop.train(4)
    with record_iterations(loop.model, loop.optimizer, tmp_path) as recording:
        loop.train(3, first=4)
    assert {Lane.COMPUTE, Lane.LOAD, Lane.UPDATE, Lane.STORE} <= {span.lane for span in recording.timeline.spans}
    assert max(one.by_place()["activations, gathered"] for one in recording.moments) > 0
