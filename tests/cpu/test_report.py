"""``offload_report()``: numbers that add up, and a table that a person reads."""

import copy
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from fsdp_offload.engine.executor import Pipeline
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy, OffloadReport, offload_optimizer
from fsdp_offload.core.attached import engine_of
from fsdp_offload.report import _bytes
from fsdp_offload.torch_compat.fully_shard import fsdp_modules
from tests.clipping import ALWAYS, NEVER, clipped_step
from tests.overlapping import HABITS, NOT_IN_BACKWARD, POLICIES, SIZES, Habit, Loop, adamw, same
from tests.policies import with_share
from tests.tiers import spread

pytestmark = pytest.mark.filterwarnings("ignore:offload_optimizer. The parameters are on the CPU:UserWarning")

POLICY = OffloadPolicy(bucket_bytes=2048)
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
    assert report.ring_bytes == 3 * POLICY.bucket_bytes
    assert PADDED_BYTES / 2048 <= report.buckets <= PADDED_BYTES / 2048 + 3


def test_the_ring_is_no_larger_than_all_state() -> None:
    assert step(offload_optimizer(torch.optim.AdamW(params()))).ring_bytes == PADDED_BYTES


def test_resident_state_is_counted_apart_and_does_not_move() -> None:
    policy = with_share(bucket_bytes=2048, passing=8192, staying=8064)
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
    with pytest.warns(UserWarning, match="Sparse is not in the table of optimizers and moves as a whole"):
        optimizer = offload_optimizer(Sparse(params()))
    report = step(optimizer)
    assert any("State ['mask'] is not made of dense tensors" in note for note in report.notes)
    assert report.left_out == ("mask",)
    assert report.other_state_bytes > 0
    assert report.host_state_bytes == EXACT_BYTES / 2
    assert "mask" in str(report)


def test_a_bucket_larger_than_staging_is_noted() -> None:
    """Muon keeps matrices whole."""
    matrix = nn.Parameter(torch.ones(64, 64))
    with pytest.warns(UserWarning, match="The largest bucket that cannot be cut needs 16384 bytes of the device"):
        optimizer = offload_optimizer(torch.optim.Muon([matrix]), policy=POLICY)
    assert optimizer.offload_report().ring_bytes == 64 * 64 * 4


# Iterations ----------------------------------------------------------------------------------------------------------


FORMULAS = {
    "step": "F + B + clip + max(U, (1 - r) T)",
    "forward": "B + clip + max(F + U, (1 - r) T)",
    "iteration": "max(F + B + U, T)",
}
NO_ITERATION = (0.0, 0.0, 0.0, "", "")


def loop_of(mesh: DeviceMesh, fields: dict[str, Any], make: Any = adamw, **kwargs: Any) -> Loop:
    return Loop(mesh, make, with_share(**{**SIZES, **fields}), **kwargs)


def report_of(loop: Loop) -> OffloadReport:
    report = loop.optimizer.offload_report()
    assert 0 <= report.stalled_ms <= report.iteration_ms
    assert (report.bound_ms > 0) == (report.bound != "")
    assert str(report)
    return report


def iteration_of(report: OffloadReport) -> tuple[float, float, float, str, str]:
    return report.iteration_ms, report.stalled_ms, report.bound_ms, report.bound, report.advice


@spread(name={name: name for name in POLICIES}, micro_batches={"1": 1, "3": 3})
def test_an_iteration_and_its_bound(mesh: DeviceMesh, name: str, micro_batches: int) -> None:
    loop = loop_of(mesh, POLICIES[name], micro_batches=micro_batches)
    assert iteration_of(report_of(loop)) == NO_ITERATION
    assert iteration_of(report_of(loop.train(1))) == NO_ITERATION, "one step ends no iteration"
    second = report_of(loop.train(1, first=1))
    assert second.iteration_ms > second.stalled_ms > 0
    assert second.bound == "", "the first step had nothing to load"
    for step in range(2, 5):
        report = report_of(loop.train(1, first=step))
        assert report.iteration_ms > report.stalled_ms >= 0
        assert report.stalled_ms > 0 or step == 2  # the second step, which was measured alone, has left nothing
        assert report.bound == FORMULAS[name]


