"""The plan beside a real device: peaks to within a few per cent, a machine measured once, and recorded iterations."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from fsdp_offload import OffloadPolicy
from fsdp_offload.bench import plan as bench
from fsdp_offload.bench.train import GPT
from fsdp_offload.figures import Lane, record_iterations
from fsdp_offload.plan import machine_of
from tests.overlapping import Loop, adamw

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore:barrier:UserWarning")  # which device it means is clear with one
def test_peaks_and_host_bytes_are_as_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = dataclasses.replace(bench.CASES["gpt"], build=lambda: GPT(6, 1024, 8192), sequences=4)
    monkeypatch.setitem(bench.CASES, "gpt", case)
    file = tmp_path / "predictions.jsonl"
    bench.main(predict=file, cases="gpt", ranks=1, machine="H200")
    bench.main(compare=file, cases="gpt", iterations=2, seconds=1e6)
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(records) == len(case.policies)
    for record in records:
        if "keeping" not in record["policy"]:
            assert record["predicted_peak_bytes"] == pytest.approx(record["measured_peak_bytes"], rel=0.03)
        assert record["predicted_host_bytes"] == pytest.approx(record["measured_host_bytes"], rel=0.01)


def test_this_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("platformdirs")  # of the extra [plan]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = machine_of("this")
    assert machine.device_bytes == torch.cuda.get_device_properties(0).total_memory
    rates = [value for value in dataclasses.asdict(machine).values() if isinstance(value, float)]
    assert min(rates) > 0
    assert machine.two_way_gb_per_s < 1.1 * (machine.load_gb_per_s + machine.store_gb_per_s)
    (cached,) = (tmp_path / "fsdp_offload").iterdir()
    cached.write_text(json.dumps({**json.loads(cached.read_text()), "kernel_us": 77.0}))
    assert machine_of("this").kernel_us == 77.0


def test_a_recording_shows_all_lanes(mesh: torch.distributed.DeviceMesh, tmp_path: Path) -> None:
    policy = OffloadPolicy(bucket_bytes=4096, device_bytes=5 * 4096, overlap="iteration")
    loop = Loop(mesh, adamw, policy)
    loop.train(4)
    with record_iterations(loop.model, loop.optimizer, tmp_path) as recording:
        loop.train(3, first=4)
    assert {Lane.COMPUTE, Lane.LOAD, Lane.UPDATE, Lane.STORE} <= {span.lane for span in recording.timeline.spans}
    assert max(one.by_place()["activations, gathered"] for one in recording.moments) > 0
