"""Command line of the benchmarks."""

import os
import sys

try:
    import typer
except ImportError:
    sys.exit("The benchmarks need typer, and matplotlib for pictures: pip install typer matplotlib")

from . import checkpoint, figures, front, link, sleep, step, train
from .record import print_machine

app = typer.Typer(help="Measure offloading on this machine. Results are JSON lines.", no_args_is_help=True)


@app.callback()
def _machine() -> None:
    if os.environ.get("RANK", "0") == "0":
        print_machine()


app.command("checkpoint")(checkpoint.measure)
app.command("figures")(figures.measure)
app.command("front")(front.measure)
app.command("link")(link.measure)
app.command("sleep")(sleep.measure)
app.command("step")(step.measure)
app.command("train")(train.measure)

if __name__ == "__main__":
    app(prog_name="python -m examples.benchmarks")
