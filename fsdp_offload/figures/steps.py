"""How close iterations come to their bound, step by step, as a picture."""

from collections.abc import Sequence
from pathlib import Path

from ..report import OffloadReport
from .timeline import check_matplotlib


def draw_steps(reports: Sequence[OffloadReport], path: str | Path) -> None:
    """Write a picture of the share of the bound that each step reached; ``resident_bytes="auto"`` shows as it settles.

    Args:
        reports: of successive steps; a report waits for the device.
        path: of an SVG or a PNG.

    Raises:
        SystemExit: matplotlib is missing.
        ValueError: no report knows its bound.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    known = [
        (number, one.bound_ms / took_ms)
        for number, one in enumerate(reports)
        if one.bound_ms and (took_ms := one.iteration_ms or one.step_ms)
    ]
    if not known:
        raise ValueError("no report knows its bound: it takes two steps that move the same")
    figure = Figure(figsize=(8, 3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([number for number, _ in known], [100 * share for _, share in known], marker=".", color="#2f7fc1")
    axes.set_ylim(0, 105)
    axes.set_xlabel("step")
    axes.set_ylabel("% of the bound")
    axes.grid(linewidth=0.3)
    figure.savefig(path)
