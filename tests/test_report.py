"""``offload_report()``: numbers that add up, and a table that a person reads."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy, OffloadReport, offload_optimizer
from fsdp_offload.report import _bytes

pytestmark = pytest.mark.filterwarnings("ignore:offload_optimizer. The parameters are on the CPU:UserWarning")

POLICY = OffloadPolicy(bucket_bytes=2048, staging_bytes=8192)
NUMELS = (1000, 300, 7, 64)
EXACT_BYTES = sum(2 * 4 * numel for numel in NUMELS)
PADDED_BYTES = sum(2 * -(-4 * numel // 64) * 64 for numel in NUMELS)


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(numel)) for numel in NUMELS]


def step(optimizer: Optimizer) -> OffloadReport:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer.offload_report()


def test_before_the_first_step_everything_is_reserved_and_nothing_has_moved() -> None:
    report = offload_optimizer(torch.optim.AdamW(params()), policy=POLICY).offload_report()
    assert report.optimizer == "AdamW"
    assert (report.host_state_bytes, report.host_bytes) == (EXACT_BYTES, PADDED_BYTES)
    assert (report.resident_state_bytes, report.other_state_bytes, report.left_out) == (0, 0, ())
    assert report.loaded_bytes == report.stored_bytes == 0
    assert report.step_ms == report.update_ms == report.exposed_ms == 0
    assert report.load_gb_per_s == report.store_gb_per_s == 0
    assert (report.pinned, report.device_peak_bytes) == (False, 0)


def test_the_first_step_only_stores_and_later_ones_move_all_of_it_both_ways() -> None:
    optimizer = offload_optimizer(torch.optim.AdamW(params()), policy=POLICY)
    first, second = step(optimizer), step(optimizer)
    assert (first.loaded_bytes, first.stored_bytes) == (0, PADDED_BYTES)
    assert (second.loaded_bytes, second.stored_bytes) == (PADDED_BYTES, PADDED_BYTES)
    assert first.load_gb_per_s == 0
    assert min(first.store_gb_per_s, second.load_gb_per_s, second.store_gb_per_s) > 0


def test_times_add_up() -> None:
    optimizer = offload_optimizer(torch.optim.AdamW(params()), policy=POLICY)
    for report in (step(optimizer), step(optimizer)):
        assert 0 < report.update_ms < report.step_ms
        assert report.exposed_ms == pytest.approx(report.step_ms - report.update_ms)


def test_the_ring_and_its_buckets() -> None:
    report = step(offload_optimizer(torch.optim.AdamW(params()), policy=POLICY))
    assert report.ring_bytes == POLICY.ring_bytes
    assert PADDED_BYTES / 2048 <= report.buckets <= PADDED_BYTES / 2048 + 3


def test_the_ring_is_no_larger_than_all_state() -> None:
    assert step(offload_optimizer(torch.optim.AdamW(params()))).ring_bytes == PADDED_BYTES


def test_resident_state_is_counted_apart_and_does_not_move() -> None:
    policy = OffloadPolicy(bucket_bytes=2048, staging_bytes=8192, resident_bytes=8064)
    optimizer = offload_optimizer(torch.optim.AdamW(params()), policy=policy)
    step(optimizer)
    report = step(optimizer)
    resident_padded_bytes = 2 * 4032
    assert report.resident_state_bytes == 2 * 4 * 1000
    assert report.host_state_bytes + report.resident_state_bytes == EXACT_BYTES
    assert report.host_bytes == report.loaded_bytes == report.stored_bytes == PADDED_BYTES - resident_padded_bytes


def test_counters_are_other_state() -> None:
    assert step(offload_optimizer(torch.optim.AdamW(params()), policy=POLICY)).other_state_bytes == 4 * len(NUMELS)


def test_a_step_with_some_gradients_moves_only_their_buckets() -> None:
    optimizer = offload_optimizer(torch.optim.AdamW(params()), policy=POLICY)
    step(optimizer)
    optimizer.zero_grad()
    last = optimizer.param_groups[0]["params"][-1]
    last.grad = torch.ones_like(last)
    optimizer.step()
    report = optimizer.offload_report()
    assert 2 * 256 <= report.loaded_bytes == report.stored_bytes <= 2048


def test_a_step_without_gradients_moves_nothing() -> None:
    optimizer = offload_optimizer(torch.optim.AdamW(params()), policy=POLICY)
    step(optimizer)
    optimizer.zero_grad()
    optimizer.step()
    report = optimizer.offload_report()
    assert (report.loaded_bytes, report.stored_bytes, report.step_ms) == (0, 0, 0.0)


class Sparse(Optimizer):
    """Keeps a tensor that is not dense."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param] |= {"mask": torch.eye(8).to_sparse(), "dense": param.grad.clone()}


def test_state_that_is_not_understood_is_named() -> None:
    with pytest.warns(UserWarning, match=r"State \['mask'\] is not made of dense tensors and stays"):
        optimizer = offload_optimizer(Sparse(params()))
    report = step(optimizer)
    assert report.left_out == ("mask",)
    assert report.other_state_bytes > 0
    assert report.host_state_bytes == EXACT_BYTES / 2
    assert "mask" in str(report)


def test_a_bucket_larger_than_staging_is_noted() -> None:
    """Muon keeps matrices whole."""
    matrix = nn.Parameter(torch.ones(64, 64))
    with pytest.warns(UserWarning, match="The largest bucket that cannot be cut needs 16384 bytes of staging"):
        optimizer = offload_optimizer(torch.optim.Muon([matrix]), policy=POLICY)
    assert optimizer.offload_report().ring_bytes == 64 * 64 * 4


# The table -----------------------------------------------------------------------------------------------------------


def test_it_prints_as_a_table() -> None:
    report = OffloadReport(
        optimizer="AdamW",
        host_state_bytes=8_000_000_000,
        resident_state_bytes=0,
        other_state_bytes=812,
        left_out=(),
        snapshot_bytes=0,
        host_bytes=8_000_012_288,
        pinned=True,
        ring_bytes=201_326_592,
        buckets=120,
        device_peak_bytes=24_600_000_000,
        loaded_bytes=8_000_012_288,
        stored_bytes=8_000_012_288,
        load_gb_per_s=47.23,
        store_gb_per_s=46.91,
        step_ms=178.4,
        update_ms=9.06,
        exposed_ms=169.34,
        notes=("First.", "Second."),
    )
    assert (
        str(report)
        == """\
Offloaded AdamW
  ! First.
  ! Second.
  state on the host               8.00 GB
  state resident on the device    0 B
  other state, where it was       812 B
  host memory taken               8.00 GB pinned
    of it for asynchronous saves  0 B
  staging ring on the device      201.33 MB, 120 buckets pass through
  device peak                     24.60 GB
  last step: loaded               8.00 GB at 47.2 GB/s
  last step: stored               8.00 GB at 46.9 GB/s
  last step: time                 178.4 ms, of it 9.1 ms updates
  last step: exposed              169.3 ms"""
    )


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (1_500_000, "1.50 MB"), (10**9, "1.00 GB")]
)
def test_sizes_have_the_units_of_rates(nbytes: int, text: str) -> None:
    assert _bytes(nbytes) == text


def test_numbers_agree_with_the_tensors_themselves() -> None:
    optimizer = offload_optimizer(torch.optim.AdamW(params()), policy=POLICY)
    report = step(optimizer)
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    assert sum(v.nbytes for v in tensors if v.dim()) == report.host_state_bytes
    assert sum(v.nbytes for v in tensors if not v.dim()) == report.other_state_bytes
