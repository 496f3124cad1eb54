"""Text that users write and read: sizes, order and patterns of keys, and text that is safe to print.

Keys and file names may contain anything: terminal escapes, marks that reverse the direction of text, lone surrogates.
:func:`printable` escapes all of them.
"""

import fnmatch
import functools
import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import TypeGuard

NEED_EXTRA = (
    "The checkpoint tools need the extra [tools]: python -m pip install 'typer>=0.16' 'rich>=14' 'safetensors>=0.5' "
    "'fsspec>=2025.5' 'isal>=1.7'"
)


class CheckpointError(ValueError):
    """A problem of a checkpoint, of rules, or of a request.

    The message is one line: the problem, and what to do. Any function that opens, reads, plans or writes may raise it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


MAX_DIMS = 64
"""Most dimensions of a tensor: numpy's limit."""

MAX_INT64 = 2**63 - 1
"""Largest size, offset or count that is accepted from a file."""


def is_count(value: object) -> TypeGuard[int]:
    """Tell whether a value from a file can be a size, an offset or a count: an int from 0 to ``MAX_INT64``."""
    return type(value) is int and 0 <= value <= MAX_INT64


_DIGITS = re.compile(r"(\d+)")

_LEAST_BYTES = 1024
"""Smallest size that is accepted without a unit: the user of a smaller number probably meant MiB or GiB."""

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {"": 1} | {
    f"{letter}{suffix}": base ** (power + 1)
    for power, letter in enumerate("kmgt")
    for suffix, base in (("", 1024), ("b", 1000), ("ib", 1024))
}


def human_bytes(count: float) -> str:
    """Format bytes: ``1536`` → ``1.5 KiB``."""
    power = 0
    while power + 1 < len(_UNITS) and count >= 1023.95:  # 1023.95 would be printed as 1024.0
        count /= 1024
        power += 1
    if power == 0:
        return f"{count:.0f} byte{'' if count == 1 else 's'}"
    return f"{count:.1f} {_UNITS[power]}"


def shortened(text: str, length: int = 200) -> str:
    """Cut a text from a file to its first ``length`` characters."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def short_repr(value: object) -> str:
    """Show the beginning of a value, which may be large or nested deeply."""
    return shortened(reprlib.repr(value), 40)


def parse_bytes(text: str) -> int:
    """Parse a size: ``2GiB`` or ``2G`` → 2147483648, ``2GB`` → 2000000000, ``4096`` → 4096."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    factor = _FACTORS.get(match[2].removesuffix("bytes") if match else "?")
    size = 0.0 if match is None or factor is None else float(match[1]) * factor
    if match is not None and not match[2] and 0 < size < _LEAST_BYTES:
        raise CheckpointError(f"{text} is {text} bytes; write {text}MiB or {text}GiB, or {text}bytes if you mean that")
    if not 1 <= size <= MAX_INT64:
        raise CheckpointError(f"{shortened(text)!r} is not a size; write for example 512MiB, 2GiB or a number of bytes")
    return int(size)


def counted(count: int, noun: str) -> str:
    """Format a count: ``1 file``, ``2 files``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def some_of(names: Sequence[str], most: int) -> str:
    """Format the first of many names: ``a, b and 3 more``."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def human_shape(shape: Iterable[int]) -> str:
    """Format a shape: ``(4, 8)`` → ``4 × 8``; ``()`` → ``scalar``."""
    return " × ".join(map(str, shape)) or "scalar"


def dtype_name(dtype: object) -> str:
    """Return torch's name of a dtype, without ``torch.``."""
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(1 << 17)  # keys are sorted when a checkpoint is opened, and again in each comparison
def natural_order(key: str) -> tuple[tuple[bool, int, str], ...]:
    """Return a sort key that orders digits as numbers, even if they are too long for Python's ``int()``."""
    parts = ((part.isdecimal(), part) for part in _DIGITS.split(key) if part)
    digits = ((is_number, part.lstrip("0") if is_number else part) for is_number, part in parts)
    return tuple([(not is_number, len(part) * is_number, part) for is_number, part in digits])


def is_excluded(key: str, patterns: Sequence[str]) -> bool:
    """Tell whether any of the patterns matches ``key``."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def check_patterns(option: str, patterns: Iterable[str], keys: Iterable[str]) -> None:
    """Check that each pattern matches a key: a pattern with a typing error would silently choose nothing."""
    known = list(keys)
    idle = [pattern for pattern in patterns if not any(fnmatch.fnmatchcase(key, pattern) for key in known)]
    if idle:
        raise CheckpointError(
            f"{option} that matches nothing: {', '.join(idle)}. Look at the keys with the command inspect, and take "
            "out what is not there"
        )


# Control characters except the newline; marks of text direction; lone surrogates, which cannot be encoded.
_UNPRINTABLE = re.compile("[\0-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff]")


def printable(text: str) -> str:
    """Escape the characters that must not reach a terminal."""
    if text.isascii() and text.isprintable():  # fast path: nearly every cell of a table with a million cells
        return text
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)


def table(texts: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Format rows under the column names ``texts`` (aligned left) and ``numbers`` (aligned right), uncut."""
    cells = [(*texts, *numbers)]
    cells += (tuple(printable(cell).replace("\n", "\\n") for cell in row) for row in rows)
    aligned = []
    for number, column in enumerate(zip(*cells, strict=True)):
        width, align = max(map(len, column)), str.ljust if number < len(texts) else str.rjust
        aligned.append([align(cell, width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]
