"""``offload_report()``: numbers that add up, and a table that a person reads."""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy, OffloadReport, add_masters, offload_optimizer, offload_report
from fsdp_offload.api.report import IterationRecord, KeptRecord, MemoryRecord, StepRecord, _bytes
from fsdp_offload.core.cache import Cache
from fsdp_offload.core.loop import Core
from fsdp_offload.core.room import Stopwatch
from fsdp_offload.device.lanes import Mark, SerialLane
from fsdp_offload.engine.engine import Engine, engine_of
from tests.overlapping import POLICIES, Loop, adamw, on_host
from tests.parity import params_of

POLICY = OffloadPolicy(bucket_bytes=2048)
NUMELS = (1000, 300, 7, 64)
STATE_BYTES = sum(2 * 4 * numel for numel in NUMELS)
PADDED_BYTES = sum(2 * -(-4 * numel // 64) * 64 for numel in NUMELS)


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(numel)) for numel in NUMELS]


def offloaded(policy: OffloadPolicy = POLICY, make: Callable[..., Optimizer] = torch.optim.AdamW) -> Any:
    return offload_optimizer(make(params()), policy=policy)


def step(optimizer: Any, *numbers: int) -> OffloadReport:
    for number, param in enumerate(params_of(optimizer)):
        param.grad = torch.ones_like(param) if not numbers or number in numbers else None
    optimizer.step()
    return optimizer.offload_report()


# Bytes ---------------------------------------------------------------------------------------------------------------


def test_before_the_first_step_nothing_has_been_measured() -> None:
    report = offloaded().offload_report()
    assert report.optimizer == "AdamW"
    assert (report.memory.host_state_bytes, report.memory.host_bytes) == (STATE_BYTES, PADDED_BYTES)
    assert (report.memory.kept_state_bytes, report.memory.other_state_bytes, report.left_out) == (0, 0, ())
    assert (report.memory.pinned, report.memory.device_peak_bytes) == (False, None)
    assert report.step is report.iteration is None
    assert f"No step yet. Steps will move {_bytes(report.kept.moving_bytes)} through the device." in str(report)
    assert "last" not in str(report)
    assert {name.split("/")[0] for name in report.metrics()} == {"memory", "kept"}


def test_the_first_step_only_stores_and_later_ones_move_what_is_not_kept_both_ways() -> None:
    optimizer = offloaded()
    first, *_, last = [step(optimizer).step for _ in range(4)]
    report = optimizer.offload_report()
    assert first is not None
    assert last is not None
    assert (first.loaded_bytes, first.loads, first.stored_bytes) == (0, 0, report.kept.moving_bytes)
    assert last.loaded_bytes == last.stored_bytes == report.kept.moving_bytes
    assert (
        last.loads == last.stores == first.stores == 2 * report.kept.moving_buckets
    )  # one copy for each tensor of AdamW
    assert first.updates == last.updates > report.kept.moving_buckets
    assert last.host_updated_bytes is None
    assert last.load_gb_per_s is None, "nothing is timed on the CPU"
    counters = [value for state in optimizer.state.values() for value in state.values() if not value.dim()]
    assert sum(value.nbytes for value in counters) == report.memory.other_state_bytes


def test_what_is_kept_is_counted_and_does_not_move() -> None:
    optimizer = offloaded(replace(POLICY, device_bytes=5 * 2048))
    step(optimizer)
    report = step(optimizer)
    assert report.memory.kept_state_bytes == 2 * 2048
    assert report.kept.moving_bytes == PADDED_BYTES - 2 * 2048
    assert report.kept.buckets == 2
    assert report.kept.moving_buckets == report.step.updates - 2
    assert report.memory.device_bytes == 5 * 2048
    optimizer.offload_states()
    optimizer.release_states()
    away = optimizer.offload_report().memory
    assert (away.kept_state_bytes, away.device_bytes, away.host_state_bytes) == (0, 0, STATE_BYTES)


def test_parameters_on_the_host(mesh: DeviceMesh) -> None:
    loop = Loop(mesh, adamw, OffloadPolicy(parameters=True, bucket_bytes=8192)).train(3)
    report = loop.optimizer.offload_report()
    local_bytes = sum(param.to_local().nbytes for param in loop.model.parameters())
    assert report.memory.host_parameter_bytes == local_bytes
    assert report.memory.host_state_bytes == 2 * local_bytes
    assert 0 < report.memory.kept_parameter_bytes < local_bytes
    assert "groups of parameters" in report.kept.reason
    assert "parameters on the host" in str(report)


