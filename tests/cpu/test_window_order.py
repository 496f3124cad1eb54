"""Whole iterations with parameters on the host meet no hazard on asynchronous streams: proved on recorded ones.

As ``test_pipeline_order.py``, whose history this is, with a real model and a real engine: lanes record who accesses
which bytes, beside them gathers note what they read, and updates what they write. Each wait of the window is then left
out in turn, and the history has a race.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload.device import link as link_room
from fsdp_offload.device.lanes import HostMark, Lane, Mark
from fsdp_offload.device.link import DeviceLink
from fsdp_offload.engine import window
from fsdp_offload.engine.bucket import StagedBucket
from fsdp_offload.engine.executor import Pipeline
from fsdp_offload.engine.window import Window
from fsdp_offload.plan.device_share import DeviceShare
from fsdp_offload.torch_compat.sharded_parameter import ShardedParameter
from tests.cpu.test_pipeline_order import Access, History, RaceError, RecordedLane, RecordedMark, Stream, reads, writes
from tests.overlapping import POLICIES, Loop, Net, adamw, look, same
from tests.policies import with_share
from tests.window_mutants import Deaf, gather_before_its_load, load_before_the_store

EVERY_POLICY = pytest.mark.parametrize("fields", POLICIES.values(), ids=POLICIES)


PAGE_BYTES = 4096


class Memories(History):
    """Bytes are called by their address, which means one thing only: what has been accessed is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.streams["window"] = Stream("window")
        self._kept: dict[int, torch.UntypedStorage] = {}

    def find(self, tensor: Tensor) -> tuple[str, int, int]:
        storage = tensor.untyped_storage()
        self._kept.setdefault(storage.data_ptr(), storage)
        return "memory", tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes

    def issue(self, what: str, *accesses: Access, on: Stream | None = None) -> None:
        """Page by page, so that few have to be compared."""
        by_page = []
        for access in accesses:
            for page in range(access.begin // PAGE_BYTES, (access.end - 1) // PAGE_BYTES + 1):
                begin, end = max(access.begin, page * PAGE_BYTES), min(access.end, (page + 1) * PAGE_BYTES)
                by_page.append(Access(str(page), begin, end, access.writes))
        super().issue(what, *by_page, on=on)

    def note(self, what: str, tensors: Sequence[Tensor], how: Callable[..., Access]) -> None:
        self.issue(what, *(how(*self.find(tensor)) for tensor in tensors if tensor.numel()))


class TimelessMark(RecordedMark):
    def elapsed_ms_since(self, earlier: Mark) -> float:
        return 1.0

    def passed(self) -> bool:
        return True


class TimelessLane(RecordedLane):
    def wait(self, mark: Mark) -> None:
        if not isinstance(mark, HostMark):  # gradients, which nobody here looks at, have been reduced
            super().wait(mark)

    def mark(self, reuse: Mark | None = None) -> Mark:
        mark = reuse if isinstance(reuse, TimelessMark) else TimelessMark(self._history)
        mark.known = {**self.now.known}
        return mark


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memories]:
    """Streams of an accelerator for all that is attached now."""
    found = Memories()
    monkeypatch.setattr(link_room, "_links", {})
    lane = {name: TimelessLane(found, name) for name in ("load", "store", "update", "window")}
    compute = TimelessLane(found, None)

    def lanes(self: DeviceLink, *, serial: bool, beside_compute: bool = False) -> dict[str, Lane]:
        return {"L": lane["load"], "U": lane["update"] if beside_compute else compute, "S": lane["store"], "C": compute}

    monkeypatch.setattr(DeviceLink, "lanes", lanes)
    monkeypatch.setattr(DeviceLink, "window_lane", lambda self, *, serial: lane["window"])
    monkeypatch.setattr(DeviceLink, "synchronize", lambda self: found.synchronize())
    monkeypatch.setattr(DeviceLink, "key_of", lambda self, stream: id(found.current))
    monkeypatch.setattr(Pipeline, "_update", noted_update(found, Pipeline._update))
    monkeypatch.setattr(Window, "take_back", noted_gather(found, Window.take_back))
    copy_all = torch._foreach_copy_

    def noted_copies(targets: Sequence[Tensor], sources: Sequence[Tensor], **options: Any) -> None:
        copy_all(targets, sources, **options)
        if found.current is not found.streams["compute"] or in_update:
            found.note("copy to", targets, writes)
            found.note("copy from", sources, reads)

    monkeypatch.setattr(torch, "_foreach_copy_", noted_copies)
    yield found
    in_update.clear()


