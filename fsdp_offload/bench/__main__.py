"""Command line of the benches."""

import os
import sys
from importlib import metadata
from typing import Annotated

try:
    import typer
except ImportError:
    sys.exit("The benches need the extra 'bench': pip install 'fsdp-offload[bench]'")

from . import checkpoint, link, sleep, step, train
from .record import print_machine

app = typer.Typer(help="Measure offloading on this machine. Results are JSON lines.", no_args_is_help=True)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"benches of fsdp-offload {metadata.version('fsdp-offload')}")
        raise typer.Exit


@app.callback()
def _machine(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if os.environ.get("RANK", "0") == "0":
        print_machine()


app.command("checkpoint")(checkpoint.main)
app.command("link")(link.main)
app.command("sleep")(sleep.main)
app.command("step")(step.main)
app.command("train")(train.main)

if __name__ == "__main__":
    app(prog_name="python -m fsdp_offload.bench")
