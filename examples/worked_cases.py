"""Write docs/worked_cases.md: which models train on how many of which devices, how, and how fast. By the plan alone.

    python examples/worked_cases.py docs/worked_cases.md

Takes a minute, and needs no GPU. The page is as good as the plan, whose predictions are compared with measurements in
examples/benchmark_results.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from fsdp_offload.plan import Forecast, Plan, model_of, plan

MODELS = ("Llama-3.1-8B", "Qwen3-14B", "Qwen3-32B", "Mixtral-8x7B")
DEVICES = {"H100": 4, "H200": 4, "RTX4090": 1}  # and sequences of each device in a step
RANKS = (1, 2, 4, 8)
LENGTH = 4096
PRECISIONS = {
    "fp32 parameters, AdamW": {"dtype": "fp32"},
    "bf16 parameters, AdamW with master_weights='remainder'": {"dtype": "bf16", "master_weights": "remainder"},
}

HEAD = f"""# Worked cases

Which of these models train on 1, 2, 4 and 8 devices of one host, with which policy, and how fast: what
[`fsdp-offload plan`](plan.md) says, as `python examples/worked_cases.py docs/worked_cases.md` wrote it. Nothing on this
page was measured; [how well the plan does](plan.md#how-well-it-does) was, on H200s.

Every device trains on sequences of {LENGTH:,} tokens in each step, 4 on an H100 or H200 and 1 on an RTX 4090, in bf16,
with every block recomputed in the backward (so that what does not fit is not for activations), without clipping. A cell
has the fastest policy that fits, tokens/s of all devices, GB that each device has to have, and GB of host memory pinned
by all together. Where nothing fits, it says how much is missing with the policy that needs least. RTX 4090s talk to
each other through the host, which is what limits them; their profile, and that of the H100, are from data sheets.
"""


def cases(name: str) -> Iterator[str]:
    """The section of one model, line by line."""
    model = model_of(name)
    traces = {
        sequences: model.trace(sequences, LENGTH, torch.bfloat16, "full") for sequences in sorted({*DEVICES.values()})
    }
    yield f"## {name}: {model.numel / 1e9:.1f} G parameters"
    for title, precision in PRECISIONS.items():
        yield ""
        yield f"**{title}**"
        yield ""
        yield "| devices | " + " | ".join(DEVICES) + " |"
        yield "| --- |" + " --- |" * len(DEVICES)
        for ranks in RANKS:
            cells = []
            for machine, sequences in DEVICES.items():
                made = plan(
                    model,
                    machine=machine,
                    ranks=ranks,
                    tokens_per_step=ranks * sequences * LENGTH,
                    sequence_length=LENGTH,
                    checkpointing="full",
                    clip=False,
                    trace=traces[sequences],
                    **precision,
                )
                cells.append(cell(made))
            yield f"| {ranks} | " + " | ".join(cells) + " |"
    yield ""


def cell(made: Plan) -> str:
    """What a table says of one training."""
    best = made.best()
    if best is None:
        least = max(made.forecasts, key=lambda one: one.spare_bytes)
        return f"no: {least.why_not}" if not least.fits else "no: host memory"
    return f"**{best.name}**, {_tokens(best)} tokens/s; {best.needed_bytes / 1e9:.0f} GB, host {_host(best)}"


def _tokens(one: Forecast) -> str:
    return f"{float(f'{one.tokens_per_s:.3g}'):,.0f}"


def _host(one: Forecast) -> str:
    return f"{one.host_bytes_per_host / 1e9:.0f} GB"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--models", nargs="*", default=MODELS)
    args = parser.parse_args(argv)
    sections = []
    for name in args.models:
        print(f"{name} ...", flush=True)
        sections.append("\n".join(cases(name)))
    args.page.write_text(HEAD + "\n" + "\n".join(sections).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
