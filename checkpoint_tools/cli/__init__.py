"""The commands, under the names that users type, and what is common to all of them."""

from importlib.metadata import version
from typing import Annotated

import typer

from .common import with_error_lines
from .look_commands import compare_checkpoints, inspect_checkpoint, seal_checkpoint, verify_checkpoint
from .write_commands import PRESETS_EPILOG, convert_checkpoint, merge_parts, rename_weights, split_fused

app = typer.Typer(
    help="Look into checkpoints of torch.distributed.checkpoint, check them and compare them. No GPU is needed, and "
    "nothing that a checkpoint contains is run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"checkpoint-tools {version('fsdp-offload')}")
        raise typer.Exit


@app.callback()
def _of_all_commands(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for _name, _run, _epilog in (
    ("inspect", inspect_checkpoint, None),
    ("verify", verify_checkpoint, None),
    ("seal", seal_checkpoint, None),
    ("diff", compare_checkpoints, None),
    ("split", split_fused, PRESETS_EPILOG),
    ("merge", merge_parts, PRESETS_EPILOG),
    ("rename", rename_weights, None),
    ("convert", convert_checkpoint, None),
):
    app.command(_name, epilog=_epilog)(with_error_lines(_run))
