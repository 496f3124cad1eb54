"""The timeline, victims of the cache, sizes of buckets and the rule of the room, each by itself."""

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy, add_masters, offload_optimizer
from fsdp_offload.core import loop as loop_module
from fsdp_offload.core.buckets import (
    ELSEWHERE,
    Bucket,
    bucket_bytes_for,
    bucketing,
    choose_kept,
    joined_groups,
    make_pools,
    pools_for,
    share_out,
)
from fsdp_offload.core.cache import NEVER, Cache, Pool, Timeline
from fsdp_offload.core.items import Item, Use
from fsdp_offload.core.loop import Core, Reductions, Updates
from fsdp_offload.core.room import LASTING, UNSETTLED, Reading, Room
from fsdp_offload.device.lanes import EventMark, SerialLane
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.state.store import OwnCounters, StateStore
from tests.overlapping import Net, pair, same

from .deferred import DeferredLanes
from .test_interrupts import Interrupted

MIB = 1 << 20


def timeline_of(text: str) -> tuple[Timeline, dict[str, Item]]:
    """A timeline that expects the uses of items in ``text``, in that order."""
    items = {name: Item(name, 8) for name in text}
    uses = {name: Use(name, (item,)) for name, item in items.items()}
    timeline = Timeline()
    for name in text:
        timeline.note(uses[name])
    timeline.end()
    return timeline, items


def after(timeline: Timeline, items: dict[str, Item], text: str) -> str:
    """What is expected next, once the uses in ``text`` have come, and how far away each item is."""
    uses = {use.name: use for use in timeline.cycle}
    for name in text:
        timeline.note(uses[name])
    cycle = timeline.cycle
    upcoming = "".join(str(cycle[at % len(cycle)].name) for at in timeline.upcoming(4)[:4])
    ahead = timeline.distances(items.values())
    return upcoming + " " + " ".join(f"{name}{number}" for name, number in zip(items, ahead, strict=True))


@pytest.mark.parametrize(
    ("cycle", "come", "expected"),
    [
        ("abc", "", "abc a0 b1 c2"),
        ("abc", "a", "bca a2 b0 c1"),
        ("abc", "ac", "abc a0 b1 c2"),  # one was left out
        ("abcba", "ab", "cbaa a2 b1 c0"),
        ("abcba", "abcb", "aabc a0 b2 c3"),
    ],
)
def test_timeline_knows_what_comes_next(cycle: str, come: str, expected: str) -> None:
    assert after(*timeline_of(cycle), come) == expected


def test_timeline_tells_repeated_iterations_and_keeps_the_last_one_that_had_uses() -> None:
    timeline, _ = timeline_of("ab")
    uses = list(timeline.cycle)
    assert timeline.distances([Item("c", 8)]) == [NEVER]  # and is never used
    assert not timeline.repeats
    for use in uses:
        timeline.note(use)
    timeline.end()
    assert timeline.repeats
    timeline.end()  # a step without gradients
    assert timeline.cycle == uses


@pytest.mark.parametrize(
    ("steps", "now", "final"),
    [
        ("", 1, False),
        ("1", 1, True),
        ("2", 1, False),
        ("2", 2, True),
        ("2111", 1, False),
        ("21111", 1, True),
        ("1", 0, False),
        ("-31", 1, True),  # those without a step count for nothing
    ],
)
def test_gradients_are_final_after_the_most_reductions_of_four_steps(steps: str, now: int, final: bool) -> None:
    reductions = Reductions()
    for sign, count in re.findall(r"(-?)(\d)", steps):
        for _ in range(int(count)):
            reductions.counts[0] += 1
        reductions.end(stepped=not sign)
    for _ in range(now):
        reductions.counts[0] += 1
    assert reductions.is_final(0) is final


