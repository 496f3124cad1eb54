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
from collections.abc import Mapping, Sequence, Set
from typing import Literal, NamedTuple

from .ring_layout import Placement

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


class BucketStep(NamedTuple):
    """What one bucket needs in one step."""

    bucket: int
    load: bool  # some of its state exists already
    store: bool  # false for state that is resident on the device


def build_schedule(steps: Sequence[BucketStep], placements: Mapping[int, Placement]) -> list[Action]:
    """The actions of one step: every load is issued as soon as the stores that free its place have been.

    Args:
        steps: the buckets to update, in order; buckets without a gradient are left out.
        placements: the place in the ring of each of them that is stored, and of all that earlier steps stored and that
            may not have left the ring yet.
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


def _slot_waits(position: int, steps: Sequence[BucketStep], placements: Mapping[int, Placement]) -> tuple[Wait, ...]:
    """What must have been stored before the bucket at ``position`` may enter the ring."""
    bucket, _, store = steps[position]
    if not store:
        return ()
    here = placements[bucket]
    before = [step.bucket for step in steps[:position] if step.store and placements[step.bucket].overlaps(here)]
    if before:
        return (Wait("S", before[-1]),)  # stores run in order: those of earlier steps have finished with it
    # Its own last store wrote the home that is about to be read; the others may still read the ring.
    return tuple(
        Wait("S", other, earlier=True)
        for other, placement in placements.items()
        if other == bucket or placement.overlaps(here)
    )


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
    """Prove that ``actions`` never meet one of the hazards above, whichever buckets the steps before it updated.

    So an earlier step is assumed that stored every bucket, in an unknown order, and of which nothing has certainly
    finished. For each action the set of actions that have certainly finished before it starts is computed from its
    waits, from what those waited for, and from the order within a kind.

    Raises:
        ValueError: names the action, what it does not wait for, and its position in the schedule.
    """
    finished_by: dict[Wait, frozenset[Wait]] = {}
    in_order: dict[str, frozenset[Wait]] = {"L": frozenset(), "U": frozenset(), "S": frozenset()}
    for bucket in placements:
        update, store = Wait("U", bucket, earlier=True), Wait("S", bucket, earlier=True)
        finished_by |= {update: frozenset({update}), store: frozenset({update, store})}
        in_order |= {"U": in_order["U"] | {update}, "S": in_order["S"] | {update, store}}
    for number, action in enumerate(actions):
        me = Wait(action.kind, action.bucket)
        known = in_order[action.kind]
        for wait in action.waits:
            if not wait.earlier and wait not in finished_by:
                raise ValueError(f"action {number} ({action}) waits for {wait}, which is not issued before it")
            known |= finished_by.get(wait, frozenset())
        problem = _problem(me, known, finished_by.keys(), placements)
        if problem:
            raise ValueError(f"action {number} ({action}) {problem}, in {format_schedule(actions)}")
        finished_by[me] = in_order[action.kind] = known | {me}
    for bucket in placements:
        if Wait("S", bucket) not in finished_by and (
            Wait("L", bucket) in finished_by or Wait("U", bucket) in finished_by
        ):
            raise ValueError(f"bucket {bucket} is in the ring and never stored, in {format_schedule(actions)}")


def _problem(me: Wait, known: Set[Wait], issued: Set[Wait], placements: Mapping[int, Placement]) -> str:
    """Why ``me`` may start too early when no more than ``known`` has certainly finished; empty if it may not."""
    load, update = Wait("L", me.bucket), Wait("U", me.bucket)
    if me in issued or (me.kind == "L" and update in issued):
        return "comes too late: its bucket has had it in this step"
    if me.kind == "S":
        return "" if update in known else f"may start before {update} has filled the slot"
    if me.kind == "U" and load in issued:
        return "" if load in known else f"may start before {load} has filled the slot"
    if me.bucket not in placements:
        return ""
    # It enters the ring: everything that has been in its place must have left.
    for other, placement in placements.items():
        if other != me.bucket and not placement.overlaps(placements[me.bucket]):
            continue
        entered = other != me.bucket and (Wait("L", other) in issued or Wait("U", other) in issued)
        for store in (Wait("S", other, earlier=True), *([Wait("S", other)] if entered else [])):
            if store not in known:
                return f"may start before {store} has left the ring and reached its home"
    return ""
