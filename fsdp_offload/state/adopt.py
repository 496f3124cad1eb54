"""Moves state that others made into its home: what existed before attaching, was loaded, or the user exchanged."""

from collections.abc import Iterable

from torch import Tensor

from .layout import leaves_of
from .shard import StateShard
from .store import UserState


def is_exchanged(shard: StateShard, state: UserState) -> bool:
    """Return whether ``state`` holds another tensor where a home should be."""
    for name, home in shard.homes.items():  # noqa: SIM110  # a generator would cost as much as all the rest of a step
        if state.get(name, home) is not home:
            return True
    return False


def adopt(entries: Iterable[tuple[StateShard, UserState]]) -> None:
    """Copy what the states hold into the homes of their shards, and put the homes there instead.

    Everything is checked before anything is written. A source that is itself a home (states that were swapped between
    parameters) is read before it is overwritten. ``None`` counts as absent: SGD resets its momentum so.

    Raises:
        ValueError: a tensor has another shape or dtype than its place; nothing has changed.
    """
    exchanged = [
        (shard, state, name, state[name])
        for shard, state in entries
        for name, home in shard.homes.items()
        if state.get(name) is not None and state[name] is not home
    ]
    for shard, _, name, value in exchanged:
        _check_fits(shard, name, value)
    overwritten = {leaf.data_ptr() for shard, _, name, _ in exchanged for leaf in shard.home_leaves[name]} - {0}
    copies: list[tuple[Tensor, Tensor]] = []
    for shard, _, name, value in exchanged:
        for source, target in zip(leaves_of(value), leaves_of(shard.homes[name]), strict=True):
            if source.data_ptr() != target.data_ptr() or source.numel() == 0:
                copies.append((source.clone() if source.data_ptr() in overwritten else source, target))
    for source, target in copies:
        target.copy_(source)
    for shard, state, name, _ in exchanged:
        state[name] = shard.homes[name]


def _check_fits(shard: StateShard, name: str, value: object) -> None:
    targets = leaves_of(shard.homes[name])
    sources = leaves_of(value) if isinstance(value, Tensor) else []
    wanted = [(tuple(leaf.shape), leaf.dtype) for leaf in targets]
    got = [(tuple(leaf.shape), leaf.dtype) for leaf in sources] if sources else type(value).__name__
    if got != wanted:
        raise ValueError(
            f"optimizer.state[{shard.name}][{name!r}]: expected local tensors {wanted}, got {got}. State is neither "
            "cast nor resized; put a tensor of that shape and dtype there, or delete the entry. Nothing has been "
            "changed."
        )
