"""When staging that is left to be found out is taken and given back."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_offload import OffloadPolicy
from fsdp_offload.elastic import plan_staging
from fsdp_offload.transfer import Allocated, DeviceLink
from tests.overlapping import HABITS, NOT_IN_BACKWARD, Loop, adamw, same


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_all_of_it_where_there_is_room() -> None:
    # Activations of 10 for each of four layers above 20; the peak is in the last.
    plan = plan_staging([20, 30, 40, 50], [50, 40, 30, 20], peak_bytes=60, wanted_bytes=20)
    assert plan is not None
    assert (plan.nbytes, plan.first_reduction) == (20, 1)
    assert plan.last_use == 2  # at its turn 40 are there, and 50 at the next: 10 too many for 20 more


def test_little_but_early_rather_than_much_at_the_end() -> None:
    plan = plan_staging([0, 30, 60, 90], [10, 8, 4, 0], peak_bytes=100, wanted_bytes=1000)
    assert plan is not None
    assert (plan.nbytes, plan.first_reduction) == (90, 0)


def test_room_for_next_to_nothing() -> None:
    plan = plan_staging([0], [1, 0], peak_bytes=1, wanted_bytes=1)
    assert plan is not None
    assert (plan.nbytes, plan.first_reduction) == (1, 1)


def test_no_room() -> None:
    assert plan_staging([5, 10], [10, 10], peak_bytes=10, wanted_bytes=7) is None


@given(st.lists(st.integers(0, 100), min_size=1), st.lists(st.integers(0, 100), min_size=1), st.integers(0, 200))
def test_never_above_the_peak(uses: list[int], reductions: list[int], wanted: int) -> None:
    peak = max(uses + reductions)
    plan = plan_staging(uses, reductions, peak, wanted)
    if plan is None:
        return
    assert reductions[plan.first_reduction] + plan.nbytes <= peak
    for at in range(1, plan.last_use + 1):  # given back at the turn of ``last_use``
        assert uses[at] + plan.nbytes <= peak


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
    ring = DeviceLink.ring

    def counted(self: DeviceLink, nbytes: int, user: int) -> object:
        before = self._ring
        found = ring(self, nbytes, user)
        if found is not before:
            taken.append(nbytes)
        return found

    # On the CPU nothing is counted: a device that has as much room.
    attached: list[int] = []
    monkeypatch.setattr(DeviceLink, "allocated_bytes", lambda self: Allocated(0, room if attached else 0))
    monkeypatch.setattr(DeviceLink, "ring", counted)
    policy = OffloadPolicy(staging_bytes="auto", bucket_bytes=1024, overlap_forward=overlap_forward, **fields)
    plain, offloaded = Loop(mesh, adamw, None), Loop(mesh, adamw, policy)
    attached.append(1)
    for loop in (plain, offloaded):
        loop.train(10, HABITS[habit] if habit else None)
    assert same(plain, offloaded)
    report = offloaded.optimizer.offload_report()
    assert "staging_bytes='auto'" in str(report)
    if room > 9_000:
        assert len(taken) > 5  # given back in each forward
        assert taken[0] == 3 * 1024 < taken[-1] == report.ring_bytes
        # Where the model hides what passes, one group beside that is enough.
        assert (report.ring_bytes >= report.host_state_bytes) != policy.updates_beside_compute
    else:
        assert taken[-1] <= room
