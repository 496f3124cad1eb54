"""Whether plans come true: predictions of several trainings, written first, beside what they take.

::

    python -m fsdp_offload.bench plan --predict FILE     anywhere; writes one line for each configuration
    python -m fsdp_offload.bench plan --compare FILE     on the devices; runs what is in the file and prints both

Cases with a loop also try ``policy="auto"``, before the policies among which it chooses and again after them, beside
the best of these.

On several devices: ``torchrun --standalone --nproc-per-node 2 -m fsdp_offload.bench plan --compare FILE``. How many
ranks a prediction is for is said with ``--ranks``.
"""

import dataclasses
import functools
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from .. import offload_optimizer, remove_offload
from ..plan import Forecast, Model, Plan, Training, model_of, plan
from ..plan.training import DTYPES
from ..planning.choices import Choice, Loop
from .plan_cases import CASES, Case, allowed_policies, choice_named
from .record import print_record

_SETTLE, _SETTLE_AUTO = 4, 19
"""Iterations before anything is measured: the first creates the state; "auto" measures until the
fifteenth, and the seventeenth has nothing beside the model, whose gradients go in the next one."""

_AUTO = "auto"

_ON_DEVICES = ",".join(name for name in CASES if name != "tiny")


def main(
    predict: Annotated[Path | None, typer.Option(help="Write predictions into this file.")] = None,
    compare: Annotated[Path | None, typer.Option(help="Measure what this file predicts.")] = None,
    cases: Annotated[str, typer.Option(help="Only these, separated by commas.")] = _ON_DEVICES,
    ranks: Annotated[int, typer.Option(help="Devices to predict for.")] = 1,
    machine: Annotated[str, typer.Option(help="Profile to predict with.")] = "H200",
    iterations: Annotated[int, typer.Option(help="Timed together.")] = 4,
    seconds: Annotated[float, typer.Option(help="Begin no further configuration after so long.")] = 200.0,
) -> None:
    """Predicted memory and time beside measured ones."""
    if (predict is None) == (compare is None):
        raise typer.BadParameter("give one of --predict FILE and --compare FILE")
    if predict is not None:
        predictions = [line for name in cases.split(",") for line in _predictions(name, ranks, machine)]
        predict.write_text("".join(f"{json.dumps(line)}\n" for line in predictions), encoding="utf-8")
        return
    assert compare is not None
    until = time.monotonic() + seconds
    predicted = [json.loads(line) for line in compare.read_text(encoding="utf-8").splitlines()]
    with _process_group() as device:
        for name in dict.fromkeys(line["case"] for line in predicted):
            lines = [line for line in predicted if line["case"] == name and name in cases.split(",")]
            if lines and not _is_late(until, device):
                _compare(name, lines, device, iterations, until)


def _predictions(name: str, ranks: int, machine: str) -> Iterator[dict[str, Any]]:
    case = CASES[name]
    choices = [choice for choice in map(choice_named, case.policies) if choice is not None]
    made = plan(model_of_case(case), machine=machine, choices=choices, **training_of_case(case, ranks))
    best = made.best(loop=case.loop or "no_clipping")
    for one in made.forecasts:
        if one.name in case.policies:
            yield {"case": name, "ranks": ranks, "machine": machine, "best": best is one, **_figures(made, one)}


def model_of_case(case: Case) -> Model:
    """Build a case's model on the meta device."""
    with torch.device("meta"):
        return model_of(case.build())


def training_of_case(case: Case, ranks: int) -> dict[str, Any]:
    """Return how a case is trained, as arguments of :func:`fsdp_offload.plan.plan`."""
    tokens = ranks * case.sequences * case.training["sequence_length"] * case.training.get("micro_batches", 1)
    return {"ranks": ranks, "tokens_per_step": tokens, **case.training}


def _figures(made: Plan, one: Forecast) -> dict[str, Any]:
    return {
        "policy": one.name,
        "parameters": made.numel,
        "peak_bytes": one.device.peak_bytes,
        "host_bytes": one.host_bytes,
        "ms": round(one.iteration_ms, 2),
        "limit": one.limit,
        "resident_bytes": one.resident_bytes,
        "parts_ms": {key: round(value, 2) for key, value in dataclasses.asdict(made.times).items()},
        "terms": dict(one.device.terms),
    }


# Measuring ----------------------------------------------------------------------------------------------------------


@contextmanager
def _process_group() -> Iterator[torch.device]:
    kind = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    on_cpu = kind.type == "cpu"
    if "RANK" in os.environ:
        if not on_cpu:
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("gloo" if on_cpu else None)
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield kind if on_cpu else torch.device(kind.type, torch.accelerator.current_device_index())
    finally:
        dist.destroy_process_group()


def _compare(name: str, lines: list[dict[str, Any]], device: torch.device, iterations: int, until: float) -> None:
    case = CASES[name]
    training = Training(**training_of_case(case, dist.get_world_size()))
    model = _sharded(case, training, device)
    wanted = [line["policy"] for line in lines]
    measure = functools.partial(_measure, model, training, device=device, iterations=iterations, loop=case.loop)
    found: dict[str, dict[str, Any]] = {}
    for policy in [_AUTO, *wanted] if case.loop is not None else wanted:
        found[policy] = measure(policy)
        if policy != _AUTO and dist.get_rank() == 0:
            _print_compared(name, training, lines[wanted.index(policy)], found[policy])
        if _is_late(until, device):
            return
    if case.loop is not None:
        fixed = [policy for policy in allowed_policies(case.loop) if policy in found]
        best = _first_ranks(min(fixed, key=lambda policy: found[policy]["ms"]))
        _print_auto(name, case, found, best, {policy: measure(policy)["ms"] for policy in (best, _AUTO)})


