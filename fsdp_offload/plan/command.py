"""The command ``fsdp-offload plan``."""

import json
import math
import sys
from typing import Annotated, NoReturn

try:
    import typer
    from rich.console import Console
except ImportError:
    sys.stderr.write("The plan's command needs the extra 'plan': pip install 'fsdp-offload[plan]'\n")
    sys.exit(2)

from .choices import Loop
from .forecast import plan
from .machine import builtin_machines
from .model import builtin_models
from .table import show
from .trace import Checkpointing

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(
    help="What training will take in memory and time under each policy, and the line to write. Nothing is downloaded, "
    "and no GPU is needed. Exit code: 0 something fits, 1 nothing fits, 2 not planned."
)
def main(
    model: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(builtin_models())}; a config.json or its folder; a model type of transformers; or "
            "package.module:function, which makes a module."
        ),
    ],
    tokens_per_step: Annotated[int, typer.Option(help="Of all ranks together.")],
    machine: Annotated[
        str, typer.Option(help=f"{', '.join(builtin_machines())}, a TOML file, or 'this', which is measured once.")
    ] = "H200",
    ranks: Annotated[int, typer.Option(help="Devices in all.")] = 1,
    replicas: Annotated[int, typer.Option(help="Of these, replicas of the model (HSDP).")] = 1,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    micro_batches: Annotated[int, typer.Option(help="Backwards before one step.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of the sharded parameters: fp32 or bf16.")] = "fp32",
    compute_dtype: Annotated[str, typer.Option(help="Of the gathered ones.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="adamw, sgd-momentum, ...")] = "adamw",
    master_weights: Annotated[str, typer.Option(help="OffloadPolicy.master_weights.")] = "none",
    checkpointing: Annotated[Checkpointing, typer.Option(help="What is recomputed in the backward.")] = "none",
    clip: Annotated[bool, typer.Option(help="Whether gradients are clipped by their global norm.")] = True,
    loop: Annotated[
        Loop | None, typer.Option(help="What the loop allows; by default, anything but for --clip.")
    ] = None,
    device_gb: Annotated[float | None, typer.Option(help="GB of a device that may be used, if less than all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; sizes in bytes.")] = False,
) -> None:
    """Print the plan."""
    try:
        device_bytes = None if device_gb is None else _device_bytes(device_gb)
        with Console(stderr=True).status("measuring this machine, once" if machine == "this" else "tracing the model"):
            made = plan(
                model,
                machine=machine,
                ranks=ranks,
                replicas=replicas,
                tokens_per_step=tokens_per_step,
                sequence_length=sequence_length,
                micro_batches=micro_batches,
                dtype=dtype,
                compute_dtype=compute_dtype,
                optimizer=optimizer,
                master_weights=master_weights,
                checkpointing=checkpointing,
                clip=clip,
            )
        if device_bytes is not None:
            made = made.within(device_bytes)
        best = made.best(loop=loop)
    except ValueError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}")
    if as_json:
        typer.echo(json.dumps({**made.as_dict(), "best": None if best is None else best.name}, indent=1))
    else:
        show(made, best, Console(), loop)
    if best is None:
        raise typer.Exit(1)


def _device_bytes(device_gb: float) -> int:
    if not 0 < device_gb < math.inf:
        raise ValueError(f"--device-gb must be a positive number, got {device_gb}")
    return int(device_gb * 1e9)


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)
