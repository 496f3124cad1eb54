"""Measures what a freed byte costs: models that users train, plain and offloaded, each row in a fresh process.

``--policies`` takes rows, separated by commas or spaces: ``plain``, ``step``, ``forward``, ``iteration``,
``parameters`` (with ``"iteration"``), ``parameters_step``, ``parameters_forward``. After the name, colons separate
``device_bytes`` and other fields of ``OffloadPolicy``, as in ``iteration:640MiB`` or
``iteration:2GiB:bucket_bytes=64MiB``; ``recompute`` for this row only, as in ``plain:recompute=4``; ``commits``:
commit each step to memory, to survive a kill; ``deltas``: record the weights that a step changes.
Plain training is the first row, and (``--again``) the last one; the faster one counts.

JSON lines go to stdout, and a table to stderr, each line as soon as its row is measured. Columns, per iteration:

- *ms*: median time. *x plain*: ratio to plain's. *fwd ms*, *bwd ms*: medians of forward and backward. *least x*: ratio
  of the fastest iteration to plain's fastest, on which other load of a shared host has less influence.
- *peak GB* and *res GB*: peaks of allocated and of reserved device memory after the warm-up.
- *freed GB*: plain's peak less the row's. *of hid.*: ratio of freed bytes to bytes that can hide behind the backward:
  the smaller of all offloaded bytes, and plain's backward times half of the link's two-way rate.
- *bound ms*: the longer of plain's time and the row's copies at the two-way rate. *x bound*: ratio of *ms* to it.
- *up GB* and *down GB*: loaded and stored over the link. *updates*: updates of buckets.
- *ours ms* (with ``--host``): wall time of all threads in our hooks and our ``step()``, less *class ms*: in it, the
  time of the ``step()`` of the user's optimizer class.
- *CPU ms*: CPU time of the process. *main ms*: of its main thread.
- *bits*: whether the losses of all iterations, and the parameters after the last one, are those of plain training.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fsdp_offload.device.copy_queues import VARIABLE
from fsdp_offload.integrations.plain_values import policy_from

from .front_row import Row, write
from .models import MODELS
from .record import print_record, run
from .step import Masters
from .timeline import check_matplotlib, new_figure

POLICIES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "step": {},
    "forward": {"overlap": "forward"},
    "iteration": {"overlap": "iteration"},
    "parameters_step": {"parameters": True},
    "parameters_forward": {"overlap": "forward", "parameters": True},
    "parameters": {"overlap": "iteration", "parameters": True},
}
_ROOT = Path(__file__).resolve().parents[2]
_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}


def measure(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "llama-3b",
    policies: Annotated[str, typer.Option(help="Rows between plain and plain.")] = "iteration iteration:640MiB",
    again: Annotated[bool, typer.Option(help="Measure plain again at the end.")] = True,
    ranks: Annotated[int, typer.Option(help="Processes, one for each device.")] = 1,
    batch: Annotated[int, typer.Option(help="Sequences in a micro-batch of a rank.")] = 1,
    tokens: Annotated[int, typer.Option(help="Of a sequence.")] = 4096,
    accumulate: Annotated[int, typer.Option(help="Micro-batches in an iteration.")] = 1,
    recompute: Annotated[str, typer.Option(help="Blocks that are recomputed: all, none, or the first N.")] = "all",
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Of parameters and state.")] = "fp32",
    masters: Annotated[Masters, typer.Option(help="Masters that are added, in plain training too.")] = "none",
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-4,
    warm: Annotated[int, typer.Option(help="Iterations before the timed ones.")] = 12,
    iterations: Annotated[int, typer.Option(help="Timed iterations.")] = 6,
    host: Annotated[bool, typer.Option(help="Count our time on the host, in as many iterations again.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Folder for a trace of each row, by torch.profiler.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw cost over freed GB (SVG, PNG, by the name).")] = None,
    record: Annotated[Path | None, typer.Option(help="Draw this record again, and measure nothing.")] = None,
) -> None:
    """Measure the time, memory and host time of each policy and of plain training, on the CPU too."""
    if picture is not None:
        check_matplotlib()
    if record is not None:
        lines = record.read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines if line.startswith('{"bench": "front",')]
        for rows in _trainings(found):
            compare(rows)
        draw_front(found, picture or record.with_suffix(".svg"))
        return
    if "RANK" in os.environ:
        sys.exit("Each row starts its own processes: leave torchrun out, and say --ranks N.")
    if model not in MODELS:
        raise typer.BadParameter(f"--model: there are {', '.join(MODELS)}; got {model}")
    if MODELS[model][0] != "lean" and importlib.util.find_spec("transformers") is None:
        sys.exit(f"{model} is a model of transformers: pip install transformers")
    common = Row(
        name="plain",
        policy=None,
        listener="",
        model=model,
        tokens=tokens,
        recomputed=_recomputed(recompute),
        dtype=dtype,
        masters=masters,
        lr=lr,
        batch=batch,
        accumulate=accumulate,
        warm=warm,
        iterations=iterations,
        host=host,
        link=False,
        trace="" if trace is None else str(trace.absolute()),
        ranks=ranks,
    )
    names = ["plain", *re.split(r"[,\s]+", policies.strip()), *["plain"] * again]
    rows = [row_of(name, common) for name in names if name]
    found = []
    print(_line(list(_COLUMNS)), file=sys.stderr, flush=True)
    for number, row in enumerate(rows):
        asked = {key: value for key, value in asdict(row).items() if key not in ("name", "link", "trace")}
        one = {"row": row.name, "number": number, **asked} | _run(replace(row, link=number == 0))
        found.append(one)
        compare(found)
        print_record("front", **one)
        print(_line(_cells(one)), file=sys.stderr, flush=True)
    if len(found) > 1:
        print("\nAgainst the faster plain row:", _line(list(_COLUMNS)), sep="\n", file=sys.stderr)
        for one in found:
            print(_line(_cells(one)), file=sys.stderr, flush=True)
            if "error" not in one:
                print_record("front-cost", **{key: one[key] for key in ("row", "number", *_COMPARED) if key in one})
    if picture is not None:
        draw_front(found, picture)


def _recomputed(text: str) -> int | None:
    if text in ("all", "none"):
        return None if text == "all" else 0
    if not text.isdecimal():
        raise typer.BadParameter(f"--recompute: all, none or a number of blocks; got {text}")
    return int(text)


def row_of(text: str, common: Row) -> Row:
    """Return the row that ``--policies`` names.

    Raises:
        typer.BadParameter: there is no such row.
    """
    name, *fields = text.split(":")
    try:
        policy = POLICIES[name]
        values: dict[str, Any] = dict(policy or {})
        for one in fields:
            field, _, value = one.rpartition("=")
            if field == "recompute":
                common = replace(common, recomputed=_recomputed(value))
            elif policy is None:
                raise ValueError("plain training has no policy")
            elif one in ("commits", "deltas"):
                common = replace(common, listener=one)
            else:
                values[field or "device_bytes"] = _bytes_or_text(value)
        made = None if policy is None else asdict(policy_from(values))
    except (KeyError, ValueError, TypeError) as error:
        raise typer.BadParameter(f"--policies {text}: {error}; there are {', '.join(POLICIES)}") from None
    return replace(common, name=text, policy=made)


def _bytes_or_text(text: str) -> Any:
    match = re.fullmatch(r"([\d.]+)([MG]i?B)", text)
    return text if match is None else int(float(match[1]) * _UNITS[match[2]])


# Processes ------------------------------------------------------------------------------------------------------------


def _run(row: Row) -> dict[str, Any]:
    """Run a row with a process for each rank; return its record, for a failed row only the error."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}  # which our import has set
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    with tempfile.TemporaryDirectory(dir="/dev/shm" if row.listener == "commits" else None) as folder:
        path = Path(folder, "row.json")
        write(row, path)
        command = [sys.executable, "-m", f"{__package__}.front_row", str(path)]
        processes = []
        for rank in range(row.ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(row.ranks)}
            with Path(folder, f"rank-{rank}.txt").open("w") as output:
                process = subprocess.Popen(command, cwd=_ROOT, env=environment | own, stdout=output, stderr=output)
            processes.append(process)
        try:
            while None in (codes := [process.poll() for process in processes]) and not any(codes):
                time.sleep(0.05)
        finally:
            for process in processes:  # the others would wait for a rank that failed
                process.kill()
                process.wait()
        for rank, code in enumerate(codes):
            if code and not Path(folder, f"rank-{rank}.json").exists():  # with a result, only the end failed
                output = Path(folder, f"rank-{rank}.txt").read_text(errors="replace").strip()
                print(output[-4000:], file=sys.stderr)
                errors = re.findall(r"^(?:\[rank\d+\]: )?([\w.]+(?:Error|Exception): .*)", output, re.MULTILINE)
                why = [*output.splitlines(), *errors] if code > 0 else []
                return {"error": f"rank {rank} ended with {code}: {''.join(why[-1:])}"}
        ranks = [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(row.ranks)]
        return _merged(ranks)


