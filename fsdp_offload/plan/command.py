"""The command ``fsdp-offload plan``: prints a table for the terminal, with its legend if asked, or JSON."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

LEGEND = Path(__file__).with_name("legend.txt")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_MACHINES = f"{', '.join(builtin_machines())}, or a TOML file"
_MODELS = ", ".join(sorted(file.stem for file in (Path(__file__).parent / "models").glob("*.json")))
_MODELS += "; a config.json or its folder; or package.module:function for a module."


@app.command(
    help="What training will take in memory and time under each policy, with which blocks recomputed, and the lines to "
    "write. Nothing is downloaded. Exit code: 0 something fits, 1 nothing fits, 2 not planned."
)
def main(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help=_MODELS)],
    tokens_per_step: Annotated[int, typer.Option(help="Of all ranks together.")],
    machine: Annotated[str | None, typer.Option(help=f"{_MACHINES}; else the GPU that is here.")] = None,
    ranks: Annotated[int, typer.Option(help="Devices in all.")] = 1,
    replicas: Annotated[int, typer.Option(help="Replicas of the model among the ranks (HSDP).")] = 1,
    expert_parallel: Annotated[int, typer.Option(help="Ranks among which experts are divided.")] = 1,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    micro_batches: Annotated[int | None, typer.Option(help="Backwards before a step; else what is fastest.")] = None,
    checkpointing: Annotated[
        str, typer.Option(help="Blocks that are recomputed: auto, none, full, a number.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the sharded parameters: fp32 or bf16.")] = "fp32",
    compute_dtype: Annotated[str, typer.Option(help="Of the gathered ones.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="adamw, sgd-momentum, ...")] = "adamw",
    masters: Annotated[str, typer.Option(help="Kind of add_masters: fp32 or remainder.")] = "none",
    clip: Annotated[bool, typer.Option(help="Whether gradients are clipped by their global norm.")] = True,
    deterministic: Annotated[bool, typer.Option(help="Whether torch uses deterministic algorithms.")] = False,
    overlap: Annotated[
        OverlapKind | None, typer.Option(help="The most that your loop allows (see docs/policy.md).")
    ] = None,
    device_gb: Annotated[float | None, typer.Option(help="GB of a device that may be used, if not all.")] = None,
    link_gb_per_s: Annotated[float | None, typer.Option(help="One way, as `fsdp-offload doctor` measures it.")] = None,
    legend: Annotated[bool, typer.Option("--legend", help="Say what the words of the table mean.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; sizes in bytes.")] = False,
) -> None:
    """Print the plan."""
    from .forecast import plan  # imports torch, which --help does not need

    sys.path.insert(0, "")  # modules in this folder, as ``python -m`` finds them

    asked = {name: value for name, value in ctx.params.items() if name not in ("overlap", "legend", "as_json")}
    asked["checkpointing"] = int(checkpointing) if checkpointing.isdecimal() else checkpointing
    try:
        with Console(stderr=True).status("tracing the model"):
            made = plan(**asked)
            best = made.best(overlap)
    except (ValueError, OSError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(made.as_dict(overlap), indent=1))
    else:
        # The terminal wraps long lines; rich would cut them.
        _show(made, Console(width=160, highlight=False, markup=False, soft_wrap=True), overlap, legend=legend)
    if best is None:
        raise typer.Exit(1)


def _show(made: "Plan", console: Console, overlap: OverlapKind | None, *, legend: bool) -> None:
    say, training, best = console.print, made.training, made.best(overlap)
    sequences = training.sequences * training.micro_batches
    say(
        f"{made.model.name}, {made.model.numel / 1e9:.2f} G parameters, on {training.ranks} × {made.machine.name}: "
        f"{sequences} × {training.sequence_length:,} tokens on each, {training.dtype} parameters, "
        f"{training.compute_dtype} computation, {training.optimizer}"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("policy", "recomputed", "batches", "device\nGB", "host\nGB/rank", "ms", "tokens/s", "limit", "not"):
        table.add_column(name, justify="left" if name in ("policy", "limit", "not") else "right", no_wrap=True)
    for one in made.forecasts:
        sizes = (f"{nbytes / 1e9:.1f}" for nbytes in (one.needed_bytes, one.host_bytes))
        rates = (f"{number:,.0f}" for number in (one.iteration_ms, one.tokens_per_s))
        why = made.passed_over(one, overlap).partition(":")[0]
        counts = f"{one.recomputed} of {made.blocks}", str(one.micro_batches)
        style = "bold" if one is best else None if one.fits else "dim"
        table.add_row(one.name, *counts, *sizes, *rates, one.limit, why, style=style)
    console.print(table)
    if legend:
        say(LEGEND.read_text(encoding="utf-8"))
    if best is None:
        with Console(stderr=True).status("looking for what would fit"):
            say(f"Nothing fits. {made.what_would_fit(overlap)}")
        return
    say(made.verdict(overlap))
    offload = made.offload(overlap)
    for row in (made.forecasts[0], offload):
        if row is not None and row.fits:
            spare_gb = (made.machine.device_bytes - row.needed_bytes) / 1e9
            name = f"Best: {row.name}" if row is best else row.name
            say(f"{name}, {row.iteration_ms:,.0f} ms, {made.changes(row)}, {spare_gb:.1f} GB to spare.")
    terms = ", ".join(f"{name} {nbytes / 1e9:.1f}" for name, nbytes in best.device.terms.items())
    say(f"Peak of the best, in the {best.device.when}, in GB: {terms}")
    hiding = " and ".join(f"{tokens:,}" for tokens in best.hiding_tokens)
    here = sequences // best.micro_batches * training.sequence_length
    say(
        f"All transfers hide behind {hiding} tokens in a micro-batch of a GPU (state; parameters as well); here it has "
        f"{here:,}."
    )
    other = "" if offload is None or offload is best else f"# with offload: {offload.lines.splitlines()[-1]}"
    for line in (made.lines_to_recompute(overlap), best.lines, other):
        if line:
            say(line)