def _first_ranks(choice: str) -> str:
    """Return the first rank's choice: all have to train in the same way."""
    chosen = [choice]
    dist.broadcast_object_list(chosen)
    return chosen[0]


def _print_compared(name: str, training: Training, line: dict[str, Any], found: dict[str, Any]) -> None:
    keys = ("peak_bytes", "host_bytes", "ms")
    print_record(
        "plan",
        case=name,
        policy=line["policy"],
        ranks=training.ranks,
        **{f"predicted_{key}": line[key] for key in keys},
        **{f"measured_{key}": found[key] for key in keys},
        **{f"{key}_ratio": line[key] / found[key] if found[key] else None for key in keys},
        resident_bytes=[line["resident_bytes"], found["resident_bytes"]],
        reserved_bytes=found["reserved_bytes"],
        stalled_ms=found["stalled_ms"],
        best=line["best"],
    )


def _print_auto(
    name: str, case: Case, found: Mapping[str, Mapping[str, Any]], best: str, again_ms: Mapping[str, float]
) -> None:
    """Both were measured twice, once on each side of the others."""
    both_ms = {policy: [found[policy]["ms"], again_ms[policy]] for policy in (_AUTO, best)}
    if dist.get_rank() == 0:
        print_record(
            "plan-auto",
            case=name,
            ranks=dist.get_world_size(),
            loop=case.loop,
            chosen=found[_AUTO]["chosen"],
            resident_bytes=found[_AUTO]["resident_bytes"],
            peak_bytes=found[_AUTO]["peak_bytes"],
            auto_ms=both_ms[_AUTO],
            best_fixed=best,
            best_fixed_ms=both_ms[best],
            fixed_ms={policy: found[policy]["ms"] for policy in found if policy != _AUTO},
            over_best_fixed=sum(both_ms[_AUTO]) / sum(both_ms[best]),
        )


def _is_late(until: float, device: torch.device) -> bool:
    """Return whether any rank says so: all have to stop together."""
    late = torch.tensor(float(time.monotonic() > until), device=device)
    dist.all_reduce(late)
    return bool(late.item())


def _sharded(case: Case, training: Training, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    gc.collect()
    dtype = DTYPES[training.dtype]
    with device:
        torch.set_default_dtype(dtype)
        try:
            module = case.build()
        finally:
            torch.set_default_dtype(torch.float32)
    known = model_of(module)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=DTYPES[training.compute_dtype])
    for group in known.groups:
        if training.checkpointing == "full" and group is not module:
            group.forward = functools.partial(checkpoint, group.forward, use_reentrant=False)
        fully_shard(group, mesh=mesh, mp_policy=precision)
    return module


def _measure(
    model: nn.Module,
    training: Training,
    policy_name: str,
    *,
    device: torch.device,
    iterations: int,
    loop: Loop | None,
) -> dict[str, Any]:
    is_auto = policy_name == _AUTO
    choice = None if is_auto else choice_named(policy_name)
    offloads = is_auto or choice is not None
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-6, fused=True)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    shape = (training.sequences, training.sequence_length + 1)
    tokens = torch.randint(0, 256, shape, generator=generator, device=device)
    on_cpu = device.type == "cpu"
    gc.collect()
    if not on_cpu:
        torch.accelerator.empty_cache()
    if is_auto:
        assert loop is not None
        offload_optimizer(optimizer, model=model, policy="auto", loop=loop)
    elif choice is not None:
        offload_optimizer(optimizer, model=model, policy=_policy(choice, training, params))
    clip = training.clip and (choice is None or choice.overlap != "iteration")
    iterate = functools.partial(_iterate, model, optimizer, tokens, training.micro_batches, clip=clip)
    learns = is_auto or (choice is not None and choice.overlap != "step" and choice.keeps_some)
    iterate(_SETTLE_AUTO if learns else _SETTLE)
    if not on_cpu:
        torch.accelerator.reset_peak_memory_stats(device)
    dist.barrier()
    iterate(1)
    ms = _timed_ms(iterate, iterations, device)
    report = optimizer.offload_report() if offloads else None  # type: ignore[attr-defined]
    found = {
        "ms": ms,
        "peak_bytes": 0 if on_cpu else torch.accelerator.max_memory_allocated(device),
        "reserved_bytes": 0 if on_cpu else torch.accelerator.max_memory_reserved(device),
        "host_bytes": report.host_bytes if report else 0,
        "resident_bytes": report.resident_state_bytes + report.resident_parameter_bytes if report else 0,
        "stalled_ms": report.stalled_ms if report else 0.0,
        "chosen": report.tuning[0] if is_auto and report else "",
    }
    if offloads:
        optimizer.synchronize()  # type: ignore[attr-defined]
        optimizer.state.clear()  # nothing that would have to go back to the device
        remove_offload(optimizer)
    return found


def _policy(choice: Choice, training: Training, params: list[nn.Parameter]) -> Any:
    state_bytes = sum(training.state_itemsizes()) * sum(param.numel() for param in params) // training.shards
    return dataclasses.replace(choice.policy(state_bytes), master_weights=training.master_weights)


def _iterate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    micro_batches: int,
    count: int,
    *,
    clip: bool,
) -> None:
    for _ in range(count):
        for _ in range(micro_batches):
            model(tokens).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()


def _timed_ms(iterate: Callable[[int], None], count: int, device: torch.device) -> float:
    """Time an iteration among others: from the end of a step to the end of another, as the model's stream sees it."""
    if device.type == "cpu":
        begin_s = time.perf_counter()
        iterate(count)
        return (time.perf_counter() - begin_s) / count * 1e3
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    begin.record()
    iterate(count)
    end.record()
    end.synchronize()
    elapsed: float = begin.elapsed_time(end)
    return elapsed / count