def test_a_step_moves_only_what_has_gradients() -> None:
    optimizer = offloaded()
    for _ in range(3):
        step(optimizer)
    some = step(optimizer, 3).step
    assert some is not None
    assert some.updates == 1
    assert 2 * 256 <= some.stored_bytes <= 2048, "its bucket"
    optimizer.zero_grad()
    optimizer.step()
    none = optimizer.offload_report().step
    assert (none.updates, none.stored_bytes, none.stores) == (0, 0, 0)


@pytest.mark.filterwarnings("ignore:offload_optimizer. Other is not in the table:UserWarning")
def test_the_buckets_of_a_class_that_moves_as_a_whole_are_updated() -> None:
    class Other(torch.optim.AdamW):
        pass

    optimizer = offloaded(make=Other)
    reports = [step(optimizer) for _ in range(2)]
    assert reports[1].step is not None
    assert reports[1].step.updates == reports[1].kept.moving_buckets > 0


def test_masters_do_not_change_the_name_of_the_class() -> None:
    optimizer = add_masters(torch.optim.AdamW([nn.Parameter(torch.ones(64, dtype=torch.bfloat16))]))
    assert offload_report(offload_optimizer(optimizer, policy=POLICY)).optimizer == "AdamW"


@pytest.mark.parametrize("clips", [False, True])
def test_a_loop_whose_updates_wait_for_the_step_is_told_why(mesh: DeviceMesh, clips: bool) -> None:
    loop = Loop(mesh, adamw, OffloadPolicy(overlap="iteration"))
    for at in range(4):
        loop.backward(at)
        if clips:
            torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)
        loop.step()
    report = offload_report(loop.optimizer)
    assert ("all updates wait for it. To clip, call fsdp_offload.clip_grad_norm_" in report.clipping) == clips
    assert ('\n  ! overlap="iteration": the loop changes gradients' in str(report)) == clips


# Notes ---------------------------------------------------------------------------------------------------------------


def test_an_offload_that_moves_nothing_says_so() -> None:
    with pytest.warns(UserWarning, match="NOTHING IS OFFLOADED: all of the state fits into device_bytes"):
        optimizer = offloaded(replace(POLICY, device_bytes=1 << 20))
    assert "NOTHING IS OFFLOADED" in str(step(optimizer)).splitlines()[1]


def test_state_that_was_put_on_the_device_by_hand_is_counted() -> None:
    """As verl loads it before each step; there it would be beside its home until that step."""
    optimizer = offloaded()
    counters_bytes = step(optimizer).memory.other_state_bytes
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.clone()
    report = optimizer.offload_report()
    assert report.memory.other_state_bytes == counters_bytes + STATE_BYTES
    assert step(optimizer).memory.other_state_bytes == counters_bytes


# Iterations ----------------------------------------------------------------------------------------------------------


class HostMark(Mark):
    """A mark by the host's clock, or at a time that is given."""

    def __init__(self, ms: float | None = None, *, caught_up: bool = True, **_: object) -> None:
        self.seconds = time.perf_counter() if ms is None else ms / 1e3
        self.caught_up = caught_up

    def is_passed(self) -> bool:
        return self.caught_up

    def elapsed_ms_since(self, earlier: "HostMark") -> float:
        return (self.seconds - earlier.seconds) * 1e3


@pytest.fixture
def timed(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loop]:
    """A loop with times that the device would measure, by the host's clock."""

    def timed_by_host(**fields: Any) -> Loop:
        loop = Loop(mesh, adamw, OffloadPolicy(bucket_bytes=8192, **fields))
        engine = engine_of(loop.optimizer)
        assert isinstance(engine, Engine)
        engine.core.cache.stopwatch = Stopwatch(loop.device)
        return loop

    monkeypatch.setattr(Stopwatch, "_mark", lambda *_: HostMark())
    monkeypatch.setattr(SerialLane, "mark", lambda *_, **__: HostMark())
    return timed_by_host


