"""What the report says of an iteration on a device: how long the model's stream stood still, by marks that cost it
nothing."""

from typing import Any

import pytest
import torch
from fsdp_offload.engine.executor import Pipeline
from torch.distributed.device_mesh import DeviceMesh

from tests.overlapping import POLICIES, Loop, Net, adamw
from tests.policies import with_share

SLEEP_CYCLES = 10_000_000  # some milliseconds: longer than all that a group of this model computes
FOREVER_CYCLES = 2_000_000_000  # about a second: longer than the host takes to issue an iteration
SIZES = {"bucket_bytes": 256 << 10, "passing": 5 * (256 << 10)}


def loop_of(mesh: DeviceMesh, fields: dict[str, Any], layers: int = 5) -> Loop:
    return Loop(mesh, adamw, with_share(**{**SIZES, **fields}), net=lambda: Net(width=128, layers=layers))


def sleep_ms(cycles: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


@pytest.mark.parametrize("name", POLICIES)
def test_loads_that_are_late_stall_an_iteration(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    loop = loop_of(mesh, POLICIES[name]).train(10)  # whatever is to be learnt has been
    issue, loads = Pipeline._issue, []

    def issue_late(self: Pipeline, action: Any, update: Any) -> None:
        if action.kind == "L":
            loads.append(action.bucket)
            with self._lanes["L"].running():
                torch.cuda._sleep(SLEEP_CYCLES)
        issue(self, action, update)

    monkeypatch.setattr(Pipeline, "_issue", issue_late)
    loop.train(3, first=10)
    report = loop.optimizer.offload_report()
    late_ms = len(loads) / 3 * sleep_ms(SLEEP_CYCLES)
    assert len(loads) == 3 * report.buckets
    # Some loads begin while the backward computes, and the first in step() before its end.
    assert late_ms / 2 < report.stalled_ms < report.iteration_ms
    # What loads wait for before they begin is none of their own time.
    assert 0 < report.transfers_alone_ms < late_ms / 2
    assert 0 < report.bound_ms <= report.iteration_ms


def test_a_transfer_that_takes_long_is_in_the_bound(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_of(mesh, {"overlap": "forward"})
    load = Pipeline._load

    def load_slowly(self: Pipeline, bucket: Any, number: int, lane: Any) -> None:
        with lane.running():
            torch.cuda._sleep(SLEEP_CYCLES)  # between the marks of the load
        load(self, bucket, number, lane)

    monkeypatch.setattr(Pipeline, "_load", load_slowly)
    report = loop.train(7).optimizer.offload_report()
    passing = 1 - report.ring_bytes / report.host_state_bytes  # the rest may be loaded behind the backward
    loads_ms = passing * report.buckets * sleep_ms(SLEEP_CYCLES)
    assert report.bound == "B + clip + max(F + U, (1 - r) T)"
    assert 0.8 * loads_ms < report.bound_ms
    assert "The transfers take" in report.advice
    assert report.advice in str(report)


@pytest.mark.parametrize("name", POLICIES)
def test_what_slows_the_model_down_is_contention(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """And does not change what an iteration takes at least: its parts were measured alone."""
    loop = loop_of(mesh, POLICIES[name]).train(19)
    before = loop.optimizer.offload_report()
    loop.model.register_forward_hook(lambda *_: torch.cuda._sleep(FOREVER_CYCLES))
    after = loop.train(2, first=19).optimizer.offload_report()
    assert after.bound_ms == pytest.approx(before.bound_ms)
    # The host, which decides how long so small a model computes, issues behind the kernel that slows it down.
    assert after.contention_ms > sleep_ms(FOREVER_CYCLES) - 2 * before.iteration_ms
    assert after.forward_alone_ms > 0
    assert after.backward_alone_ms > 0


def test_the_host_does_not_wait_for_marks(mesh: DeviceMesh) -> None:
    # Few kernels: a full launch queue would make the host wait as well.
    loop = loop_of(mesh, {"overlap": "forward"}, layers=1).train(4)
    batch = loop.batch(0)
    torch.cuda.synchronize()
    torch.cuda._sleep(FOREVER_CYCLES)
    behind_it = torch.cuda.Event()
    behind_it.record()
    loop.model(batch).backward()
    loop.optimizer.step()
    assert not behind_it.query()
    assert loop.optimizer.offload_report().iteration_ms > 0
    assert behind_it.query()