in_update: list[int] = []
"""The bucket that is being updated: its copies may be on the compute stream."""


def noted_update(history: Memories, plain: Callable[..., None]) -> Callable[..., None]:
    def method(self: Pipeline, bucket: StagedBucket, number: int, lane: Lane, update: Callable[[int], None]) -> None:
        def noted(number: int) -> None:
            update(number)
            if bucket.placement is not None:
                history.note(f"update {number}", [self._slot_of(bucket)], writes)

        in_update.append(number)
        plain(self, bucket, number, lane, noted)
        in_update.pop()

    return method


def noted_gather(history: Memories, plain: Callable[..., None]) -> Callable[..., None]:
    def method(self: Window, number: int, stream: torch.Stream | None) -> None:
        kept = (self._own(weights) for weights in self.groups[number])
        history.note(f"gather {number}", [one for one in kept if one is not None], reads)
        history.note(f"gather {number}", list(self._entries[number].views.values()), reads)
        plain(self, number, stream)

    return method


def net() -> Net:
    return Net(width=16, layers=4)


def train(loop: Loop, *, early: bool) -> Loop:
    """``early``: updates begin in the backward, so that there is no time between it and the step."""
    for step in range(6):
        if step in (2, 4):
            look(loop)
        loop.backward(step)
        if not early:
            with torch.no_grad():
                for part in (*loop.model.blocks[1:], loop.model.extra, loop.model.blocks[0]):
                    part(torch.ones(16))  # by itself: what would be gathered next is loaded, and not gathered
        loop.step()
    return loop


def train_on_host(mesh: DeviceMesh, fields: dict[str, Any], passing: int) -> Loop:
    policy = with_share(bucket_bytes=2048, passing=passing, parameters=True, **fields)
    return train(Loop(mesh, adamw, policy, net=net), early=policy.updates_in_backward)


@EVERY_POLICY
@pytest.mark.parametrize("passing", [2 * 2048, 5 * 2048, 1 << 20])
def test_no_race(mesh: DeviceMesh, history: Memories, fields: dict[str, Any], passing: int) -> None:
    loop = train_on_host(mesh, fields, passing)
    assert history._accesses
    plain = train(Loop(mesh, adamw, None, net=net), early=fields.get("overlap") == "iteration")
    assert same(plain, loop)


