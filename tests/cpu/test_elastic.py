"""When staging that is left to be found out is taken and given back."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy
from fsdp_offload.device import link
from fsdp_offload.device.link import Allocated, Block, DeviceLink
from fsdp_offload.engine.engine import Engine, engine_of
from fsdp_offload.engine.window import Window
from fsdp_offload.model import tune_staging as elastic
from fsdp_offload.model.tune_staging import Elastic
from fsdp_offload.planning.staging import plan_staging, why_not_behind_backward
from fsdp_offload.torch_compat.fully_shard import runs_in_backward
from tests.overlapping import HABITS, NOT_IN_BACKWARD, POLICIES, Loop, Net, adamw, same
from tests.policies import with_share
from tests.tiers import spread


@pytest.fixture(autouse=True)
def staging_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers of other tests may still be there, with larger blocks."""
    monkeypatch.setattr(link, "_links", {})


@pytest.fixture(autouse=True)
def long_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with the transfers, whatever else this machine is doing."""
    monkeypatch.setattr(elastic, "why_not_behind_backward", lambda moving_ms, backward_ms: "")


# Activations of 10 for each of four layers above 20; the peak is in the last.
FOUR_LAYERS = [20, 30, 40, 50], [50, 40, 30, 20]


def test_as_much_as_there_is_room_for_and_no_more_than_is_wanted() -> None:
    plan = plan_staging(*FOUR_LAYERS, peak_bytes=60, wanted_bytes=20, spread=False)
    assert plan is not None
    assert plan.nbytes == 20
    # The backward of each layer needs 10 more for a time; behind the last nothing more comes.
    assert plan.at_points_bytes == (0, 10, 20, 20)
    assert plan.at_uses_bytes == (20, 20, 10, 0)  # at the second turn 30 are there, and 40 at the next


def test_what_nothing_passes_through_any_more_goes_all_along_the_forward() -> None:
    plan = plan_staging(*FOUR_LAYERS, peak_bytes=60, wanted_bytes=9, spread=True)
    assert plan is not None
    assert plan.at_uses_bytes == (9, 6, 3, 0)
    for uses, kept in (([20, 45, 48, 50], (9, 6, 3, 0)), ([20, 22, 24, 50], (9, 8, 7, 0))):
        plan = plan_staging(uses, FOUR_LAYERS[1], peak_bytes=60, wanted_bytes=9, spread=True)
        assert plan is not None
        assert plan.at_uses_bytes == kept  # not before groups and memory both say so


def test_a_forward_that_makes_nothing_gives_back_at_its_end() -> None:
    plan = plan_staging([5, 5], [5, 5], peak_bytes=10, wanted_bytes=5, spread=True)
    assert plan is not None
    assert plan.at_uses_bytes == (5, 0)


def test_less_where_more_is_allocated_than_was_learnt() -> None:
    plan = plan_staging(*FOUR_LAYERS, peak_bytes=60, wanted_bytes=20, spread=False)
    assert plan is not None
    assert [plan.at_point(2, allocated) for allocated in (25, 30, 33)] == [20, 20, 17]
    assert plan.at_point(7, 20) == 20  # more reductions than were learnt
    assert plan.at_use(7) == 0


def test_nothing_is_taken_before_the_last_forward() -> None:
    plan = plan_staging([20, 30], [25, 20] * 2, peak_bytes=60, wanted_bytes=20, spread=True, last_backward=2)
    assert plan is not None
    assert plan.at_points_bytes == (0, 0, 20, 20)
    assert plan.at_uses_bytes == (20, 0)


def test_no_room() -> None:
    assert plan_staging([5, 10], [10, 10], peak_bytes=10, wanted_bytes=7, spread=True) is None


BESIDE = {name: fields for name, fields in POLICIES.items() if name != "step"}  # whose staging is not learnt
EVERY_OVERLAP = pytest.mark.parametrize("fields", BESIDE.values(), ids=BESIDE)


def test_a_backward_shorter_than_the_transfers_is_no_place_for_more() -> None:
    assert not why_not_behind_backward(216.0, 291.0)
    assert why_not_behind_backward(216.0, 148.0) == (
        "transfers take 216 ms and a backward 148 ms, and what is left passes through it"
    )


@EVERY_OVERLAP
def test_staging_stays_where_it_would_not_be_given_back_in_time(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    measured: list[float] = []

    def short(moving_ms: float, backward_ms: float) -> str:
        measured.extend([moving_ms, backward_ms])
        return "the backward is short"

    monkeypatch.setattr(elastic, "why_not_behind_backward", short)
    attached: list[int] = []
    monkeypatch.setattr(DeviceLink, "allocated_bytes", lambda self: Allocated(0, 1 << 30 if attached else 0))
    policy = with_share(passing="auto", bucket_bytes=8 << 10, **fields)  # too large for one to last
    plain, offloaded = Loop(mesh, adamw, None).train(6), Loop(mesh, adamw, policy)
    attached.append(1)
    assert same(plain, offloaded.train(6))
    assert min(measured, default=1.0) > 0
    updates = policy.updates_in_backward
    report = offloaded.optimizer.offload_report()
    assert ("always there: the backward is short" in str(report)) == updates
    engine = vars(offloaded.optimizer)["_offload_engine"].engine
    assert (
        report.memory.device_bytes <= engine.share.ring_bytes(policy.bucket_bytes)
    ) == updates  # there would be room for more


allocated_bytes = st.lists(st.integers(0, 100), min_size=1)


@given(allocated_bytes, allocated_bytes, st.integers(0, 50), st.integers(0, 200), st.booleans())
def test_never_above_the_peak(uses: list[int], reductions: list[int], more: int, wanted: int, spread: bool) -> None:
    peak = max(uses + reductions) + more
    plan = plan_staging(uses, reductions, peak, wanted, spread=spread)
    if plan is None:
        return
    assert plan.nbytes <= wanted
    taken, kept = plan.at_points_bytes, plan.at_uses_bytes
    assert list(taken) == sorted(taken)
    assert taken[-1] == plan.nbytes
    for number, staged in enumerate(taken):
        assert max(reductions[number:]) + staged <= peak
        for other in (reductions[number], reductions[number] + 7, peak):
            assert other + plan.at_point(number, other) <= peak
    # At the turn of each group what is too much goes, and until the next one it has allocated what is there then.
    assert list(kept) == sorted(kept, reverse=True)
    assert plan.nbytes >= kept[0] >= kept[-1] == 0
    for staged, at_next in zip(kept, [*uses[1:], peak], strict=True):
        assert staged + at_next <= peak


@spread(habit={"none": None, **{name: name for name in HABITS}}, fields=BESIDE, room={"9kB": 9_000, "1GiB": 1 << 30})
def test_same_bits(
    mesh: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    habit: str | None,
    room: int,
) -> None:
    if fields.get("overlap") == "iteration" and habit in NOT_IN_BACKWARD | {"evaluate-before-step"}:
        habit = "evaluate"
    taken: list[int] = []
    there: list[int] = []
    take = DeviceLink.block

    def counted(self: DeviceLink, number: int, nbytes: int, user: int) -> Block:
        before = self._ring.get(number)
        found = take(self, number, nbytes, user)
        if found is not before:
            taken.append(nbytes)
            there.append(sum(block.memory.numel() for block in self._ring.values()))
        return found

    # On the CPU nothing is counted: a device that has as much room.
    attached: list[int] = []
    monkeypatch.setattr(DeviceLink, "allocated_bytes", lambda self: Allocated(0, room if attached else 0))
    monkeypatch.setattr(DeviceLink, "block", counted)
    policy = with_share(passing="auto", bucket_bytes=1024, **fields)
    plain, offloaded = Loop(mesh, adamw, None), Loop(mesh, adamw, policy)
    attached.append(1)
    for loop in (plain, offloaded):
        loop.train(10, HABITS[habit] if habit else None)
    assert same(plain, offloaded)
    report = offloaded.optimizer.offload_report()
    assert "device_bytes='auto'" in str(report)
    assert "cannot be cut" not in str(report)
    if room > 9_000:
        assert len(taken) > 50  # given back in each forward
        # Blocks that last stay as they were made, for buckets of any size.
        assert report.memory.device_bytes <= max(there) <= report.memory.device_bytes + 3 * 1024 // 32
        assert report.memory.device_bytes < report.memory.host_state_bytes  # one group is enough beside what passes
    else:
        ring = vars(offloaded.optimizer)["_offload_engine"].engine.plan.ring
        assert 0 < ring.lasting_bytes <= report.memory.host_state_bytes // 20
        assert max(there) <= room + ring.lasting_bytes


@pytest.mark.parametrize("parameters", [False, True], ids=["state", "parameters"])
def test_a_backward_that_has_the_memory_itself(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, parameters: bool
) -> None:
    """Where a device is full in a backward, what comes and goes does without; no exception comes out of it."""
    take, grow = DeviceLink.block, Window._take
    loops: list[Loop] = []
    refused: list[str] = []

    def is_full(lasts: bool) -> bool:
        return not lasts and 4 <= len(loops[0].seen) < 8 and runs_in_backward()

    def block(link: DeviceLink, number: int, nbytes: int, user: int) -> Block:
        if loops and number not in link._ring and is_full(engine_of(loops[0].optimizer).plan.ring.lasting > number):
            refused.append("ring")
            raise torch.OutOfMemoryError("no room")
        return take(link, number, nbytes, user)

    def more(window: Window, begin: int, nbytes: int) -> None:
        if loops and is_full(lasts=begin == 0):
            refused.append("window")
            raise torch.OutOfMemoryError("no room")
        grow(window, begin, nbytes)

    monkeypatch.setattr(DeviceLink, "block", block)
    monkeypatch.setattr(Window, "_take", more)
    attached: list[int] = []
    monkeypatch.setattr(DeviceLink, "allocated_bytes", lambda self: Allocated(0, 1 << 30 if attached else 0))
    policy = with_share(passing="auto", bucket_bytes=1024, overlap="iteration", parameters=parameters)
    plain, offloaded = Loop(mesh, adamw, None), Loop(mesh, adamw, policy)
    attached.append(1)
    loops.append(offloaded)
    plain.train(12)
    offloaded.train(12)
    assert same(plain, offloaded)
    assert "ring" in refused
    assert not parameters or "window" in refused


class Device:
    """One that counts what the groups of a model leave there: so much at each use, until gradients are reduced.

    The loss takes twice as much, from the end of each forward until the first group's backward begins.

    Attributes:
        in_forward, in_backward: how much staging that comes and goes there was at each use and each point of the last
            iteration.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, group_bytes: int) -> None:
        self.in_forward: list[int] = []
        self.in_backward: list[int] = []
        self._now_bytes = self._peak_bytes = self._loss_bytes = 0
        before_use, step_ended = Elastic.before_use, Elastic.step_ended
        backward_begins, reduced = Elastic.backward_begins, Elastic.reduced

        def used(elastic: Elastic, engine: Engine, number: int) -> None:
            before_use(elastic, engine, number)
            self._now_bytes += group_bytes
            self._loss_bytes = 2 * group_bytes
            self.in_forward.append(self._look(elastic, engine))

        def begun(elastic: Elastic, engine: Engine) -> float:
            self._now_bytes += self._loss_bytes
            self.in_backward.append(self._look(elastic, engine))
            self._now_bytes -= self._loss_bytes
            self._loss_bytes = 0
            return backward_begins(elastic, engine)

        def freed(elastic: Elastic, engine: Engine) -> float:
            self.in_backward.append(self._look(elastic, engine))
            self._now_bytes -= group_bytes
            return reduced(elastic, engine)

        def ended(elastic: Elastic, engine: Engine) -> None:
            self._look(elastic, engine)
            self._now_bytes = 0
            step_ended(elastic, engine)

        monkeypatch.setattr(Elastic, "before_use", used)
        monkeypatch.setattr(Elastic, "backward_begins", begun)
        monkeypatch.setattr(Elastic, "reduced", freed)
        monkeypatch.setattr(Elastic, "step_ended", ended)
        monkeypatch.setattr(DeviceLink, "allocated_bytes", lambda link: Allocated(self._now_bytes, self._peak_bytes))

    def begin_iteration(self) -> None:
        self.in_forward, self.in_backward = [], []

    def drop_activations(self) -> None:
        self._now_bytes = self._loss_bytes = 0

    def _look(self, elastic: Elastic, engine: Engine) -> int:
        staging_bytes = engine._pipeline.ring.passing_bytes
        if elastic._plan is not None:
            assert self._now_bytes + staging_bytes <= self._peak_bytes
        else:
            self._peak_bytes = max(self._peak_bytes, self._now_bytes)
        return staging_bytes


