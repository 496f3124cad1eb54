"""The command ``fsdp-offload plan``: a table for the terminal with what its words mean, or JSON."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError:
    sys.stderr.write("fsdp-offload plan needs the extra [plan]: python -m pip install 'typer>=0.16' 'rich>=14'\n")
    sys.exit(2)

from ..policy import OverlapKind
from .machine import builtin_machines

if TYPE_CHECKING:
    from .forecast import Plan

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_BUILTIN = sorted(file.stem for file in (Path(__file__).parent / "models").glob("*.json"))
_MODELS = f"{', '.join(_BUILTIN)}; a config.json or its folder; or package.module:function for a module."


@app.command(
    help="What training will take in memory and time under each policy, and the line to write. Nothing is downloaded, "
    "and no GPU is needed. Exit code: 0 something fits, 1 nothing fits, 2 not planned."
)
def main(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help=_MODELS)],
    tokens_per_step: Annotated[int, typer.Option(help="Of all ranks together.")],
    machine: Annotated[str, typer.Option(help=f"{', '.join(builtin_machines())}, or a TOML file.")] = "H200",
    ranks: Annotated[int, typer.Option(help="Devices in all.")] = 1,
    replicas: Annotated[int, typer.Option(help="Of these, replicas of the model (HSDP).")] = 1,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    micro_batches: Annotated[int, typer.Option(help="Backwards before one step.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of the sharded parameters: fp32 or bf16.")] = "fp32",
    compute_dtype: Annotated[str, typer.Option(help="Of the gathered ones.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="adamw, sgd-momentum, ...")] = "adamw",
    masters: Annotated[str, typer.Option(help="Kind of add_masters: fp32 or remainder.")] = "none",
    checkpointing: Annotated[
        Literal["none", "full"], typer.Option(help="What is recomputed in the backward.")
    ] = "none",
    clip: Annotated[bool, typer.Option(help="Whether gradients are clipped by their global norm.")] = True,
    overlap: Annotated[
        OverlapKind | None, typer.Option(help="The most that your loop allows (see docs/policy.md).")
    ] = None,
    device_gb: Annotated[float | None, typer.Option(help="GB of a device that may be used, if not all.")] = None,
    link_gb_per_s: Annotated[float | None, typer.Option(help="One way, as `fsdp-offload doctor` measures it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; sizes in bytes.")] = False,
) -> None:
    """Print the plan."""
    from .forecast import plan  # imports torch, which --help does not need

    asked = {name: value for name, value in ctx.params.items() if name not in ("overlap", "as_json")}
    try:
        with Console(stderr=True).status("tracing the model"):
            made = plan(**asked)
    except (ValueError, OSError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(made.as_dict(overlap), indent=1))
    else:
        # A terminal wraps what it has no room for; rich would cut it.
        _show(made, Console(width=160, highlight=False, markup=False, soft_wrap=True), overlap)
    if made.best(overlap) is None:
        raise typer.Exit(1)


COLUMNS = ("policy", "device\nGB", "host\nGB", "ms", "tokens/s", "limit", "not")

LEGEND = {
    "MiB": 'device_bytes, in MiB; "auto" where no number is said, which keeps on the GPU what compute would wait for',
    "parameters": "the parameters are on the host too",
    "device": "needed on each GPU: the peak, 5 % for the allocator, and the driver's share",
    "host": "pinned by each rank",
    "ms": "one iteration, estimated",
    "tokens/s": "of all ranks",
    "limit": "what decides ms",
    "compute": "the GPU computes all the time",
    "gathers": "gathers and reductions take longer than computing",
    "link": "copies between host and GPU",
    "launches": "the host launches kernels more slowly than the GPU runs them",
    "not": "why this policy, which is faster or does not fit, was passed over",
}
"""What the table prints → what it means; a word that is not printed is not explained."""


def _show(made: "Plan", console: Console, overlap: OverlapKind | None) -> None:
    say, training, best = console.print, made.training, made.best(overlap)
    say(
        f"{made.model.name}, {made.model.numel / 1e9:.2f} G parameters, on {training.ranks} × {made.machine.name}: "
        f"{training.sequences} × {training.sequence_length:,} tokens on each, {training.micro_batches} "
        f"micro-batch(es), {training.dtype} parameters, {training.compute_dtype} computation, {training.optimizer}, "
        f"checkpointing {training.checkpointing}"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if 0 < number < 5 else "left", no_wrap=True)
    words, notes = {name.partition("\n")[0] for name in COLUMNS}, []
    for one in made.forecasts:
        sizes = (f"{nbytes / 1e9:.1f}" for nbytes in (one.needed_bytes, one.host_bytes))
        rates = (f"{number:,.0f}" for number in (one.iteration_ms, one.tokens_per_s))
        if why := made.passed_over(one, overlap):
            notes.append(f"{one.name} is passed over ({why})")
        style = "bold" if one is best else None if one.fits else "dim"
        table.add_row(one.name, *sizes, *rates, one.limit, why.partition(":")[0], style=style)
        words |= {one.limit, *one.name.replace(",", "").split()}
    console.print(table)
    for line in (*(f"{word}: {LEGEND[word]}" for word in LEGEND if word in words), *notes):
        say(line)
    if best is None:
        with Console(stderr=True).status("looking for what would fit"):
            say(f"Nothing fits. {made.what_would_fit(overlap)}")
        return
    terms = ", ".join(f"{name} {nbytes / 1e9:.1f}" for name, nbytes in best.device.terms.items())
    say(f"Best: {best.name}, with {(made.machine.device_bytes - best.needed_bytes) / 1e9:.1f} GB to spare.")
    say(f"Its peak, in the {best.device.when}, in GB: {terms}")
    compare = " Compare --checkpointing none, which may be faster with offload." * (training.checkpointing != "none")
    say(best.lines or f"Nothing to write: it fits without offload, and no policy is more than 1 % faster.{compare}")
