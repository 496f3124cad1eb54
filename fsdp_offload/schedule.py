"""A step as data: the list of loads, updates and stores, each with what it waits for. Pure; prints and parses.

The text of a schedule is its actions in the order in which they are issued. ``L3`` loads bucket 3 into its place in the
ring, ``U3`` runs the optimizer on it, ``S3`` stores it. ``L3<S0`` starts only when the store of bucket 0 has finished;
``L3<S3'`` when the last store of bucket 3 in an *earlier* step has. Actions of one kind run in order among themselves
(they share a stream), so only waits across kinds are written.

Three hazards exist, and :func:`check_schedule` proves each of them absent:

- a load or a creating update overwrites ring bytes that an unfinished store still reads;
- a load reads home bytes that an unfinished store still writes;
- an update or a store runs on a slot before the load or update that fills it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Kind = Literal["L", "U", "S"]


class Wait(NamedTuple):
    """The end of an action, in this step or (``earlier``) in the last step that had it."""

    kind: Kind
    bucket: int
    earlier: bool = False

    def __str__(self) -> str:
        return f"{self.kind}{self.bucket}{chr(39) if self.earlier else ''}"


class Action(NamedTuple):
    """One thing to issue, and what must have finished before it starts."""

    kind: Kind
    bucket: int
    waits: tuple[Wait, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}{self.bucket}" + "".join(f"<{wait}" for wait in self.waits)


class Placement(NamedTuple):
    """Where a bucket passes through the ring, in bytes. Two buckets that overlap can never be there together."""

    offset: int
    nbytes: int

    def overlaps(self, other: "Placement") -> bool:
        """Whether the two share a byte."""
        if not self.nbytes or not other.nbytes:
            return False
        return self.offset < other.offset + other.nbytes and other.offset < self.offset + self.nbytes


class BucketStep(NamedTuple):
    """What one bucket needs in one step."""

    bucket: int
    load: bool  # some of its state exists already
    store: bool  # false for state that is resident on the device


def place_in_ring(bucket_nbytes: Sequence[int], ring_bytes: int) -> list[Placement]:
    """Give each bucket a fixed place in a ring of ``ring_bytes`` bytes, one behind the other, round and round.

    A bucket larger than the ring starts at 0; the ring then has to be as large as that bucket.
    """
    placements = []
    cursor = 0
    for nbytes in bucket_nbytes:
        if cursor + nbytes > ring_bytes:
            cursor = 0
        placements.append(Placement(cursor, nbytes))
        cursor += nbytes
    return placements


def build_schedule(steps: Sequence[BucketStep], placements: Mapping[int, Placement]) -> list[Action]:
    """The actions of one step: every load is issued as soon as the stores that free its place have been.

    Args:
        steps: the buckets to update, in order; buckets without a gradient are left out.
        placements: the place in the ring of *every* bucket that is ever stored, also of those left out now.
    """
    waits = [_slot_waits(position, steps, placements) for position in range(len(steps))]
    actions: list[Action] = []
    stored: set[int] = set()
    loaded = 0  # how many of ``steps`` have their load issued (or need none)
    for position, step in enumerate(steps):
        while loaded < len(steps) and _ready(waits[loaded], stored):
            if steps[loaded].load:
                actions.append(Action("L", steps[loaded].bucket, waits[loaded]))
            loaded += 1
        actions.append(Action("U", step.bucket, (Wait("L", step.bucket),) if step.load else waits[position]))
        if step.store:
            actions.append(Action("S", step.bucket, (Wait("U", step.bucket),)))
            stored.add(step.bucket)
    return actions


def _ready(waits: tuple[Wait, ...], stored: set[int]) -> bool:
    return all(wait.earlier or wait.bucket in stored for wait in waits)


def _slot_waits(
    position: int, steps: Sequence[BucketStep], placements: Mapping[int, Placement]
) -> tuple[Wait, ...]:
    """What must have been stored before the bucket at ``position`` may enter the ring."""
    bucket, _, store = steps[position]
    if not store:
        return ()
    before = [step.bucket for step in steps[:position] if step.store]
    this_step = [b for b in before if placements[b].overlaps(placements[bucket])]
    waits = [Wait("S", this_step[-1])] if this_step else []
    done_before = set(before)
    for other, placement in placements.items():
        # Its own last store wrote the home that is about to be read; the others may still read the ring.
        if other == bucket or (other not in done_before and placement.overlaps(placements[bucket])):
            waits.append(Wait("S", other, earlier=True))
    return tuple(waits)


def format_schedule(actions: Sequence[Action]) -> str:
    """The text of a schedule, actions separated by blanks."""
    return " ".join(str(action) for action in actions)


_WAIT = re.compile(r"([LUS])(\d+)('?)")


def parse_schedule(text: str) -> list[Action]:
    """The inverse of :func:`format_schedule`.

    Raises:
        ValueError: a word is not an action.
    """
    actions = []
    for word in text.split():
        parts = [_WAIT.fullmatch(part) for part in word.split("<")]
        if not all(parts) or parts[0].group(3):  # type: ignore[union-attr]
            raise ValueError(f"not an action: {word!r} (expected something like L3, U3<L3 or L3<S0<S3')")
        waits = [Wait(m.group(1), int(m.group(2)), bool(m.group(3))) for m in parts if m]  # type: ignore[arg-type]
        actions.append(Action(waits[0].kind, waits[0].bucket, tuple(waits[1:])))
    return actions


def check_schedule(actions: Sequence[Action], placements: Mapping[int, Placement]) -> None:
    """Prove that ``actions``, run again and again, never meet one of the hazards above.

    Two rounds are followed. For each action the set of actions that have certainly finished before it starts is
    computed from its waits, from what those waited for, and from the order within a kind.

    Raises:
        ValueError: names the action, the missing wait and the position in the schedule.
    """
    finished_by: dict[tuple[int, str, int], set[tuple[int, str, int]]] = {}
    last_of_kind: dict[str, tuple[int, str, int]] = {}
    issued: list[tuple[int, str, int]] = []
    for round_ in (0, 1):
        for number, action in enumerate(actions):
            me = (round_, action.kind, action.bucket)
            known: set[tuple[int, str, int]] = set()
            for wait in action.waits:
                source = (round_ - wait.earlier, wait.kind, wait.bucket)
                if not wait.earlier and source not in finished_by:
                    raise ValueError(f"action {number} ({action}) waits for {wait}, which is not issued before it")
                known |= finished_by.get(source, set())
            if action.kind in last_of_kind:
                known |= finished_by[last_of_kind[action.kind]]
            for problem in _hazards(me, known, issued, placements):
                raise ValueError(f"action {number} ({action}) may start {problem}, in {format_schedule(actions)}")
            finished_by[me] = known | {me}
            last_of_kind[action.kind] = me
            issued.append(me)


def _hazards(
    me: tuple[int, str, int],
    known: set[tuple[int, str, int]],
    issued: Sequence[tuple[int, str, int]],
    placements: Mapping[int, Placement],
) -> list[str]:
    round_, kind, bucket = me
    problems = []
    for other in issued:
        _, other_kind, other_bucket = other
        if other in known:
            continue
        if other_bucket == bucket and other[0] == round_ and (other_kind, kind) in (("L", "U"), ("U", "S")):
            problems.append(f"before {other_kind}{other_bucket} has filled the slot")
        if kind == "L" and other_kind == "S" and other_bucket == bucket:
            problems.append(f"before {other_kind}{other_bucket} has written its home")
        same_ring = bucket in placements and other_bucket in placements
        if kind in "LU" and other_bucket != bucket and same_ring and other_kind in "US":
            if placements[bucket].overlaps(placements[other_bucket]):
                problems.append(f"before {other_kind}{other_bucket} has left the ring")
    if kind in "US":
        wanted = "L" if kind == "U" else "U"
        same_round = {(k, b) for r, k, b in issued if r == round_}
        if kind == "S" and (wanted, bucket) not in same_round:
            problems.append(f"without {wanted}{bucket}")
    return problems