@spread(fields=BESIDE, micro_batches={"1": 1, "2": 2}, group_bytes={"10kB": 10_000, "60kB": 60_000})
def test_block_by_block_below_the_peak(
    mesh: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
    group_bytes: int,
    fields: dict[str, Any],
    micro_batches: int,
) -> None:
    device = Device(monkeypatch, group_bytes)
    policy = with_share(passing="auto", bucket_bytes=1024, **fields)
    plain, offloaded = (Loop(mesh, adamw, one, micro_batches=micro_batches) for one in (None, policy))
    plain.train(7)
    for step in range(7):
        device.begin_iteration()
        offloaded.train(1, first=step)
    assert same(plain, offloaded)
    report = offloaded.optimizer.offload_report()
    taken, kept = device.in_backward, device.in_forward
    # What is there when the last gradients come has been taken by and by, and so it goes.
    last_backward = taken[len(taken) * (micro_batches - 1) // micro_batches :]
    assert last_backward == sorted(last_backward)
    assert last_backward[0] == 0 < last_backward[-1] <= report.memory.device_bytes
    assert kept == sorted(kept, reverse=True)
    assert report.memory.device_bytes >= kept[0] > kept[-1] == 0


def backward_without_gradients(loop: Loop, step: int) -> None:
    embedded: list[Tensor] = []
    handle = loop.model.embed.register_forward_hook(lambda *args: embedded.append(args[-1]))
    loss = loop.model(loop.batch(step + 50))
    handle.remove()
    (grad,) = torch.autograd.grad(loss, embedded)
    loop.seen.append(grad.norm().item())


@spread(at={"learning": [2], "later": [4, 5], "always": [2, 3, 4, 5]}, fields=BESIDE, micro_batches={"1": 1, "2": 2})
def test_a_backward_without_gradients_now_and_then(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], micro_batches: int, at: list[int]
) -> None:
    """Staging is never above the peak, and is planned as without it: it may not come in the next iteration."""
    policy = with_share(passing="auto", bucket_bytes=1024, **fields)
    plans = []
    for steps in ([], at):
        with monkeypatch.context() as patch:
            device = Device(patch, 60_000)
            plain, offloaded = (
                Loop(mesh, adamw, one, net=lambda: Net(width=16), micro_batches=micro_batches) for one in (None, policy)
            )
            for loop in (plain, offloaded):
                for step in range(7):
                    if step in steps:
                        backward_without_gradients(loop, step)
                        device.drop_activations()
                    loop.train(1, first=step)
            assert same(plain, offloaded)
            plans.append(vars(offloaded.optimizer)["_offload_engine"].overlap._elastic._plan)
    assert plans[0] == plans[1] is not None


def test_state_that_comes_to_stay_leaves_the_room_as_it_was(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was learnt before; else nothing could pass any more, the model would wait, and still more would stay."""
    loop = Loop(mesh, adamw, OffloadPolicy(overlap="iteration", bucket_bytes=4096))
    engine = engine_of(loop.optimizer)
    assert engine is not None
    engine.device = torch.device("cuda")  # whose allocator is told apart from what it says here
    monkeypatch.setattr(DeviceLink, "allocated_bytes", lambda link: Allocated(1000 + engine.plan.resident_bytes, 5000))
    before = engine.allocated_bytes()
    engine.plan.resident_bytes += 300
    assert engine.allocated_bytes().now == before.now == 1000
    assert engine.allocated_bytes().peak == before.peak - 300