_SLOWEST = (
    *("ms", "forward_ms", "backward_ms", "process_cpu_ms", "main_cpu_ms", "issue_ms", "attach_s", "row_s"),
    *("idle_ms", "longest_idle_ms", "take_s"),
)
_MOST = ("peak_bytes", "reserved_bytes")


def _merged(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the results of ranks: of times and memory the largest; report and link are the first rank's."""
    first, report = ranks[0], ranks[0].get("report", {})
    found = {name: max(one[name] for one in ranks) for name in (*_SLOWEST, *_MOST) if name in first}
    found |= {name: first[name] for name in ("all_ms", "params", "device", "copy_queues", "threads")}
    found |= {name: first[name] for name in ("transformers", "link", "notes") if first.get(name)}
    found |= {name: sum(one[name] for one in ranks) for name in ("changed", "delta_bytes") if name in first}
    if "ours" in first:
        slowest = max(ranks, key=lambda one: float(one["ours"].get("ms", 0)))
        found["ours"] = {name: round(value, 2) for name, value in slowest["ours"].items()}
    for name in _REPORTED:
        if name in report:
            found[name.partition("/")[2]] = report[name]
    found["losses"] = [one["losses"] for one in ranks]  # hexadecimal texts, which have all bits
    found["parameters"] = [one["parameters"] for one in ranks]
    return found


_REPORTED = (
    *(f"step/{name}" for name in ("loaded_bytes", "stored_bytes", "loads", "stores", "updates", "held_updates")),
    *("iteration/stalled_ms", "iteration/bound_ms", "memory/host_state_bytes", "memory/host_parameter_bytes"),
    *("memory/kept_state_bytes", "memory/kept_parameter_bytes", "memory/device_bytes"),
)


# Comparison -----------------------------------------------------------------------------------------------------------

_COMPARED = (
    *("over_plain", "least_over_plain", "freed_bytes", "freed_of_hideable", "link_bound_ms", "over_bound"),
    *("same_losses", "same_parameters"),
)


def compare(found: Sequence[dict[str, Any]]) -> None:
    """Add to each row what it costs over the faster of the plain rows so far."""
    plains = [one for one in found if one["row"].startswith("plain") and "error" not in one]
    if not plains:
        return
    plain_ms = min(one["ms"] for one in plains)
    least_ms = min(min(one["all_ms"]) for one in plains)
    link = next((one["link"] for one in found if "link" in one), None)
    for one in found:
        if "error" in one:
            continue
        one["over_plain"], one["least_over_plain"] = one["ms"] / plain_ms, min(one["all_ms"]) / least_ms
        if "peak_bytes" in one:
            one["freed_bytes"] = min(plain["peak_bytes"] for plain in plains) - one["peak_bytes"]
        if link is not None:
            bytes_per_ms = link["two_way_gb_per_s"] * 1e6
            moved_bytes = one.get("loaded_bytes", 0) + one.get("stored_bytes", 0)
            one["link_bound_ms"] = max(plain_ms, moved_bytes / bytes_per_ms)
            one["over_bound"] = one["ms"] / one["link_bound_ms"]
            offloaded_bytes = one.get("host_state_bytes", 0) + one.get("host_parameter_bytes", 0)
            if offloaded_bytes and "freed_bytes" in one:
                backward_ms = min(plain["backward_ms"] for plain in plains)
                one["freed_of_hideable"] = one["freed_bytes"] / min(offloaded_bytes, backward_ms * bytes_per_ms / 2)
        one["same_losses"] = one["losses"] == plains[0]["losses"]
        one["same_parameters"] = one["parameters"] == plains[0]["parameters"]


# Column → width; negative: aligned left. A cell without a figure shows "-".
_COLUMNS: dict[str, int] = {
    "row": -26,
    "ms": 8,
    "x plain": 7,
    "least x": 7,
    "peak GB": 7,
    "res GB": 7,
    "freed GB": 8,
    "of hid.": 7,
    "bound ms": 8,
    "x bound": 7,
    "up GB": 6,
    "down GB": 7,
    "updates": 7,
    "ours ms": 7,
    "class ms": 8,
    "CPU ms": 7,
    "main ms": 7,
    "fwd ms": 7,
    "bwd ms": 7,
    "bits": -9,
}


def _cells(one: Mapping[str, Any]) -> list[str]:
    if "error" in one:
        return [one["row"], one["error"]]

    def number(name: str, digits: int = 1, scale: float = 1.0, of: Mapping[str, Any] = one) -> str:
        return "-" if name not in of else f"{of[name] / scale:.{digits}f}"

    ours = one.get("ours", {})
    bits = "-" if "same_losses" not in one else "equal"
    for name in ("losses", "parameters"):
        if not one.get(f"same_{name}", True):
            bits = f"{name} differ"
    return [
        one["row"],
        number("ms"),
        number("over_plain", 3),
        number("least_over_plain", 3),
        number("peak_bytes", 2, 1e9),
        number("reserved_bytes", 2, 1e9),
        number("freed_bytes", 2, 1e9),
        number("freed_of_hideable", 2),
        number("link_bound_ms"),
        number("over_bound", 3),
        number("loaded_bytes", 2, 1e9),
        number("stored_bytes", 2, 1e9),
        number("updates", 0),
        number("ms", of=ours),
        number("class_step_ms", of=ours),
        number("process_cpu_ms", 0),
        number("main_cpu_ms", 0),
        number("forward_ms"),
        number("backward_ms"),
        bits,
    ]


def _line(cells: Sequence[str]) -> str:
    pairs = zip(cells, _COLUMNS.values(), strict=False)  # a failed row has only two cells
    return "  ".join(f"{one:<{-width}}" if width < 0 else f"{one:>{width}}" for one, width in pairs).rstrip()


_TRAINING = ("model", "ranks", "batch", "tokens", "accumulate", "recomputed", "dtype", "masters")


def _trainings(found: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group rows by training; each group has plain rows of its own."""
    trainings: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in found:
        trainings.setdefault(tuple(map(one.get, _TRAINING)), []).append(one)
    return list(trainings.values())


def draw_front(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw each row's cost over the memory that it frees.

    Raises:
        SystemExit: matplotlib is missing.
    """
    axes = (figure := new_figure(5, 5.4)).subplots()  # inches: readable on a telephone, too
    policies: dict[str, str] = {}  # markers: names at the points would lie on each other
    for number, rows in enumerate(_trainings(found)):
        first, label = rows[0], "{model}, {batch} × {tokens:,} tokens".format(**rows[0])
        label += f" on each of {first['ranks']}" if first["ranks"] > 1 else ""
        axes.plot([], [], "_", color=f"C{number}", markeredgewidth=4, label=label)
        for one in [row for row in rows if "over_plain" in row and not row["row"].startswith("plain")]:
            marker = policies.setdefault(one["row"], "osD^vP*X<>"[len(policies) % 10])
            point = (one.get("freed_bytes", 0) / 1e9, 100 * (one["over_plain"] - 1))
            axes.plot(*point, marker, color=f"C{number}", markersize=8, alpha=0.8)
    for policy, marker in policies.items():
        axes.plot([], [], marker, color="#4c566a", label=policy)
    axes.plot(0, 0, "x", color="#4c566a", label="without offload")
    axes.set_xlabel("GB freed: plain's peak less the row's")
    axes.set_ylabel("% of time over plain")
    axes.set_yscale("symlog", linthresh=5, linscale=2)  # most rows are within 5 %
    axes.set_yticks(ticks := (0, 1, 2, 3, 4, 5, 10, 20, 50, 100), map(str, ticks))
    device = ", ".join(sorted({one["device"] for one in found if "device" in one}))
    figure.legend(fontsize=9, loc="outside upper center", ncols=2, title=device, title_fontsize=9)
    axes.grid(linewidth=0.3)
    axes.margins(0.15)
    figure.savefig(path)


def main(argv: Sequence[str]) -> None:
    """Measure with the options of ``argv``."""
    run(measure, argv)
