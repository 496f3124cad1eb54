"""What the report says of an iteration on a device, where it is measured by events."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy, OffloadReport
from fsdp_offload.core.cache import Cache
from fsdp_offload.core.items import Item
from fsdp_offload.engine.engine import engine_of
from tests.gpu.streams import BUCKET_BYTES
from tests.overlapping import POLICIES, Loop, Net, adamw

CYCLES_PER_MS = 2_000_000  # of the fastest clock; measured on a GPU that others use, it would be any number
FOREVER_CYCLES = 2_000_000_000  # about a second: longer than the host takes to issue an iteration

FIELDS = {
    **POLICIES,
    "a number": {"overlap": "iteration", "device_bytes": 5 * BUCKET_BYTES},
    "parameters": {"overlap": "iteration", "parameters": True},
}
EVERY_POLICY = pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)


def loop_of(mesh: DeviceMesh, fields: dict[str, Any], layers: int = 5) -> Loop:
    policy = OffloadPolicy(**{"bucket_bytes": BUCKET_BYTES, **fields})
    return Loop(mesh, adamw, policy, net=lambda: Net(width=128, layers=layers))


def report_of(loop: Loop) -> OffloadReport:
    report: OffloadReport = loop.optimizer.offload_report()  # type: ignore[attr-defined]
    last = report.iteration
    if last is not None:
        assert 0 <= last.stalled_ms <= last.iteration_ms
        assert last.iteration_ms - last.stalled_ms - last.host_ms <= last.bound_ms + 1e-6
        assert last.bound_ms <= last.iteration_ms
    assert str(report)
    return report


@EVERY_POLICY
def test_an_iteration_is_measured_from_the_second_step_on(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    loop = loop_of(mesh, {"device_bytes": 5 * BUCKET_BYTES, **fields})  # "auto" may come to keep all of it
    assert report_of(loop).step is None
    assert report_of(loop.train(1)).iteration is None, "one step ends no iteration"
    for number in range(1, 8):
        report = report_of(loop.train(1, first=number))
        assert report.step is not None
        assert report.iteration is not None
    assert min(report.step.load_gb_per_s or 0, report.step.store_gb_per_s or 0) > 0
    assert report.memory.device_peak_bytes == torch.cuda.max_memory_allocated()
    assert report.memory.pinned


@EVERY_POLICY
def test_loads_that_are_late_stall_an_iteration(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """Every load begins late, one after the other, and all of them later than all that a busy machine could hide."""
    loop = loop_of(mesh, fields).train(10)
    usual = report_of(loop)
    assert usual.step is not None
    assert usual.iteration is not None
    late_ms = 8 * usual.iteration.iteration_ms / max(1, usual.step.loads)
    fetch, late = Cache.fetch, 0

    def fetch_late(self: Cache, item: Item, **options: Any) -> bool:
        nonlocal late
        if item.block is None and item.exists:
            late += 1
            self.lanes.load.run(lambda: torch.cuda._sleep(int(late_ms * CYCLES_PER_MS)))
        return fetch(self, item, **options)

    monkeypatch.setattr(Cache, "fetch", fetch_late)
    found = []
    for step in range(10, 22, 2):
        loop.train(1, first=step)  # its loads are late in the next iteration, and a report would wait for them
        late = 0
        last = report_of(loop.train(1, first=step + 1))
        assert last.iteration is not None
        found.append((last.iteration.stalled_ms, late * late_ms))
    assert any(stalled_ms > sum_ms / 4 > 0 for stalled_ms, sum_ms in found), found


def test_the_host_does_not_wait_for_marks(mesh: DeviceMesh) -> None:
    # Few kernels: a full launch queue would make the host wait as well.
    loop = loop_of(mesh, {"overlap": "forward"}, layers=1).train(4)
    engine_of(loop.optimizer).room = None  # torch's cache is emptied where that grows, which waits
    batch = loop.batch(0)
    torch.cuda.synchronize()
    torch.cuda._sleep(FOREVER_CYCLES)
    behind_it = torch.cuda.Event()
    behind_it.record()
    loop.model(batch).backward()
    loop.optimizer.step()
    assert not behind_it.query()
    assert report_of(loop).iteration is not None
    assert behind_it.query()
