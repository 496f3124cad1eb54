"""When staging that is left to be found out is taken and given back."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_offload import OffloadPolicy
from fsdp_offload.elastic import plan_staging
from fsdp_offload.transfer import Allocated, Block, DeviceLink
from tests.overlapping import HABITS, NOT_IN_BACKWARD, Loop, adamw, same


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


# Activations of 10 for each of four layers above 20; the peak is in the last.
FOUR_LAYERS = [20, 30, 40, 50], [50, 40, 30, 20]


def test_as_much_as_there_is_room_for_and_no_more_than_is_wanted() -> None:
    plan = plan_staging(*FOUR_LAYERS, peak_bytes=60, wanted_bytes=20, spread=False)
    assert plan is not None
    assert plan.nbytes == 20
    # The backward of each layer needs 10 more for a time; behind the last nothing more comes.
    assert plan.at_reductions_bytes == (0, 10, 20, 20)
    assert plan.at_uses_bytes == (20, 20, 10, 0)  # at the second turn 30 are there, and 40 at the next


def test_what_nothing_passes_through_any_more_goes_all_along_the_forward() -> None:
    plan = plan_staging(*FOUR_LAYERS, peak_bytes=60, wanted_bytes=9, spread=True)
    assert plan is not None
    assert plan.at_uses_bytes == (9, 6, 3, 0)


def test_a_forward_that_makes_nothing_gives_back_at_its_end() -> None:
    plan = plan_staging([5, 5], [5, 5], peak_bytes=10, wanted_bytes=5, spread=True)
    assert plan is not None
    assert plan.at_uses_bytes == (5, 0)


def test_less_where_more_is_allocated_than_was_learnt() -> None:
    plan = plan_staging(*FOUR_LAYERS, peak_bytes=60, wanted_bytes=20, spread=False)
    assert plan is not None
    assert [plan.at_reduction(2, allocated) for allocated in (25, 30, 33)] == [20, 20, 17]
    assert plan.at_reduction(7, 20) == 20  # more reductions than were learnt
    assert plan.at_use(7) == 0


def test_no_room() -> None:
    assert plan_staging([5, 10], [10, 10], peak_bytes=10, wanted_bytes=7, spread=True) is None


allocated_bytes = st.lists(st.integers(0, 100), min_size=1)


@given(allocated_bytes, allocated_bytes, st.integers(0, 50), st.integers(0, 200), st.booleans())
def test_never_above_the_peak(uses: list[int], reductions: list[int], more: int, wanted: int, spread: bool) -> None:
    peak = max(uses + reductions) + more
    plan = plan_staging(uses, reductions, peak, wanted, spread=spread)
    if plan is None:
        return
    assert plan.nbytes <= wanted
    taken, kept = plan.at_reductions_bytes, plan.at_uses_bytes
    assert list(taken) == sorted(taken)
    assert taken[-1] == plan.nbytes
    for number, staged in enumerate(taken):
        assert max(reductions[number:]) + staged <= peak
        for other in (reductions[number], reductions[number] + 7, peak):
            assert other + plan.at_reduction(number, other) <= peak
    # At the turn of each group what is too much goes, and until the next one it has allocated what is there then.
    assert list(kept) == sorted(kept, reverse=True)
    assert plan.nbytes >= kept[0] >= kept[-1] == 0
    for staged, at_next in zip(kept, [*uses[1:], peak], strict=True):
        assert staged + at_next <= peak


@pytest.mark.parametrize("habit", [None, *HABITS])
@pytest.mark.parametrize("fields", [{"prefetch": "backward"}, {"update": "backward"}], ids=["prefetch", "update"])
@pytest.mark.parametrize("overlap_forward", [False, True])
@pytest.mark.parametrize("room", [9_000, 1 << 30])
def test_same_bits(
    mesh: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, str],
    overlap_forward: bool,
    habit: str | None,
    room: int,
) -> None:
    if fields.get("update") == "backward" and habit in NOT_IN_BACKWARD | {"evaluate-before-step"}:
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
    policy = OffloadPolicy(staging_bytes="auto", bucket_bytes=1024, overlap_forward=overlap_forward, **fields)
    plain, offloaded = Loop(mesh, adamw, None), Loop(mesh, adamw, policy)
    attached.append(1)
    for loop in (plain, offloaded):
        loop.train(10, HABITS[habit] if habit else None)
    assert same(plain, offloaded)
    report = offloaded.optimizer.offload_report()
    assert "staging_bytes='auto'" in str(report)
    if room > 9_000:
        assert len(taken) > 50  # given back in each forward
        assert taken[0] == 3 * 1024 > max(taken[1:])  # blocks, once the room is known
        assert max(there) == report.ring_bytes
        # Where the model hides what passes, one group beside that is enough.
        assert (report.ring_bytes >= report.host_state_bytes) != policy.updates_beside_compute
    else:
        assert max(there) <= room