def test_no_race_where_a_load_ahead_meets_the_update(
    mesh: DeviceMesh, history: Memories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward fails behind its first gather: what was loaded for the next one is written by the step."""
    wide = DeviceShare.window_bytes
    monkeypatch.setattr(DeviceShare, "window_bytes", lambda self, nbytes: wide(self, nbytes) + min(nbytes))
    policy = with_share(bucket_bytes=2048, passing=5 * 2048, parameters=True, overlap="forward")
    loops = [Loop(mesh, adamw, one, net=net).train(3) for one in (None, policy)]
    for loop in loops:
        for step in range(3, 6):
            loop.backward(step)
            with torch.no_grad():
                for part in (*loop.model.blocks[1:], loop.model.extra):
                    part(torch.ones(16))
                with pytest.raises(IndexError):
                    loop.model(torch.tensor([1000]))
            loop.model.reshard()
            loop.step()
    assert same(*loops)


def train_and_leave(loop: Loop, *, release: bool) -> Loop:
    """Send kept state and parameters to the host for evaluations; a step or a reload brings them back."""
    for step in range(8):
        loop.backward(step, extra=step != 5)
        loop.step()
        if hasattr(loop.optimizer, "offload_states") and step % 2:
            loop.optimizer.offload_states()
            if release:
                loop.optimizer.release_states()
        look(loop)
        if hasattr(loop.optimizer, "reload_states") and step % 4 == 3:
            loop.optimizer.reload_states()
        look(loop)
    return loop


@pytest.fixture(params=["gathers", "loads"])
def read_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gathers read parameters that have left where they are, or loads, as with an accelerator."""
    own = Window._own

    def copied(self: Window, weights: ShardedParameter) -> Tensor | None:
        shard = self._plan.shards.get(weights.param)
        return None if shard is not None and shard.home in shard.host_places else own(self, weights)

    if request.param == "loads":
        monkeypatch.setattr(Window, "_own", copied)


@EVERY_POLICY
@pytest.mark.parametrize(("release", "holds_all"), [(False, False), (True, False), (False, True)])
@pytest.mark.usefixtures("read_by")
def test_no_race_where_what_stays_leaves(
    mesh: DeviceMesh,
    history: Memories,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    release: bool,
    holds_all: bool,
) -> None:
    """It is read where it is going, or where it comes back to; beside what the window has loaded before that, too."""
    if holds_all:
        monkeypatch.setattr(DeviceShare, "window_bytes", lambda self, nbytes: 2 * sum(nbytes))
    policy = with_share(bucket_bytes=2048, passing=5 * 2048, staying=20_000, parameters=True, **fields)
    loop = train_and_leave(Loop(mesh, adamw, policy, net=net), release=release)
    assert same(train_and_leave(Loop(mesh, adamw, None, net=net), release=release), loop)


# What each wait is for -------------------------------------------------------------------------------------------


def load_into_what_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Window, "_wait_until_free", lambda self, begin, end: None)


def store_before_a_load_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Window, "before_store", lambda self, bucket, lane: None)


def new_values_into_what_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    updated = Window.updated

    def deaf(self: Window, bucket: int, slot: Tensor, lane: Lane) -> None:
        updated(self, bucket, slot, Deaf(lane))  # type: ignore[arg-type]

    monkeypatch.setattr(Window, "updated", deaf)


def update_before_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = Window.fill

    def deaf(self: Window, bucket: int, slot: Tensor, lane: Lane) -> None:
        fill(self, bucket, slot, Deaf(lane))  # type: ignore[arg-type]

    monkeypatch.setattr(Window, "fill", deaf)


# Where parameters are to be new when step() returns, the host waits for all stores; and only what is updated in the
# backward has been kept for it.
ALWAYS = ("step", "forward", "iteration")
MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Sequence[str]]] = [
    (gather_before_its_load, ALWAYS),
    (load_before_the_store, ("forward", "iteration")),
    (load_into_what_is_still_read, ALWAYS),
    (store_before_a_load_has_read, ("step", "forward")),
    (new_values_into_what_is_still_read, ("iteration",)),
    (update_before_the_load, ("iteration",)),
]


@pytest.mark.parametrize(("mutant", "name"), [(mutant, name) for mutant, names in MUTANTS for name in names])
def test_a_race_without_a_wait(
    mesh: DeviceMesh, history: Memories, monkeypatch: pytest.MonkeyPatch, mutant: Any, name: str
) -> None:
    mutant(monkeypatch)
    with pytest.raises(RaceError):
        train_on_host(mesh, POLICIES[name], 5 * 2048)


# What each decision is for: other bits, in whatever order the device works ---------------------------------------


def entries_that_outlive_their_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Window, "updated", lambda self, bucket, slot, lane: None)


def entries_that_nobody_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "_version", lambda param: 0)


def write(loop: Loop) -> None:
    with torch.no_grad():
        for param in loop.model.parameters():
            param.mul_(0.9)


@pytest.mark.parametrize("mutant", [entries_that_outlive_their_update, entries_that_nobody_compares])
def test_other_bits_without_a_look(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, mutant: Any) -> None:
    loops = [Loop(mesh, adamw, None, net=net)]
    mutant(monkeypatch)
    policy = with_share(bucket_bytes=2048, passing=5 * 2048, parameters=True)
    loops.append(Loop(mesh, adamw, policy, net=net))
    for loop in loops:
        loop.train(3)
        write(loop)
        loop.train(2, first=3)
    assert not same(*loops)
