"""Show that offloading changes no result: run the same training three times, and compare all bits.

    python examples/demo_resume.py
    python examples/demo_resume.py --ranks 4 --steps 20 --layers 2

`train_gpt.py` trains (1) with the plain optimizer, (2) with its state offloaded, and (3) offloaded again, but stopped
half way and resumed from the checkpoint by new processes. Flags that this program does not know go to `train_gpt.py`.
Exit code 0 means that all losses and gradient norms were equal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

TRAIN_GPT = Path(__file__).with_name("train_gpt.py")

# One line for each step, then one for the validation; every value as `float.hex` wrote it.
Metrics = list[dict[str, str]]


class Training(NamedTuple):
    """Metrics of a training, and where its optimizer state was."""

    metrics: Metrics
    state_mb: tuple[float, float]  # of one rank at the end: in the model's memory (on a GPU, the GPU's), and offloaded


class TrainingError(Exception):
    """Raised if `train_gpt.py` fails; the message has all that it printed."""


def train(ranks: int, flags: Sequence[str]) -> tuple[float, float]:
    """Run `train_gpt.py`; return the MB of a rank's optimizer state in the model's memory, and offloaded."""
    # --standalone lets torchrun choose a free port, so that several demos can run at the same time.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, str(TRAIN_GPT), *flags]
    # With one thread per rank, the ranks share the cores without waiting for each other.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode:
        raise TrainingError(f"{result.stdout}\nfailed with exit code {result.returncode}: {shlex.join(command)}")
    # Without a GPU, all memory is host memory; the report still counts apart what would be on a GPU.
    taken = dict(re.findall(r"(state on the host|device memory taken) +(\S+ [GMk]?B)", result.stdout))
    if taken:
        return in_mb(taken["device memory taken"]), in_mb(taken["state on the host"])
    return sum(map(in_mb, re.findall(r"([0-9.]+ MB) on", result.stdout)[-2:])), 0.0


def in_mb(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"GB": 1e3, "MB": 1.0, "kB": 1e-3, "B": 1e-6}[unit]


def read_metrics(path: Path) -> Metrics:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in record.items() if name.endswith("_hex")} for record in records]


def timed_run(name: str, ranks: int, metrics: Path, runs: Sequence[Sequence[str]]) -> Training:
    """Run one or more `train_gpt.py` in sequence, which together make one training."""
    print(f"{name} ...", flush=True)
    started_s = time.perf_counter()
    states = [train(ranks, [*flags, "--metrics", str(metrics)]) for flags in runs]
    print(f"    {time.perf_counter() - started_s:.0f} s", flush=True)
    return Training(read_metrics(metrics), states[-1])


def three_trainings(ranks: int, steps: int, flags: Sequence[str], folder: Path) -> dict[str, Training]:
    # Buckets are small, so that even this little state needs several of them.
    common = ["--device", "cpu", "--steps", str(steps), "--bucket-mib", "1", "--device-mib", "2", *flags]
    saving = [*common, "--offload", "--save-dir", str(folder / "checkpoints")]
    halves = [[*saving, "--stop-at", str(steps // 2)], [*saving, "--resume"]]
    plans = {
        "plain": [[*common, "--no-offload"]],
        "offloaded": [[*common, "--offload"]],
        "offloaded, saved and resumed": halves,
    }
    return {
        name: timed_run(name, ranks, folder / f"{index}.jsonl", runs)
        for index, (name, runs) in enumerate(plans.items())
    }


def first_difference(reference: Metrics, other: Metrics) -> str:
    """Say where the metrics of two trainings first differ; return an empty text if they never do."""
    if len(reference) != len(other):
        return f"{len(other)} lines instead of {len(reference)}"
    for line, (expected, got) in enumerate(zip(reference, other, strict=True), start=1):
        for name, value in expected.items():
            if got.get(name) != value:
                return f"line {line}: {name} {got.get(name)} instead of {value}"
    return ""


def compare(trainings: dict[str, Training], steps: int) -> bool:
    print(f"\n{'':30}{'loss, step 1':>14}{f'step {steps}':>12}{'validation':>12}   same bits")
    differences = {}
    for name, (metrics, _) in trainings.items():
        differences[name] = first_difference(trainings["plain"].metrics, metrics)
        exact = metrics[0]["loss_hex"], metrics[-2]["loss_hex"], metrics[-1]["validation_loss_hex"]
        first, *others = (f"{float.fromhex(value):.8f}" for value in exact)
        same = "no" if differences[name] else "yes"
        print(f"{name:30}{first:>14}" + "".join(f"{other:>12}" for other in others) + f"   {same}")
    print("\nMB of a rank's optimizer state:  █ beside the model (on a GPU: GPU memory)   ░ on the host")
    most_mb = max(max(training.state_mb) for training in trainings.values())
    for name, training in trainings.items():
        for bar, mb in zip("█░", training.state_mb, strict=True):
            if mb:
                print(f"{name:30}  {bar * max(1, round(40 * mb / most_mb))} {mb:.2f}")
            name = ""
    for name, difference in differences.items():
        if difference:
            print(f"{name}: {difference}")
    return not any(differences.values())


def parse_args(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    args, train_flags = parser.parse_known_args(argv)
    if args.ranks < 1 or args.steps < 2:
        parser.error("expected at least 1 rank and 2 steps, so that there is a half to resume")
    return args, train_flags


def main(argv: Sequence[str] | None = None) -> int:
    args, train_flags = parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="demo_resume_") as folder:
        try:
            trainings = three_trainings(args.ranks, args.steps, train_flags, Path(folder))
        except TrainingError as error:
            print(f"{error}\nFAIL")
            return 1
    if not compare(trainings, args.steps):
        print("FAIL: the trainings differ")
        return 1
    print(f"PASS: every loss and gradient norm of {args.steps} steps is bitwise equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