@pytest.mark.parametrize("fields", [*POLICIES.values(), {"parameters": True}], ids=[*POLICIES, "parameters"])
def test_an_iteration_and_its_bound(timed: Any, fields: dict[str, Any]) -> None:
    loop = timed(**fields)
    assert loop.train(1).optimizer.offload_report().iteration is None, "one step ends no iteration"
    for number in range(1, 6):
        report = loop.train(1, first=number).optimizer.offload_report()
        last = report.iteration
        assert 0 <= last.stalled_ms <= last.iteration_ms
        assert last.bound_ms > 0
        assert last.iteration_ms - last.stalled_ms - last.host_ms <= last.bound_ms + 1e-6
        assert last.bound_ms <= last.iteration_ms
        assert min(report.step.loaded_bytes, report.step.stored_bytes) > 0
    copies_ms = report.step.loaded_bytes / report.step.load_gb_per_s / 1e6
    assert last.bound_ms >= min(copies_ms, last.iteration_ms)
    gb_ms = max(1e3 / report.step.load_gb_per_s, 1e3 / report.step.store_gb_per_s)
    assert last.next_gb_ms == min(gb_ms, last.stalled_ms) > 0


def test_an_interrupt_behind_the_end_of_a_step_leaves_no_iteration_of_two(
    timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = timed(overlap="iteration").train(4)
    with monkeypatch.context() as patch:
        patch.setattr(Core, "end", Mock(side_effect=KeyboardInterrupt))
        loop.backward(4)
        with pytest.raises(KeyboardInterrupt):
            loop.optimizer.step()
    assert loop.optimizer.offload_report().iteration is None


def test_once_nothing_changes_one_iteration_in_eight_is_timed(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until someone asks for the last one."""
    loop, counts = timed(overlap="iteration").train(34), []

    def count(*_: Any) -> HostMark:
        counts[-1] += 1
        return HostMark()

    def marks_of_each(first: int, steps: int) -> list[int]:
        counts.clear()
        for at in range(first, first + steps):
            counts.append(0)
            loop.train(1, first=at)
        return counts

    monkeypatch.setattr(Stopwatch, "_mark", count)
    few = sorted(marks_of_each(34, 16))
    assert few[:12] == [0] * 12  # 2 are timed, which begin with a mark of the one before
    assert few[12:14] == [1, 1]
    assert few[14] == few[15] > 8
    assert loop.optimizer.offload_report().iteration.iteration_ms > 0
    assert marks_of_each(50, 18)[1:16] == [few[15]] * 15
    assert counts[17] < 2


def test_compute_waits_while_copies_hold_the_host_up_in_step(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a full queue of the driver: gathers come later then, and do not wait any more."""
    loop, seconds, fetch = timed(overlap="forward"), 0.0, Cache.fetch

    def slow(*args: Any, **kwargs: Any) -> bool:
        nonlocal seconds
        seconds += 1
        return fetch(*args, **kwargs)

    monkeypatch.setattr(Stopwatch, "_mark", lambda _: HostMark(1e3 * seconds))
    loop.train(2)
    monkeypatch.setattr(Cache, "fetch", slow)
    assert loop.train(1, first=2).optimizer.offload_report().iteration.stalled_ms >= 1000


def test_what_the_host_takes_is_not_time_for_items(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device, which has nothing else to do, passes marks as the host makes them: all of that is the host's time."""
    loop = timed(overlap="iteration").train(4)
    watch = engine_of(loop.optimizer).core.cache.stopwatch
    device_ms = host_ms = 0.0

    monkeypatch.setattr(Stopwatch, "_mark", lambda _: HostMark(device_ms))
    monkeypatch.setattr(time, "perf_counter", lambda: host_ms / 1e3)
    watch.forget()
    for _ in range(2):
        watch.end()
        with watch.calling():
            host_ms, device_ms = host_ms + 5, device_ms + 5  # our code, and nothing is left to do
            with watch.waiting():
                host_ms, device_ms = host_ms + 1, device_ms + 8  # a load is late by 7 ms
        with watch.waiting():
            host_ms, device_ms = host_ms + 2, device_ms + 2
        with watch.calling():
            host_ms += 9  # the device has enough to do
        with watch.waiting(with_host=True):
            host_ms, device_ms = host_ms + 3, device_ms + 3  # in a full queue
        host_ms, device_ms = host_ms + 50, device_ms + 50
    watch.end()
    reading = watch.last()
    assert (reading.stalled_ms, reading.host_ms, reading.iteration_ms) == pytest.approx((7 + 3, 5 + 1, 68))
    assert reading.paced_ms == pytest.approx(6 + 2)


@pytest.mark.parametrize("caught_up", [False, True])
def test_time_between_our_calls_is_the_hosts_if_the_device_had_nothing_left_at_both(
    timed: Any, monkeypatch: pytest.MonkeyPatch, caught_up: bool
) -> None:
    watch = engine_of(timed(overlap="iteration").train(4).optimizer).core.cache.stopwatch
    now = 0.0

    monkeypatch.setattr(Stopwatch, "_mark", lambda _: HostMark(now, caught_up=caught_up))
    monkeypatch.setattr(time, "perf_counter", lambda: now / 1e3)
    watch.forget()
    for _ in range(3):
        watch.end()
        for before_ms, within_ms in ((20, 2), (8, 1), (8, 1)):  # the forward, and two groups of the backward
            now += before_ms
            with watch.calling(), watch.calling():
                now += within_ms
    watch.end()
    reading = watch.last()
    assert (reading.host_ms, reading.iteration_ms) == pytest.approx((4, 40))
    assert reading.paced_ms == pytest.approx(40 if caught_up else 4)


def test_the_largest_copy_is_timed(timed: Any) -> None:
    watch = engine_of(timed().optimizer).core.cache.stopwatch
    lane = SimpleNamespace(name="load", mark=HostMark)
    for _ in range(3):
        watch.end()
        for nbytes in (4, 1024, 64, 1024):
            with watch.copying(lane, nbytes):
                pass
    assert watch._now.copies["load"][0] == 1024

    class PutOff(HostMark):
        """A mark that is made later."""

    kinds = iter([HostMark, PutOff, PutOff, PutOff])
    lane.mark = lambda **_: next(kinds)()
    watch.end()
    for _ in range(2):
        with watch.copying(lane, 1024):
            pass
    assert type(watch._now.copies["load"][1]) is PutOff, "not the one that was put off behind its begin"


def test_a_step_that_failed_ends_no_iteration(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = timed()
    saved = loop.train(3).optimizer.state_dict()
    loop.backward(3)
    with monkeypatch.context() as patch:
        patch.setattr(Cache, "fetch", None)
        with pytest.raises(TypeError):
            loop.optimizer.step()
    assert loop.optimizer.offload_report().iteration is None
    loop.optimizer.load_state_dict(saved)
    assert loop.train(1, first=3).optimizer.offload_report().iteration is None
    assert loop.train(1, first=4).optimizer.offload_report().iteration is not None


# The table -----------------------------------------------------------------------------------------------------------

GB = 10**9
MEMORY = MemoryRecord(
    host_state_bytes=8 * GB,
    kept_state_bytes=0,
    other_state_bytes=812,
    host_parameter_bytes=0,
    kept_parameter_bytes=0,
    host_bytes=8 * GB + 12_288,
    spare_home_bytes=0,
    pinned=True,
    device_bytes=201_326_592,
    off_peak_bytes=1_812_000_000,
    device_peak_bytes=24_600_000_000,
)
REPORT = OffloadReport(
    optimizer="AdamW",
    memory=MEMORY,
    kept=KeptRecord(buckets=0, moving_buckets=120, moving_bytes=8 * GB, reason="Nothing is kept."),
    step=StepRecord(
        loaded_bytes=8 * GB,
        stored_bytes=8 * GB,
        loads=240,
        stores=240,
        updates=120,
        load_gb_per_s=47.23,
        host_waited_ms=3.0,
    ),
    iteration=IterationRecord(iteration_ms=431.24, stalled_ms=3.08, bound_ms=415.76, host_ms=12.4, paced_ms=250.0),
    notes=("First.", "Second."),
)


def test_it_prints_as_a_table_without_what_is_not_known() -> None:
    assert (
        str(REPORT)
        == """\
Offloaded AdamW
  ! First.
  ! Second.
  Nothing is kept.
  state on the host       8.00 GB
  other state, not moved  812 B
  host memory taken       8.00 GB pinned
  device memory taken     201.33 MB
    more off the peak     1.81 GB
  device peak             24.60 GB
  last step: loaded       8.00 GB in 240 copies, at 47.2 GB/s
  last step: stored       8.00 GB in 240 copies
  last step: updated      120 buckets
  last iteration          431.2 ms, of it 3.1 ms waiting for what is offloaded
    at the host's pace    250.0 ms, of it 12.4 ms in fsdp_offload
    no less than          415.8 ms"""
    )


def test_metrics_are_flat_numbers_and_only_those_that_are_known() -> None:
    metrics = REPORT.metrics()
    assert metrics["memory/host_state_bytes"] == 8e9
    assert (metrics["iteration/stalled_ms"], metrics["step/load_gb_per_s"]) == (3.08, 47.23)
    assert (metrics["kept/buckets"], metrics["kept/moving_buckets"]) == (0, 120)
    assert "step/store_gb_per_s" not in metrics
    assert "kept/reason" not in metrics
    assert all(type(value) is float for value in metrics.values())


def _size(nbytes: float) -> str:
    return _bytes(int(nbytes))


def _count(value: float) -> str:
    return f"{value:.0f}"


def _tenths(value: float) -> str:
    return f"{value:.1f}"


SENTENCES: dict[str, tuple[str, Callable[[float], str]]] = {
    "memory/host_state_bytes": ("state on the host +(.+)", _size),
    "memory/kept_state_bytes": ("state on the host .+\n +kept on the device +(.+)", _size),
    "memory/other_state_bytes": ("other state, not moved +(.+)", _size),
    "memory/host_parameter_bytes": ("parameters on the host +(.+)", _size),
    "memory/kept_parameter_bytes": ("parameters on the host .+\n +kept on the device +(.+)", _size),
    "memory/host_bytes": ("host memory taken +(.+?)(?: not)? pinned", _size),
    "memory/spare_home_bytes": ("spare homes +(.+)", _size),
    "memory/pinned": (
        "host memory taken .+B( pinned| not pinned)",
        lambda value: " pinned" if value else " not pinned",
    ),
    "memory/device_bytes": ("device memory taken +(.+)", _size),
    "memory/off_peak_bytes": ("more off the peak +(.+)", _size),
    "memory/device_peak_bytes": ("device peak +(.+)", _size),
    "kept/buckets": (r"(\d+) of \d+ buckets are kept on the device", _count),
    "kept/moving_buckets": (r"moving: (\d+)", _count),
    "kept/moving_bytes": ("Steps will move (.+) through the device", _size),
    "step/loaded_bytes": ("last step: loaded +(.+?) in", _size),
    "step/stored_bytes": ("last step: stored +(.+?) in", _size),
    "step/loads": ("last step: loaded .+ in (.+?) copies", _count),
    "step/stores": ("last step: stored .+ in (.+?) copies", _count),
    "step/updates": ("last step: updated +(.+) buckets", _count),
    "step/held_updates": (r"held until step\(\) +(.+) buckets", _count),
    "step/load_gb_per_s": ("last step: loaded .+, at (.+) GB/s", _tenths),
    "step/store_gb_per_s": ("last step: stored .+, at (.+) GB/s", _tenths),
    "step/host_updated_bytes": ("on the CPU +(.+?) in", _size),
    "step/host_update_ms": ("on the CPU .+ in (.+?) ms", _tenths),
    "step/host_waited_ms": ("on the CPU .+ ms, (.+?) ms waited for", _tenths),
    "iteration/iteration_ms": ("last iteration +(.+?) ms", _tenths),
    "iteration/stalled_ms": ("last iteration .+, of it (.+?) ms waiting", _tenths),
    "iteration/host_ms": ("at the host's pace .* of it (.+?) ms", _tenths),
    "iteration/paced_ms": ("at the host's pace +(.+?) ms", _tenths),
    "iteration/bound_ms": ("no less than +(.+) ms", _tenths),
    "iteration/next_gb_ms": ("with 1 GB more +up to (.+) ms less", _tenths),
}
"""By metric, where the report says it, and how."""


@pytest.mark.parametrize("staying", [0, 3 * 8192, 1 << 20])
def test_each_metric_is_what_the_report_says(mesh: DeviceMesh, staying: int) -> None:
    """Of a real offload; with made-up times, which the CPU does not take."""
    loop = Loop(mesh, adamw, on_host({}, staying=staying, snapshot_bytes=1 << 20)).train(3)
    report = loop.optimizer.offload_report()
    timed = {"load_gb_per_s": 47.23, "store_gb_per_s": 51.77, "host_updated_bytes": 4096, "host_update_ms": 7.1}
    report = replace(
        report,
        memory=replace(report.memory, device_peak_bytes=24_600_000_000),
        step=replace(report.step, **timed, host_waited_ms=3.4, held_updates=2),
        iteration=IterationRecord(
            iteration_ms=431.24, stalled_ms=3.18, bound_ms=415.66, host_ms=12.4, paced_ms=250.0, next_gb_ms=2.7
        ),
    )
    (kept, all_of_them), *_ = re.findall(r"(\d+) of (\d+) buckets are kept", report.kept.reason)
    said = f"{report}\n{replace(report, step=None)}\nmoving: {int(all_of_them) - int(kept)}"
    metrics = report.metrics()
    assert metrics.keys() == SENTENCES.keys()
    for name, (pattern, shown) in SENTENCES.items():
        found = re.search(pattern, said)
        assert metrics[name] == 0 if found is None else found[1] == shown(metrics[name]), name