@pytest.fixture
def followed() -> list[Bucket]:
    """Four groups of parameters with three, three and two ranges, each in a bucket."""
    buckets = [Bucket(number, Item(f"s{number}", 10), (number // 8,)) for number in range(32)]
    for one in buckets:
        group, at = divmod(one.number, 8)
        one.followers = tuple(buckets[one.number + 1 : 8 * group + min(8, at // 3 * 3 + 3)])
    return buckets


@pytest.mark.parametrize(("link_ms", "count"), [(690.0, 0), (710.0, 4)])
def test_if_the_link_is_late_a_fourth_of_what_moves_waits_for_step(
    followed: list[Bucket], link_ms: float, count: int
) -> None:
    """No bucket does on which others would wait; nor those that stay, of the CPU, or not gathered."""
    for one in followed[:12]:
        one.state.kept = one.number < 8
        one.on_host = one.number >= 8
    for one in followed[28:]:
        one.groups = (ELSEWHERE,)
    reductions = Reductions()
    reductions.choose_later(followed, Reading(50, 1050, link_ms=link_ms))
    later = reductions.later
    assert len(later) == count
    assert all(later.issuperset(one.followers) and 12 <= one.number < 28 for one in later)
    assert count == 0 or len({one.groups for one in later}) > 1  # in several parts of the forward


def test_of_few_buckets_that_move_none_waits() -> None:
    buckets, counts = [Bucket(number, Item(f"s{number}", 10), (0,)) for number in range(8)], []
    for moving in range(8):
        reductions = Reductions()
        reductions.choose_later(buckets[:moving], Reading(0, 1, link_ms=1))
        counts.append(len(reductions.later))
    assert counts == [0, 0, 0, 1, 1, 1, 1, 2]


def test_what_waits_for_step_holds_still(followed: list[Bucket]) -> None:
    reductions, counts = Reductions(), []
    reductions.counts.update({0: 2, 1: 2, 2: 4, 3: 2})  # of two micro-batches; one group is used twice
    reductions.end()
    for iteration_ms, link_ms in [(1000, 710), (1000, 610), (5000, 610), (5000, 580), (1000, 580), (1000, 690)]:
        reductions.choose_later(followed, Reading(0, 2 * iteration_ms, link_ms=link_ms))
        counts.append(len(reductions.later))
    assert counts == [7, 7, 7, 0, 0, 0]


def cache_of(cycle: str, held: str, blocks: int, kept: str = "", come: str = "") -> tuple[Cache, dict[str, Item]]:
    """A cache with the items in ``held``, of a timeline as above."""
    timeline, items = timeline_of(cycle)
    lanes = DeferredLanes(0)
    cache = Cache(torch.device("cpu"), lanes, timeline)
    cache.pools = [Pool(8, blocks)]
    for item in items.values():
        item.pool = cache.pools[0]
    for name in held:
        items[name].home.bytes = [(torch.zeros(8, dtype=torch.uint8), 0)]
        cache.fetch(items[name])
    for name in kept:
        items[name].kept = True
    uses = {use.name: use for use in timeline.cycle}
    for name in come:
        timeline.note(uses[name])
    return cache, items


@pytest.mark.parametrize(
    ("held", "kept", "come", "wanted", "must", "left"),
    [
        ("ab", "", "ab", "c", False, "ca"),  # b is needed after a
        ("ab", "", "a", "c", False, "bc"),  # a has been used: it is needed last
        ("ab", "", "", "d", False, "ab"),  # both are needed sooner
        ("ab", "", "", "d", True, "ad"),
        ("ab", "b", "ab", "c", False, "cb"),  # what is kept stays
        ("ab", "ab", "ab", "c", False, "ab"),
        ("ab", "ab", "ab", "c", True, "ac"),  # unless an update cannot do without
    ],
)
def test_the_victim_is_what_is_used_last(held: str, kept: str, come: str, wanted: str, must: bool, left: str) -> None:
    cache, items = cache_of("abcd", held, 2, kept, come)
    items[wanted].home.bytes = [(torch.zeros(8, dtype=torch.uint8), 0)]
    cache.fetch(items[wanted], must=must, distance=cache.timeline.distances([items[wanted]])[0])
    assert sorted(item.name for item in cache.held) == sorted(left)
    assert cache.pools[0].made == 2


def test_a_pinned_item_is_no_victim_and_the_update_takes_one_block_more() -> None:
    cache, items = cache_of("ab", "a", 1)
    cache.pinned = (items["a"],)
    cache.fetch(items["b"])
    assert cache.pools[0].made == 2 > cache.pools[0].count
    cache.resize(cache.pools[0], 1)
    assert cache.pools[0].made == 1


def test_a_place_that_was_not_filled_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, items = cache_of("a", "", 1)
    items["a"].home.bytes = [(torch.zeros(8, dtype=torch.uint8), 0)]

    def interrupt(*_: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache.lanes.load, "copy", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.fetch(items["a"])
    assert items["a"].block is None
    assert (len(cache.held), len(cache.pools[0].free)) == (0, 1)
    assert cache.fetch(items["a"])


def test_behind_an_interrupt_at_any_line_of_a_load_the_next_one_ends() -> None:
    """Also where an item had to leave for it: that one would be evicted again and again."""
    lines, at = 1, 0
    while at < lines:
        at += 1
        cache, items = cache_of("ab", "a", 1)
        items["b"].home.bytes = [(torch.zeros(8, dtype=torch.uint8), 0)]
        with Interrupted(at) as first:
            cache.fetch(items["b"])
        lines = max(lines, first.lines + (first.where != ""))
        with Interrupted(1000, AssertionError) as second:
            assert cache.fetch(items["b"])
        assert not second.where, f"the load behind an interrupt at {first.where} does not end"
        assert [item.name for item in cache.held if item.block is not None] == ["b"]
    assert lines > 30


@pytest.mark.parametrize("must", [False, True])
def test_a_device_without_memory_for_another_block(monkeypatch: pytest.MonkeyPatch, must: bool) -> None:
    """A prefetch does without; an update has another item leave."""

    asked = []

    def refuse(cache: Cache, pool: Pool) -> None:
        asked.append(pool)
        raise torch.OutOfMemoryError

    cache, items = cache_of("ab", "a", 2)
    items["b"].home.bytes = [(torch.zeros(8, dtype=torch.uint8), 0)]
    monkeypatch.setattr(Cache, "_take", refuse)
    for _ in range(2):
        assert cache.fetch(items["b"], must=must, distance=0) == must
    assert [item.name for item in cache.held] == ["b" if must else "a"]
    assert len(asked) == 1, "in this iteration"


def test_a_block_that_an_evaluation_makes_may_be_written_later() -> None:
    with torch.inference_mode():
        _, items = cache_of("a", "a", 1)
    assert items["a"].block is not None
    assert not items["a"].block.memory.is_inference()


@pytest.mark.parametrize(
    ("groups_mib", "device_mib", "small", "expected_mib"),
    [
        ([1072, *[384] * 24], None, False, 198),  # two buckets for each usual group, larger ones cut to their size
        ([1072, *[384] * 24], 640, False, 132),  # three equal parts
        ([1072, *[384] * 24], 1280, True, 76.8 * 33 / 32),  # a 16th: five parts
        ([1072, *[384] * 24], 128, True, 32),  # a quarter, as 288 buckets are larger
        ([1072, *[384] * 24], 320, True, 10288 / 288),  # as many as 288 buckets
        ([4096, *[1600] * 32], None, False, 825),  # a 64th of all is more than 256 MiB
        ([3] * 10, None, False, 3.09375),
        ([376] * 12 + [400] * 10, None, False, 206.25),  # the larger ones are hardly larger
        ([], None, False, 256),
    ],
)
def test_bucket_bytes(groups_mib: list[int], device_mib: int | None, small: bool, expected_mib: float) -> None:
    limit = None if device_mib is None else device_mib * MIB
    assert bucket_bytes_for([size * MIB for size in groups_mib], limit, small=small) == int(expected_mib * MIB)


def test_buckets_are_as_large_as_the_state_is() -> None:
    """State of low-precision parameters with masters is five times their bytes."""
    param = torch.nn.Parameter(torch.zeros(1 << 16, dtype=torch.bfloat16))
    engine = engine_of(offload_optimizer(add_masters(torch.optim.AdamW([param]), "remainder")))
    assert engine is not None
    assert engine.plan.bucket_bytes == (4 + 4 + 2) * param.numel() * 33 // 32


def test_small_groups_are_joined_with_their_neighbours() -> None:
    params = [torch.zeros(1) for _ in range(5)]
    joined = joined_groups(
        {param: number for number, param in enumerate(params)}, {0: 10, 1: 20, 2: 50, 3: 5, 4: 5}, 60
    )
    assert list(joined.values()) == [0, 0, 1, 1, 1]


def test_groups_without_state_are_not_joined_where_their_parameters_move() -> None:
    """One update would need the parameters of all of them on the device."""
    groups = {number: number for number in range(4)}
    for parameters, count in ((True, 4), (False, 1)):
        policy = OffloadPolicy(parameters=parameters)
        _, joined = bucketing(policy, together=groups, sizes=dict.fromkeys(groups, (100 << 20, 0)))
        assert len(set(joined.values())) == count


def buckets_of(sizes: list[int]) -> list[Bucket]:
    return [Bucket(number, Item(str(number), size), (0,), ()) for number, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "blocks", "kept"),
    [
        ([8] * 6, 4, "0"),
        ([8] * 6, 3, ""),
        ([8] * 6, 6, "012345"),
        ([8] * 6, 5, "01"),
        ([0, *[8] * 5], 4, "1"),
        ([], 4, ""),
    ],
)
def test_the_first_buckets_are_kept_beside_three_that_pass(sizes: list[int], blocks: int, kept: str) -> None:
    buckets = buckets_of(sizes)
    items = [b.state for b in buckets if b.state.nbytes]
    share_out(make_pools(items, 8), 8 * blocks)
    choose_kept(items)
    assert "".join(b.state.name for b in buckets if b.state.kept) == kept


def test_an_item_that_is_much_larger_has_a_block_of_its_own() -> None:
    items = [Item("a", 8), Item("b", 10), Item("c", 100)]
    pools = make_pools(items, 8)
    share_out(pools, 64)
    assert [(pool.nbytes, pool.count) for pool in pools] == [(10, 1), (100, 1)]  # as few as there must be
    share_out(pools, 120)
    assert [(pool.nbytes, pool.count) for pool in pools] == [(10, 2), (100, 1)]
    assert [item.pool for item in items] == [pools[0], pools[0], pools[1]]


def test_what_is_in_front_gets_more_blocks() -> None:
    first, second = Pool(10, 1, most=9), Pool(10, 1, most=9)
    for nbytes, counts in ((0, (1, 1)), (40, (3, 1)), (60, (3, 3)), (90, (6, 3)), (130, (9, 4)), (None, (4, 4))):
        first.least = second.least = 1
        share_out([first, second], nbytes)
        assert (first.count, second.count) == counts, nbytes


@pytest.mark.parametrize(("in_groups", "transit"), [([1, 1, 1], 3), ([2, 2, 9], 3), ([4, 4, 4, 9], 5), ([9, 9], 5)])
def test_an_update_may_take_all_buckets_of_a_usual_group(in_groups: list[int], transit: int) -> None:
    """One block more is loaded meanwhile. What ``fully_shard`` does not gather counts for nothing."""
    groups = [group for group, count in enumerate(in_groups) for _ in range(count)] + [ELSEWHERE] * 20
    buckets = [Bucket(n, Item(f"s{n}", 8), (group,), ()) for n, group in enumerate(groups)]
    state = [bucket.state for bucket in buckets]
    (pool,) = pools_for(state, [], buckets, 8, None, joins=True)
    share_out([pool], None)
    assert (pool.transit, pool.count) == (transit, transit + 1)
    choose_kept(state)
    assert (sum(item.kept for item in state), pool.passing) == (1, transit)
    (pool,) = pools_for(state, [], buckets, 8, None)
    assert pool.transit == 3


def end(room: Room, stalled_ms: float, in_step_ms: float = 0, steady: bool = True, free_bytes: int = 1 << 40) -> int:
    return room.end(Reading(stalled_ms, 1000, in_step_ms=in_step_ms), steady=steady, free_bytes=lambda: free_bytes)


def end_twice(room: Room, stalled_ms: float, **options: Any) -> bool:
    """One reading alone is not believed."""
    return any(end(room, stalled_ms, **options) for _ in range(2))


@pytest.fixture
def room() -> Room:
    """It has settled."""
    found = Room(100, 1000, rate=10)
    for _ in range(UNSETTLED):
        found.end(None, steady=True, free_bytes=lambda: 1 << 40)
    return found


def test_room_grows_until_compute_does_not_wait(room: Room) -> None:
    for _ in range(40):
        end(room, max(0, 2600 - room.extra * 100) * 2 / 10)  # with 26 blocks more, nobody waits
    assert 25 <= room.extra <= 27


def test_room_does_not_grow_from_iterations_that_are_not_steady() -> None:
    room = Room(100, 1000, rate=10)
    assert not any(end(room, 500, steady=False) for _ in range(20))
    assert not any(end(room, 500) for _ in range(UNSETTLED - 1))
    assert end_twice(room, 500)


def test_room_does_not_grow_from_one_reading(room: Room) -> None:
    assert not any(end(room, stalled_ms) for stalled_ms in (500, 5, 500, 0, 500))
    assert end(room, 20)
    assert room.extra == 1  # as many as the better of the two readings asks for


def test_room_does_not_grow_from_waits_in_step(room: Room) -> None:
    """Updates in ``step()`` wait for all that moves: they would only be content with everything on the device."""
    assert not end_twice(room, 500, in_step_ms=495)
    assert end_twice(room, 500, in_step_ms=400)


@pytest.mark.parametrize(("link_ms", "grown"), [(700, 0), (800, 5)])
def test_room_grows_where_the_host_waits_for_the_link(room: Room, link_ms: float, grown: int) -> None:
    """A full link fills the driver's queue of copies, which stops the host, and compute waits for the host."""
    for _ in range(2):
        room.end(Reading(0, 1000, host_ms=100, link_ms=link_ms), steady=True, free_bytes=lambda: 1 << 40)
    assert room.extra == grown


def test_room_is_no_more_than_what_is_offloaded() -> None:
    """Blocks have the size of the largest item; without offload there would be none."""
    items = [Item("large", 100), *(Item("small", 40) for _ in range(9))]
    (pool,) = make_pools(items, 100)
    pool.count = pool.least = 4
    room = Room.for_pools([pool], items)
    assert room is not None
    for _ in range(40):
        end(room, 500)
    assert (room.counts([pool]), pool.most) == ([5], 10)


def test_room_grows_by_what_the_link_was_seen_to_move(room: Room) -> None:
    slow = Reading(100, 1000, load_gb_per_s=8e-6, store_gb_per_s=12e-6)  # 20 bytes in a ms, both ways together
    for _ in range(2):
        room.end(slow, steady=True, free_bytes=lambda: 1 << 40)
    assert room.extra == 10


def test_room_grows_again_from_the_second_reading_of_more_blocks(room: Room) -> None:
    assert end_twice(room, 500)
    assert [end(room, 100) for _ in range(4)] == [0, 0, 0, 5]


def test_room_is_settled_until_compute_stalls_once(room: Room) -> None:
    for late_ms, settled in [(0, False), (0, True), (500, False), (0, True)]:
        for _ in range(LASTING - 1 if late_ms == 0 and not settled else 1):
            end(room, late_ms)
        assert room.is_settled is settled


def test_room_takes_half_of_what_is_free_at_most_and_gives_back_what_is_not(room: Room) -> None:
    end_twice(room, 500, free_bytes=1000)
    assert room.extra == 5
    assert not room.is_full
    for _ in range(2):
        end_twice(room, 500, free_bytes=100)
    assert room.is_full
    for _ in range(4):
        end(room, 0, free_bytes=-1)
    assert room.extra < 5


@pytest.mark.parametrize("needed", [0, 7, 26, 300, 1000])
def test_room_settles_with_few_more_blocks_than_it_needs(room: Room, needed: int) -> None:
    """Those that were taken for first stalls leave again, and a number that has stalled is not tried twice."""

    def settle(needed: int, iteration_ms: float) -> list[int]:
        tried = []
        for _ in range(150):
            reading = Reading(stalled_ms := max(0, needed - room.extra) * 30, iteration_ms + stalled_ms)
            room.end(reading, steady=True, free_bytes=lambda: 1 << 40)
            tried.append(room.extra)
        assert needed <= room.extra <= needed + 1000 // 32
        assert len({*tried[-80:]}) == 1, "it holds still"
        stalled = [tried[at] for at in range(len(tried)) if tried[at] < needed and tried[at] != tried[at - 1]]
        assert len(stalled) == len({*stalled})
        return tried

    settle(needed, 1000)
    settle(needed // 3, 3000)  # more tokens hide more
    assert max(settle(needed, 1000)) < max(2 * needed, 40)


@pytest.mark.parametrize(("needed", "changes"), [(26, 3), (300, 3), (600, 5), (1000, 5)])
def test_room_learns_from_a_try_how_many_blocks_were_lacking(room: Room, needed: int, changes: int) -> None:
    """A byte that stays saves a load and a store; the first iterations, which are slow, say too much."""
    tried = [0]
    for at in range(100):
        stalled_ms = max(0, needed - room.extra) * (30 if at < 12 else 20)
        room.end(Reading(stalled_ms, 1000 + stalled_ms), steady=True, free_bytes=lambda: 1 << 40)
        tried += [room.extra] if room.extra != tried[-1] else []
    assert (len(tried) - 1, room.extra) == (changes, needed)


def test_room_gives_back_no_more_than_it_can_take_again(room: Room) -> None:
    """The allocator's peak, below which the free bytes are counted, stays when blocks leave."""
    highest, limit, slow = 0, 400, 0
    for at in range(200):
        highest = max(highest, room.extra)
        free_bytes = 0 if at > 6 else (limit - highest) * 100
        stalled_ms = max(0, 100 - room.extra) * 30
        slow += at > 20 and stalled_ms > 0
        end(room, stalled_ms, free_bytes=free_bytes)
    assert (slow, room.extra >= 100) == (0, True)


def test_room_that_was_enough_does_not_grow_from_a_few_slow_iterations(room: Room) -> None:
    """A host that others use may halt for two or three iterations, again and again."""
    for _ in range(60):
        end(room, max(0, 30 - room.extra) * 30)
    settled = room.extra
    for _ in range(20):
        for _ in range(3):
            end(room, 300)
        for _ in range(30):
            end(room, 0)
    assert room.extra == settled
    for _ in range(30):
        end(room, max(0, 60 - room.extra) * 30)
    assert room.extra >= 60, "but it follows what lasts"


def test_room_does_not_try_again_and_again(room: Room) -> None:
    """Slow phases of a host look like iterations with more tokens."""
    changes = 0
    for at in range(4000):
        is_slow = at % 100 >= 70
        stalled_ms = max(0, (0 if is_slow else 60) - room.extra) * 30
        reading = Reading(stalled_ms, (2000 if is_slow else 1000) + stalled_ms)
        changes += room.end(reading, steady=True, free_bytes=lambda: 1 << 40) != 0
    assert changes < 60


class Event:
    """Of a stream that is none of ours: ``fully_shard`` reduces gradients there."""

    has_passed = False

    def synchronize(self) -> None:
        self.has_passed = True


def test_a_serial_lane_waits_for_the_events_of_others() -> None:
    event: Any = Event()
    SerialLane(torch.device("cpu"), name="update").wait(None, EventMark(event))
    assert event.has_passed


def test_counters_of_the_user_become_what_updates_have_made_of_the_copies() -> None:
    """What they deleted is gone, what they made is there, and tensors stay the objects that they were."""
    param, home = torch.ones(3), torch.zeros(3)
    user = {"step": torch.tensor(1.0), "mean": home, "warm": True}
    step, shard = user["step"], SimpleNamespace(homes={"mean": home})
    own = OwnCounters(StateStore(defaultdict(dict, {param: user})), {param: shard})  # type: ignore[dict-item]
    copies = own.get(param)
    copies["step"].add_(1)  # type: ignore[union-attr]
    del copies["warm"]
    copies["count"] = 7
    assert user == {"step": step, "mean": home, "warm": True}
    own.commit()
    assert user == {"step": step, "mean": home, "count": 7}
    assert step.item() == 2


@pytest.mark.parametrize("joined_bytes", [1024, 1 << 20])
def test_a_step_alone_updates_few_bytes_at_once(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, joined_bytes: int
) -> None:
    """Check that blocks come back one by one, and that kept state is updated in as few calls as ever."""
    monkeypatch.setattr(loop_module, "JOINED_BYTES", joined_bytes)
    policy = OffloadPolicy(bucket_bytes=1024, device_bytes=12 * 1024)
    plain, loop = pair(mesh, policy, net=partial(Net, width=16, layers=2))
    several: dict[bool, list[int]] = {True: [], False: []}
    update = Core.update

    def noted(core: Core, updates: Updates, buckets: Sequence[Bucket]) -> None:
        if len(buckets) > 1:
            several[buckets[0].state.kept].append(sum(one.state.nbytes for one in buckets))
        update(core, updates, buckets)

    monkeypatch.setattr(Core, "update", noted)
    for each in (plain, loop):
        each.train(4)
    assert same(plain, loop)
    assert max(several[True]) > 4096
    assert max(several[False]) <= joined_bytes
    assert joined_bytes == 1024 or max(several[False]) > 1024
