"""Options that several commands have."""

from collections.abc import Sequence
from typing import Annotated

import typer

from ..core.errors import CheckpointError
from ..core.sizes import MAX_ITEM_BYTES, parse_bytes, thread_bytes

Folder = Annotated[
    str,
    typer.Argument(metavar="CHECKPOINT", help="Folder with a .metadata file or with safetensors, or its fsspec URL."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, with all sizes in bytes.")]
Threads = Annotated[int, typer.Option(min=1, help="How many files are read at the same time.")]
MaxMemory = Annotated[str, typer.Option(metavar="SIZE", help="For data, over all threads: 512MiB, 2GiB, bytes.")]

Patterns = Annotated[
    list[str] | None, typer.Argument(metavar="PATTERN", help="Only keys like these: '*.weight' 'optim.*'.")
]
Source = Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint: its folder or its fsspec URL.")]
Destination = Annotated[
    str, typer.Argument(metavar="DST", help="The new one. A folder that is not there yet, or an fsspec URL.")
]
Values = Annotated[
    list[str] | None,
    typer.Option("--value", metavar="NAME=NUMBER", help="A value of the model's config that the rules name."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be written.")]
WriteThreads = Annotated[int, typer.Option("--threads", min=1, help="How many blocks are in work at the same time.")]


def parse_memory(text: str, threads: int, least_items: int) -> int:
    """Return the bytes of --max-memory.

    Args:
        text: the option as given.
        threads: that share it.
        least_items: how many elements of the largest dtype each of them has to hold.

    Raises:
        CheckpointError: it is no size, or too little.
    """
    limit_bytes = parse_bytes(text)
    thread_bytes(limit_bytes, threads, least_items * MAX_ITEM_BYTES)
    return limit_bytes


def parse_values(values: Sequence[str] | None) -> dict[str, float]:
    """Return the numbers of all --value by name.

    Raises:
        CheckpointError: one is not NAME=NUMBER, or a name is there twice.
    """
    parsed: dict[str, float] = {}
    for text in values or ():
        name, _, number = text.partition("=")
        try:
            parsed[name.strip()] = int(number) if number.strip().lstrip("-").isdecimal() else float(number)
        except ValueError as error:
            raise CheckpointError(f"--value is NAME=NUMBER, for example tp_size=2, not {text}") from error
    if len(parsed) < len(values or ()):
        raise CheckpointError(f"--value gives one name twice: {', '.join(values or ())}; give each once")
    return parsed
