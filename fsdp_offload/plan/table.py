"""A plan as a table in the terminal."""

from rich.console import Console
from rich.table import Table

from .choices import Loop
from .forecast import Forecast, Plan

COLUMNS = ("policy", "device\nGB", "spare\nGB", "host\nGB", "ms", "bound\nms", "tokens/s", "limit")


def cells(one: Forecast) -> tuple[str, ...]:
    """Return the cells of one policy, by column."""
    return (
        one.name,
        f"{one.needed_bytes / 1e9:.1f}",
        f"{one.spare_bytes / 1e9:.1f}",
        f"{one.host_bytes / 1e9:.1f}",
        f"{one.iteration_ms:,.0f}",
        f"{one.bound_ms:,.0f}",
        f"{one.tokens_per_s:,.0f}",
        one.limit,
    )


def headline(made: Plan) -> str:
    """Say what is trained, on what."""
    training = made.training
    return (
        f"{made.model}, {made.numel / 1e9:.2f} G parameters, on {training.ranks} × {made.machine.name}: "
        f"{training.sequences} × {training.sequence_length:,} tokens on each, "
        f"{training.micro_batches} micro-batch(es), {training.dtype} parameters, "
        f"{training.compute_dtype} computation, {training.optimizer}, "
        f"checkpointing {training.checkpointing}"
    )


def parts(made: Plan) -> str:
    """The parts of an iteration."""
    times = made.times
    return (
        f"alone, in ms: forward F {times.forward_ms:,.0f}, the rest B {times.backward_ms:,.0f}, update U "
        f"{times.update_ms:,.0f}, clip {times.clip_ms:,.0f}, all loads L {times.load_ms:,.0f}, all stores S "
        f"{times.store_ms:,.0f}, both at once T {times.two_way_ms:,.0f}"
    )


def show(made: Plan, best: Forecast | None, console: Console, loop: Loop | None = None) -> None:
    """Print it."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if 0 < number < len(COLUMNS) - 1 else "left", no_wrap=True)
    for one in made.forecasts:
        table.add_row(*cells(one), style="bold" if one is best else None if one.fits else "dim")
    console.print(headline(made), highlight=False)
    console.print(parts(made), highlight=False)
    console.print(table)
    for one in made.forecasts:
        if not one.fits:
            console.print(f"{one.name} does not fit: {one.why_not}", highlight=False)
    if best is None:
        console.print(f"Nothing fits. {made.what_would_fit(loop=loop)}", highlight=False, markup=False, soft_wrap=True)
        return
    terms = ", ".join(f"{name} {nbytes / 1e9:.1f}" for name, nbytes in best.device.terms.items())
    console.print(f"Best: {best.name}. Its peak, in the {best.device.when}, in GB: {terms}", highlight=False)
    lines = best.lines or "Nothing to write: it fits without offload, which is never slower."
    console.print(lines, highlight=False, markup=False, soft_wrap=True)
