"""Keys that are chosen by patterns, as a shell has them: ``*``, ``?``, ``[...]``."""

import fnmatch
from collections.abc import Iterable, Sequence

from .errors import CheckpointError


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Whether any pattern matches, or there is none: what people look at is everything until they choose."""
    return not patterns or is_excluded(key, patterns)


def is_excluded(key: str, patterns: Sequence[str]) -> bool:
    """Whether any pattern matches: what people leave out is nothing until they choose."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def idle_patterns(patterns: Iterable[str], keys: Iterable[str]) -> list[str]:
    """Those that match none of the keys: a slip of the hand, which would otherwise choose nothing without a word."""
    known = list(keys)
    return [pattern for pattern in patterns if not any(fnmatch.fnmatchcase(key, pattern) for key in known)]


def check_excluded(excluded: Iterable[str], keys: Iterable[str]) -> None:
    """Whether each of the patterns of keys to leave out has something to leave out.

    Raises:
        CheckpointError: names those that have not.
    """
    idle = idle_patterns(excluded, keys)
    if idle:
        raise CheckpointError(
            f"--exclude that matches nothing: {', '.join(idle)}. Look at the keys with the command inspect, and take "
            "out what is not there"
        )
