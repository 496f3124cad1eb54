"""Print the best policy, and its speed, of models on several kinds and numbers of GPUs: the table of docs/plan.md.

    python examples/worked_cases.py

Takes a minute, and needs no GPU. The rows are as good as the plan, whose predictions are compared with measurements in
examples/benchmark_results.
"""

import argparse
from collections.abc import Iterator

from fsdp_offload.plan import Forecast, Plan, model_of, plan

MODELS = ("Llama-3.1-8B",)
DEVICES = {"H100": 4, "H200": 4, "RTX5090": 1}  # device → sequences on each one in a step
RANKS = (1, 2, 4, 8)
LENGTH = 4096
HEAD = f"| model | GPUs | {' | '.join(DEVICES)} |\n| --- |{' --- |' * (1 + len(DEVICES))}"


def cases(name: str, dtype: str = "fp32", masters: str = "none") -> Iterator[str]:
    """Yield the rows of one model."""
    model = model_of(name)
    for ranks in RANKS:
        cells = []
        for machine, sequences in DEVICES.items():
            made = plan(
                model,
                machine=machine,
                ranks=ranks,
                tokens_per_step=ranks * sequences * LENGTH,
                sequence_length=LENGTH,
                clip=False,
                dtype=dtype,
                masters=masters,
            )
            cells.append(cell(made))
        yield f"| {name}, {model.numel / 1e9:.1f} G | {ranks} | {' | '.join(cells)} |"


def cell(made: Plan) -> str:
    """Format the best forecast of a plan, or why none fits, as a cell of the table."""
    best = made.best()
    if best is None:
        least = min(made.forecasts, key=lambda one: one.needed_bytes)
        return f"no; {least.why_not}" if not least.fits else "no; host memory"
    blocks = f"{best.name}, {best.recomputed} recomputed"
    return f"{blocks}: {_tokens(best)}/s, {best.needed_bytes / 1e9:.0f} GB, {_host(best)}"


def _tokens(one: Forecast) -> str:
    return f"{float(f'{one.tokens_per_s:.3g}'):,.0f}"


def _host(one: Forecast) -> str:
    return f"{one.host_bytes_per_host / 1e9:.0f} GB"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--masters", default="none")
    args = parser.parse_args(argv)
    print(HEAD)
    for name in args.models:
        for row in cases(name, args.dtype, args.masters):
            print(row, flush=True)


if __name__ == "__main__":
    main()
