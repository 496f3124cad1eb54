"""Keys that are chosen by patterns, as a shell has them: ``*``, ``?``, ``[...]``."""

import fnmatch
from collections.abc import Iterable, Sequence

from .errors import CheckpointError


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Tell whether any pattern matches, or there is none: people look at everything until they choose."""
    return not patterns or is_excluded(key, patterns)


def is_excluded(key: str, patterns: Sequence[str]) -> bool:
    """Tell whether any pattern matches: nothing is left out until people choose."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def idle_patterns(patterns: Iterable[str], keys: Iterable[str]) -> list[str]:
    """List the patterns that match no key: typing errors, which would silently choose nothing."""
    known = list(keys)
    return [pattern for pattern in patterns if not any(fnmatch.fnmatchcase(key, pattern) for key in known)]


def check_excluded(excluded: Iterable[str], keys: Iterable[str]) -> None:
    """Check that each pattern of keys to leave out matches a key.

    Raises:
        CheckpointError: names those that have not.
    """
    idle = idle_patterns(excluded, keys)
    if idle:
        raise CheckpointError(
            f"--exclude that matches nothing: {', '.join(idle)}. Look at the keys with the command inspect, and take "
            "out what is not there"
        )