def slower(loop: Loop, seconds: float, step: int) -> OffloadReport:
    forward = loop.model.register_forward_hook(lambda *_: time.sleep(seconds))
    loop.train(1, first=step)
    forward.remove()
    return report_of(loop)


@pytest.mark.parametrize("name", POLICIES)
def test_the_parts_of_the_bound_are_measured_alone(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """However slow the model gets beside copies: that is contention, and not what an iteration takes at least."""
    plain, loop = (Loop(mesh, adamw, one) for one in (None, with_share(**{**SIZES, **POLICIES[name]})))
    begun = []
    for step in range(20):
        plain.train(1, first=step)
        loop.backward(step)
        engine = engine_of(loop.optimizer)
        assert engine is not None
        begun.append(engine.steps.begun is not None)
        loop.step()
    assert begun == [step + 1 not in (1, 2, 17) for step in range(20)], "nothing is begun in the backwards measured"
    assert same(plain, loop)
    before = report_of(loop)
    slow, after = (slower(loop, seconds, step) for step, seconds in enumerate((0.2, 0.4), 20))
    plain.train(2, first=20)
    assert before.bound_ms <= slow.bound_ms == after.bound_ms, "the first one may have been faster than alone"
    parts = after.forward_alone_ms, after.backward_alone_ms, after.update_alone_ms, after.transfers_alone_ms
    assert min(parts) > 0
    if name == "iteration":
        assert after.bound_ms == max(sum(parts[:3]), parts[3])
    computes_ms = sum(parts[:2]) + (parts[2] if name == "step" else 0.0)
    assert after.contention_ms == max(0.0, after.iteration_ms - after.stalled_ms - computes_ms)
    more_ms = max(0.0, after.iteration_ms - after.bound_ms)
    assert f"more than that            {more_ms:.1f} ms, of it " in str(after)
    assert f"{min(after.contention_ms, more_ms):.1f} ms contention" in str(after)
    assert same(plain, loop)


def test_a_speculating_loop_has_a_formula_of_its_own(mesh: DeviceMesh) -> None:
    """Old parameters go down as well; and where updates wait for ``step()``, so does the formula."""
    loop = loop_of(mesh, POLICIES["iteration"])
    for step in range(5):
        clipped_step(loop, step, NEVER)
    report = report_of(loop)
    assert report.bound == "max(F + B + clip + U, T)"
    for step in range(5, 9):
        clipped_step(loop, step, ALWAYS)
    assert report_of(loop).bound == FORMULAS["forward"]


def test_staging_that_comes_and_goes_has_a_formula_of_its_own(mesh: DeviceMesh) -> None:
    report = report_of(loop_of(mesh, {"passing": "auto", "overlap": "forward"}).train(5))
    assert report.bound == "B + clip + max(F + U, r S + (1 - r) T)"


def test_without_a_model_the_bound_is_that_of_a_step() -> None:
    optimizer = offload_optimizer(torch.optim.AdamW(params()), policy=POLICY)
    assert iteration_of(optimizer.offload_report()) == NO_ITERATION
    for _ in range(2):
        report = step(optimizer)
        assert (report.iteration_ms, report.stalled_ms, report.bound) == (0, 0, "max(U, T)")
        assert report.update_ms <= report.bound_ms <= report.step_ms


@pytest.mark.parametrize("name", POLICIES)
def test_it_is_the_last_whole_iteration(mesh: DeviceMesh, name: str) -> None:
    loop = loop_of(mesh, POLICIES[name]).train(3)
    loop.backward(3)
    before = time.perf_counter()
    loop.step()
    between = time.perf_counter()
    time.sleep(0.02)
    loop.backward(4)
    at_least_ms = (time.perf_counter() - between) * 1e3
    loop.step()
    last_ms = report_of(loop).iteration_ms
    assert at_least_ms < last_ms < (time.perf_counter() - before) * 1e3
    loop.backward(5)
    assert report_of(loop).iteration_ms in (last_ms, 0.0), "nothing of the iteration in progress"


def test_the_forward_ends_where_the_backward_first_gathers(mesh: DeviceMesh) -> None:
    """Not only where it first reduces gradients."""
    loop = loop_of(mesh, {"overlap": "forward"}).train(2)
    engine = engine_of(loop.optimizer)
    assert engine is not None
    slept: list[float] = []

    def sleep_once(*_: object) -> None:
        if not slept:
            slept.append(time.perf_counter())
            time.sleep(0.2)

    loop.backward(2)
    before = time.perf_counter()
    loop.step()
    loop.model.extra.down.register_full_backward_hook(sleep_once)
    loop.train(1, first=3)
    last = engine.iteration.last()
    assert last is not None
    assert last.forward_ms < (slept[0] - before) * 1e3
    assert last.ms > 200


def test_the_forward_ends_also_where_no_backward_gathers(mesh: DeviceMesh) -> None:
    def keep_gathered(model: nn.Module) -> None:
        for module in fsdp_modules(model):
            module.set_reshard_after_forward(False)

    loop = loop_of(mesh, {"overlap": "forward"}, prepare=keep_gathered)
    for step in range(4):
        loop.backward(step, extra=False)  # what is used twice is gathered again
        loop.step()
    assert report_of(loop).bound == FORMULAS["forward"]


def test_waits_for_new_parameters_stall_an_iteration(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_updated, waits = Pipeline._wait_device_updated, []

    def wait_long(self: Pipeline, numbers: Collection[int], stream: torch.Stream | None, key: int) -> None:
        waits.extend(self._unseen.intersection(numbers))
        wait_updated(self, numbers, stream, key)
        time.sleep(1e-3 * len(numbers))

    loop = loop_of(mesh, {"overlap": "forward"}).train(3)
    monkeypatch.setattr(Pipeline, "_wait_device_updated", wait_long)
    report = report_of(loop.train(1, first=3))
    assert len(waits) == len(set(waits)) == report.buckets
    assert report.stalled_ms > len(waits)


def test_waits_in_synchronize_stall_an_iteration(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronize = Pipeline.synchronize

    def synchronize_long(self: Pipeline) -> None:
        synchronize(self)
        time.sleep(0.02)

    loop = loop_of(mesh, {"overlap": "forward"}).train(3)
    monkeypatch.setattr(Pipeline, "synchronize", synchronize_long)
    loop.optimizer.synchronize()
    assert report_of(loop.train(1, first=3)).stalled_ms > 20


def phases(loop: Loop, step: int) -> None:
    loop.optimizer.offload_states()
    loop.optimizer.release_states()
    loop.backward(step)
    loop.optimizer.reload_states()
    loop.step()


@spread(habit={**HABITS, "phases": phases}, name={name: name for name in ("step", "iteration", "forward")})
def test_whatever_a_loop_does(mesh: DeviceMesh, name: str, habit: Habit) -> None:
    """Looking at it in the middle changes nothing either, and what is not known is 0."""
    unfit = [HABITS[name] for name in NOT_IN_BACKWARD] + [HABITS["evaluate-before-step"]]
    if name == "iteration" and habit in unfit:
        habit = HABITS["evaluate"]  # the policy refuses the others
    loop = loop_of(mesh, {**POLICIES[name], "staying": 60_000})
    loop.model.register_forward_hook(lambda *_: report_of(loop) and None)
    for step in range(8):
        loop.train(1, habit, first=step)
        report_of(loop)
    assert report_of(loop.train(2, first=8)).bound != "", "and afterwards everything is known again"


def test_steps_that_moved_different_state_have_no_bound(mesh: DeviceMesh) -> None:
    loop = loop_of(mesh, {"overlap": "forward"})
    known = []
    for step in range(8):
        report = report_of(loop.train(1, HABITS["other-parameters"], first=step))
        assert (report.iteration_ms > 0) == (step > 0)
        known.append(report.bound != "")
    assert known == [False, False, True, False, True, True, False, True]


def test_a_step_without_a_backward_ends_no_iteration(mesh: DeviceMesh) -> None:
    loop = loop_of(mesh, {"overlap": "forward"}).train(3)
    loop.backward(3)
    loop.optimizer.step()
    assert report_of(loop).iteration_ms > 0
    loop.optimizer.step()
    assert iteration_of(report_of(loop)) == NO_ITERATION


@pytest.mark.parametrize("fields", [{"serial": True}, {"overlap": "forward", "serial": True}], ids=["step", "forward"])
def test_where_everything_is_serial_iterations_are_not_known(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    report = loop_of(mesh, fields).train(4).optimizer.offload_report()
    assert (report.iteration_ms, report.stalled_ms) == (0, 0)


def test_gradients_from_elsewhere_make_no_iterations(mesh: DeviceMesh) -> None:
    loop = loop_of(mesh, {"overlap": "forward"})
    for _ in range(4):
        for param in loop.model.parameters():
            param.grad = torch.ones_like(param)
        loop.step()
        assert iteration_of(report_of(loop)) == NO_ITERATION


@pytest.mark.parametrize("name", ["step", "forward"])
def test_a_step_that_failed_ends_no_iteration(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the link is down")

    loop = loop_of(mesh, POLICIES[name]).train(3)
    saved = copy.deepcopy(loop.optimizer.state_dict())
    loop.backward(3)
    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "_store", fail)
        with pytest.raises(RuntimeError, match="the link is down"):
            loop.optimizer.step()
    assert iteration_of(report_of(loop)) == NO_ITERATION
    loop.optimizer.load_state_dict(saved)
    assert iteration_of(report_of(loop.train(1, first=3))) == NO_ITERATION
    assert report_of(loop.train(1, first=4)).bound == FORMULAS[name]


def test_two_optimizers_of_one_model(mesh: DeviceMesh) -> None:
    loop = loop_of(mesh, {"overlap": "forward"}, make=lambda params: adamw(params[::2]))
    policy = with_share(**SIZES, overlap="iteration")
    other = offload_optimizer(adamw(list(loop.model.parameters())[1::2]), model=loop.model, policy=policy)
    for step in range(4):
        loop.backward(step)
        other.step()
        loop.step()
        other.zero_grad()
    reports = report_of(loop), other.offload_report()
    assert [report.bound for report in reports] == [FORMULAS["forward"], FORMULAS["iteration"]]
    for report in reports:
        assert report.bound_ms > 0


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
  state on the host             8.00 GB
  state resident on the device  0 B
  other state, where it was     812 B
  host memory taken             8.00 GB pinned
    of it spare homes           0 B
  staging ring on the device    201.33 MB, 120 buckets pass through
  device peak                   24.60 GB
  last step: loaded             8.00 GB at 47.2 GB/s
  last step: stored             8.00 GB at 46.9 GB/s
  last step: time               178.4 ms, of it 9.1 ms updates
  last step: exposed            169.3 ms"""
    )
    measured = replace(report, notes=(), advice="Do this.", iteration_ms=431.24, stalled_ms=3.08)
    assert str(measured).startswith("Offloaded AdamW\n  Do this.\n  state on the host")
    assert str(measured).endswith("\n  last iteration                431.2 ms, of it 3.1 ms waiting for state")
    assert str(replace(measured, bound_ms=424.0, bound="max(F + B + U, T)")).endswith(
        """
  last iteration                431.2 ms, of it 3.1 ms waiting for state
    it takes at least           424.0 ms = max(F + B + U, T)"""
    )
    assert str(replace(report, bound_ms=172.35, bound="max(U, T)")).endswith(
        """
  last step: exposed            169.3 ms
    it takes at least           172.3 ms = max(U, T)"""
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


def test_state_that_was_put_on_the_device_by_hand_is_told() -> None:
    """As verl loads it before each step; there it would be beside its home until that step."""
    optimizer = offload_optimizer(torch.optim.AdamW(params()), policy=POLICY)
    counters_bytes = step(optimizer).other_state_bytes
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.clone()
    report = optimizer.offload_report()
    assert report.other_state_bytes == counters_bytes + report.host_state_bytes
    assert any(f"holds {report.host_state_bytes} bytes" in note for note in report.notes)
    after = step(optimizer)
    assert after.other_state_bytes == counters_bytes
    assert not any("by itself" in note for note in after.notes)
