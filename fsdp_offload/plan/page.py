"""A plan as one self-contained HTML page: no scripts, and nothing from elsewhere."""

from html import escape

from ..planning.choices import Loop
from .forecast import Forecast, Plan
from .table import COLUMNS, cells, headline, parts

_COLORS = {
    "parameters": "#4c566a",
    "window": "#8a94a8",
    "optimizer state": "#2f7fc1",
    "staging": "#88b8de",
    "gathered": "#8f6fb0",
    "gradients": "#c8502f",
    "activations": "#2e8b57",
    "logits": "#7fbf9a",
    "attention scores": "#b5d8a8",
    "workspace": "#9a9a9a",
    "other": "#c4c4c4",
}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left }
tr.best { background: #eaf4ec; font-weight: 600 } tr.no { color: #999 }
pre { background: #f4f4f6; padding: .8rem 1rem; white-space: pre-wrap }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif } .key { margin-right: 1rem; white-space: nowrap }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em }
"""


def page(made: Plan, best: Forecast | None, loop: Loop | None = None) -> str:
    """Return the page as HTML; ``best`` is what it recommends, for what ``loop`` allows."""
    rows = "".join(_row(one, is_best=one is best) for one in made.forecasts)
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    if best is None:
        advice = f"<p>Nothing fits. {escape(made.what_would_fit(loop=loop))}</p>"
    else:
        lines = best.lines or "# nothing: it fits without offload, which is never slower"
        advice = f"<p>Best: <b>{escape(best.name)}</b>. Write</p><pre>{escape(lines)}</pre>"
    misfits = "".join(f"<li>{escape(one.name)}: {escape(one.why_not)}</li>" for one in made.forecasts if not one.fits)
    misfits = f"<p>What does not fit:</p><ul>{misfits}</ul>" if misfits else ""
    formulas = "".join(
        f"<li>{escape(one.name)}: {one.bound_ms:,.0f} ms = {escape(one.bound)}</li>" for one in made.forecasts
    )
    used = dict.fromkeys(name for one in made.forecasts for name in one.device.terms)
    keys = "".join(f'<span class="key"><i style="background:{_COLORS[name]}"></i>{name}</span>' for name in used)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Plan: {escape(made.model)}</title>'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head><body><h1>{escape(made.model)}</h1>'
        f"<p>{escape(headline(made))}</p>{advice}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f"{misfits}<p>{escape(parts(made))}</p><p>Bounds:</p><ul>{formulas}</ul>"
        f"<h2>Device memory at its peak</h2><p>{keys}</p>{_bars(made)}</body></html>\n"
    )


def _row(one: Forecast, *, is_best: bool) -> str:
    kind = "best" if is_best else "" if one.fits else "no"
    return f'<tr class="{kind}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells(one)) + "</tr>"


def _bars(made: Plan) -> str:
    """A bar for each policy, of the peak's terms, and a line where the device ends."""
    left, width, height = 170, 880, 26
    most_bytes = max(made.machine.device_bytes, *(one.device.peak_bytes for one in made.forecasts))
    drawn = []
    for number, one in enumerate(made.forecasts):
        top, begin = number * height, float(left)
        drawn.append(f'<text x="0" y="{top + 17}">{escape(one.name)}</text>')
        for name, nbytes in one.device.terms.items():
            long = nbytes / most_bytes * width
            title = f"<title>{name}: {nbytes / 1e9:.2f} GB</title>"
            drawn.append(
                f'<rect x="{begin:.1f}" y="{top + 4}" width="{long:.1f}" height="{height - 8}" '
                f'fill="{_COLORS[name]}">{title}</rect>'
            )
            begin += long
        drawn.append(f'<text x="{begin + 5:.1f}" y="{top + 17}">{one.device.peak_bytes / 1e9:.1f} GB</text>')
    end = left + made.machine.device_bytes / most_bytes * width
    bottom = len(made.forecasts) * height
    drawn.append(f'<line x1="{end:.1f}" x2="{end:.1f}" y1="0" y2="{bottom}" stroke="#b00" stroke-dasharray="4 3"/>')
    label = f"{made.machine.name}: {made.machine.device_bytes / 1e9:.0f} GB"
    drawn.append(f'<text x="{end:.1f}" y="{bottom + 14}" text-anchor="end" fill="#b00">{escape(label)}</text>')
    return f'<svg viewBox="0 0 1120 {bottom + 20}" role="img">{"".join(drawn)}</svg>'
