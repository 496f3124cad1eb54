"""The command rename."""

import time
from typing import Annotated

import typer

from ..core.sizes import counted
from .command_options import Destination, MaxMemory, Source, Values, WriteThreads, parse_memory, parse_values
from .output import say_written, write_progress


def rename_weights(
    source: Source,
    destination: Destination,
    family: Annotated[
        str, typer.Option(metavar="NAME", help="Of models: llama, qwen3, qwen3-moe, or a file like theirs.")
    ],
    from_framework: Annotated[str, typer.Option("--from", metavar="NAME", help="hf, torchtitan or megatron.")],
    to_framework: Annotated[str, typer.Option("--to", metavar="NAME", help="Another one of them.")],
    values: Values = None,
    excluded: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Leave out keys like these.")
    ] = None,
    threads: WriteThreads = 4,
    max_memory: MaxMemory = "2GiB",
) -> None:
    """Give the weights of a model, and their state by FQN, the names that another framework has for them.

    Weights that one of the two has fused, stacked or in another order of rows are split, merged and put in order on the
    way. SRC and DST are checkpoints of DCP; convert makes these of safetensors, and the other way round. What is in
    between takes as much disk as DST, in DST.steps, until DST is there: run the same command again after a kill, and it
    begins anew.
    Exit code: 0 done, 2 not done, 130 interrupted.
    """
    begin = time.monotonic()
    memory_bytes = parse_memory(max_memory, threads, 4)
    numbers = parse_values(values)
    from ..convert.translate import Translation, translate

    asked = Translation(family, from_framework, to_framework, numbers, excluded or [])
    keys, notes = translate(
        source,
        destination,
        asked,
        threads=threads,
        max_memory_bytes=memory_bytes,
        progress=write_progress,
    )
    say_written(destination, f"{counted(keys, 'key')} as {to_framework} has them", notes, begin)
