"""Measures what offloading costs an iteration of a GPT under ``fully_shard``, for each policy.

On several devices: ``torchrun --standalone --nproc-per-node 2 -m examples.benchmarks train``.

``--only`` takes names of policies. An ending says in which steps the norm binds, so that clipping changes gradients:
``iteration_never``, ``iteration_rarely`` (one step of 20), ``iteration_always``; likewise for all policies, compared to
``plain`` of the same ending. Without an ending it never binds, and policies that update in the backward do not clip.

``--traces FOLDER`` writes a Chrome trace of three settled iterations of each policy (for ui.perfetto.dev), a picture of
the middle one, and a picture of all policies on one scale.
"""

import gc
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import OffloadPolicy as FSDPOffloadPolicy

from fsdp_offload import OffloadPolicy, clip_grad_norm_, offload_optimizer, remove_offload
from fsdp_offload.device.lanes import device_link
from fsdp_offload.fsdp.dtensor import local_shard
from fsdp_offload.fsdp.fully_shard import fsdp_modules

from .link import Link
from .models import GPT
from .record import bench_device, median, print_record, run, wall_ms
from .timeline import Lane, Timeline, check_matplotlib, draw, phase, read_trace, timeline_of

_MIB = 1 << 20
_MEMORY = ("peak", "reserved")

SETTLE_ITERATIONS = 17
"""Iterations before measuring. The first one creates the state. In the next ones, the overlap learns in which order
gradients become final, and the allocator grows; the choices of "auto" apply from the sixteenth on. All policies have
the same number of iterations, so that their losses can be compared."""

# Name → fields of OffloadPolicy, in addition to those of the command line. Limited policies also get --device-mib.
POLICIES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "step": {},
    "forward": {"overlap": "forward"},
    "iteration": {"overlap": "iteration"},
    "step_limited": {},
    "forward_limited": {"overlap": "forward"},
    "iteration_limited": {"overlap": "iteration"},
    "parameters_step": {"parameters": True},
    "parameters": {"overlap": "iteration", "parameters": True},
    "parameters_limited": {"overlap": "iteration", "parameters": True},
}

RARELY = 20
"""With the ending ``rarely``, the norm binds in one of this many steps."""

# Ending of a policy's name → whether the norm binds in a step, so that clipping changes gradients.
CLIPPED: dict[str, Callable[[int], bool]] = {
    "never": lambda step: False,
    "rarely": lambda step: step % RARELY == RARELY - 1,
    "always": lambda step: True,
}


def measure(
    layers: Annotated[int, typer.Option(help="Transformer blocks, each sharded by itself.")] = 24,
    width: Annotated[int, typer.Option(help="Of the model.")] = 2048,
    sequences: Annotated[int, typer.Option(help="In the batch of one device.")] = 12,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 2048,
    device_mib: Annotated[int, typer.Option(help="OffloadPolicy.device_bytes of the limited policies, in MiB.")] = 2048,
    bucket_mib: Annotated[int, typer.Option(help="OffloadPolicy.bucket_bytes, in MiB.")] = 128,
    iterations: Annotated[int, typer.Option(help="Timed together in one round.")] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds over all policies; medians are printed.")] = 3,
    only: Annotated[str, typer.Option(help="Only these policies, separated by commas; plain is always there.")] = "",
    host_fraction: Annotated[float, typer.Option(help="OffloadPolicy.host_fraction of all policies.")] = 0.0,
    clip: Annotated[bool, typer.Option(help="Clip by the global norm, where the policy allows it.")] = True,
    traces: Annotated[Path | None, typer.Option(help="Folder for a trace and a picture of each policy.")] = None,
    cpu_offload_policy: Annotated[
        bool, typer.Option(help="Measure fully_shard(offload_policy=CPUOffloadPolicy()) as well: torch's own.")
    ] = False,
) -> None:
    """Measure the iteration time and memory of each policy, interleaved in one run."""
    common = {"bucket_bytes": bucket_mib * _MIB, "host_fraction": host_fraction}
    policies = chosen_policies(only, common, device_mib * _MIB)
    if traces is not None:
        check_matplotlib()
        traces.mkdir(parents=True, exist_ok=True)
    with _process_group() as device:
        bench = Bench(device, layers, width, sequences, length, clip=clip)
        parts = bench.parts() | _copy_times(device, bench.state_bytes)  # all ranks take part
        is_first_rank = dist.get_rank() == 0
        if is_first_rank:
            print_record(
                "train-parts",
                world_size=dist.get_world_size(),
                params=bench.params,
                tokens=sequences * length,
                state_bytes=bench.state_bytes,
                **parts,
            )
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in policies}
        for number in range(rounds):
            is_last = number == rounds - 1
            for name, policy in policies.items():
                trace = trace_path(traces, name) if traces is not None and is_last else None
                clipped = CLIPPED.get(name.rpartition("_")[2])
                found[name].append(bench.measure(policy, iterations, trace, clipped))
                if is_first_rank and is_last:  # print now, so that an interrupted run keeps its figures
                    _print(name, found[name], found[f"plain{_ending_of(name)}"], bench.state_bytes)
        if is_first_rank and traces is not None:
            draw_all(traces, list(policies))
        if cpu_offload_policy:
            del bench  # with its model
            _measure_cpu_offload_policy(device, (layers, width, sequences, length), iterations)


def _measure_cpu_offload_policy(device: torch.device, sizes: tuple[int, int, int, int], iterations: int) -> None:
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
    bench = Bench(device, *sizes, clip=False, offload_policy=CPUOffloadPolicy())
    result = bench.measure_unsettled(iterations)
    if dist.get_rank() == 0:
        print_record("train", policy="cpu_offload_policy", **result)


def chosen_policies(only: str, common: Mapping[str, Any], limit_bytes: int) -> dict[str, OffloadPolicy | None]:
    """Return the policies that ``--only`` names, or all; limited ones get ``limit_bytes`` as ``device_bytes``."""
    wanted = only.split(",") if only else list(POLICIES)
    wanted += [f"plain{_ending_of(name)}" for name in wanted]
    endings = ["", *(f"_{ending}" for ending in CLIPPED)]
    known = {f"{name}{ending}": fields for name, fields in POLICIES.items() for ending in endings}
    unknown = sorted(set(wanted) - known.keys())
    if unknown:
        raise typer.BadParameter(
            f"--only: there are {', '.join(POLICIES)}, each also with {', '.join(endings[1:])}; got "
            f"{', '.join(unknown)}"
        )
    limits = {name: {"device_bytes": limit_bytes} if "_limited" in name else {} for name in known}
    return {
        name: None if fields is None else OffloadPolicy(**{**common, **limits[name], **fields})
        for name, fields in known.items()
        if name in wanted
    }


def _ending_of(name: str) -> str:
    """Return a policy name's ending in CLIPPED, with its underscore; empty if the name has none."""
    ending = name.rpartition("_")[2]
    return f"_{ending}" if ending in CLIPPED else ""


def _copy_times(device: torch.device, state_bytes: int) -> dict[str, float]:
    link = Link(device)
    load = median([link.gb_per_s(64, load=True) for _ in range(3)])
    store = median([link.gb_per_s(64, store=True) for _ in range(3)])
    both = median([link.gb_per_s(64, load=True, store=True) for _ in range(3)])
    megabytes = state_bytes / 1e6
    return {"load_ms": megabytes / load, "store_ms": megabytes / store, "two_way_ms": 2 * megabytes / both}


def _print(name: str, found: list[dict[str, Any]], plain: list[dict[str, Any]], state_bytes: int) -> None:
    ms, plain_ms = (median([one["ms"] for one in some]) for some in (found, plain))
    memory = {key: [median([one[key] for one in some]) for some in (found, plain)] for key in _MEMORY}
    settled = found[-1]
    print_record(
        "train",
        policy=name,
        ms=ms,
        over_plain_ms=ms - plain_ms,
        loss=found[0]["loss"],
        same_loss_as_plain=found[0]["loss"] == plain[0]["loss"],
        resident_state_bytes=settled["resident_state_bytes"],
        host_updated_bytes=settled["host_updated_bytes"],
        host_update_ms=settled["host_update_ms"],
        host_waited_ms=settled["host_waited_ms"],
        ring_bytes=settled["ring_bytes"],
        chosen=list(settled["tuning"]),
        **{f"{key}_bytes": here for key, (here, _) in memory.items()},
        **{f"{key}_saved_share_of_state": (there - here) / state_bytes for key, (here, there) in memory.items()},
    )


# Pictures -----------------------------------------------------------------------------------------------------------


def trace_path(folder: Path, policy_name: str) -> Path:
    """Return the path of a policy's Chrome trace."""
    return folder / f"{re.sub(r'[^a-zA-Z0-9_.-]+', '-', policy_name)}.trace.json.gz"


def draw_all(folder: Path, policy_names: list[str]) -> None:
    """Draw each policy's trace, and all of them in one picture; print how long each lane was busy."""
    timelines: dict[str, Timeline] = {}
    for name in policy_names:
        trace = trace_path(folder, name)
        timeline = timelines[name] = timeline_of(read_trace(trace))
        picture = trace.with_name(trace.name.removesuffix(".trace.json.gz") + ".png")
        draw({name: timeline}, picture)
        print_record(
            "train-trace",
            policy=name,
            trace=str(trace),
            trace_bytes=trace.stat().st_size,
            picture=str(picture),
            ms=timeline.ms,
            **{f"{lane.name.lower()}_busy_ms": timeline.busy_ms(lane) for lane in Lane},
        )
    draw(timelines, folder / "all-policies.png")


@contextmanager
def _process_group() -> Iterator[torch.device]:
    if "RANK" in os.environ:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    device = bench_device()
    if not dist.is_initialized():
        torch.accelerator.set_device_index(device.index)
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield device
    finally:
        dist.destroy_process_group()


class Bench:
    """One model, whose training continues from policy to policy."""

    def __init__(
        self,
        device: torch.device,
        layers: int,
        width: int,
        sequences: int,
        length: int,
        *,
        clip: bool,
        vocabulary: int = 32_768,
        offload_policy: FSDPOffloadPolicy | None = None,
    ) -> None:
        torch.manual_seed(0)
        self._device = device
        self._clip = clip
        self._clipped, self._steps = CLIPPED["never"], 0
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        with device:
            model = GPT(layers, width, vocabulary)
            generator = torch.Generator(device).manual_seed(dist.get_rank())
            self._tokens = torch.randint(0, vocabulary, (sequences, length + 1), generator=generator)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload_policy or FSDPOffloadPolicy())
        self._model: nn.Module = model
        self._params = list(model.parameters())  # shards; while the root is gathered, its parameters are others
        self._start = [local_shard(param).detach().to("cpu", copy=True) for param in self._params]
        self.params = sum(param.numel() for param in self._params)
        self.state_bytes = sum(8 * local_shard(param).numel() for param in self._params)

    def parts(self) -> dict[str, float]:
        """Measure forward, backward and update alone."""
        optimizer = torch.optim.AdamW(self._params, lr=1e-5, fused=True)
        self.iterate(optimizer, 2)
        device = self._device
        loss = self._model(self._tokens)

        def forward_and_backward() -> None:
            self._model(self._tokens).backward()

        loss.backward()
        both = median(wall_ms(forward_and_backward, device, repeats=5))
        with torch.no_grad():
            forward = median(wall_ms(lambda: self._model(self._tokens), device, repeats=5))
        self._reshard()
        update = median(wall_ms(optimizer.step, device, repeats=5))
        clip = median(wall_ms(lambda: self._clip_gradients(optimizer), device, repeats=5)) if self._clip else 0.0
        return {"forward_ms": forward, "backward_ms": both - forward, "update_ms": update, "clip_ms": clip}

    def _clip_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        # A norm of 1e9 never binds: clipping does all of its work, and changes no bit. 1e-3 is meant to bind.
        clip_grad_norm_(optimizer, 1e-3 if self._clipped(self._steps) else 1e9)

    def measure(
        self,
        policy: OffloadPolicy | None,
        iterations: int,
        trace: Path | None,
        clipped: Callable[[int], bool] | None = None,
    ) -> dict[str, Any]:
        """Measure the milliseconds of a settled iteration, and bytes by place; write a trace afterwards, if asked."""
        with self.settled(policy, clipped) as (optimizer, clip):
            torch.accelerator.reset_peak_memory_stats(self._device)
            dist.barrier()
            result = {
                "ms": self._settled_ms(optimizer, iterations, clip=clip),
                "peak": torch.accelerator.max_memory_allocated(self._device),
                "reserved": torch.accelerator.max_memory_reserved(self._device),
                "loss": self._model(self._tokens).item(),
                **self._state_places(optimizer, policy),
            }
            self._reshard()
            if trace is not None:
                self.trace(optimizer, trace, clip=clip)
        return result

    def measure_unsettled(self, iterations: int) -> dict[str, Any]:
        """Measure a plain iteration's milliseconds and device bytes after two others: settling would take too long."""
        optimizer = torch.optim.AdamW(self._params, lr=1e-5, fused=True)
        self.iterate(optimizer, 2)
        return {
            "ms": self._settled_ms(optimizer, iterations, clip=False),
            "peak_bytes": torch.accelerator.max_memory_allocated(self._device),
            "reserved_bytes": torch.accelerator.max_memory_reserved(self._device),
        }

    def _settled_ms(self, optimizer: torch.optim.Optimizer, count: int, *, clip: bool) -> float:
        """Return the mean time of an iteration on the model's stream, over ``count`` of them, from step() to step().

        From an idle device to an idle device, the time would be longer: transfers that the last step leaves to the next
        forward would have no forward to hide behind.
        """
        self.iterate(optimizer, 1, clip=clip)
        compute = device_link(self._device).lanes(serial=False).compute
        begin = compute.mark(timed=True)
        self.iterate(optimizer, count, clip=clip)
        end = compute.mark(timed=True)
        end.synchronize()
        return end.elapsed_ms_since(begin) / count

    @contextmanager
    def settled(
        self, policy: OffloadPolicy | None, clipped: Callable[[int], bool] | None = None
    ) -> Iterator[tuple[torch.optim.Optimizer, bool]]:
        """Train SETTLE_ITERATIONS from the initial parameters; yield the optimizer, and whether further steps clip.

        Args:
            policy: policy; ``None`` for the plain optimizer.
            clipped: whether the norm binds in a step. If None, it never does, and updates in the backward do not clip.
        """
        self._clipped, self._steps = clipped or CLIPPED["never"], 0
        with torch.no_grad():
            for param, start in zip(self._params, self._start, strict=True):
                param.grad = None
                local_shard(param).copy_(start)
        optimizer = torch.optim.AdamW(self._params, lr=1e-5, fused=True)
        gc.collect()
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats(self._device)  # as in a fresh process
        if policy is not None:
            offload_optimizer(optimizer, model=self._model, policy=policy)
        clip = self._clip and (policy is None or not policy.updates_in_backward or clipped is not None)
        self.iterate(optimizer, SETTLE_ITERATIONS, clip=clip)
        yield optimizer, clip
        if policy is not None:
            optimizer.synchronize()  # type: ignore[attr-defined]
            _forget(optimizer)

    def _state_places(self, optimizer: torch.optim.Optimizer, policy: OffloadPolicy | None) -> dict[str, Any]:
        if policy is None:
            names = ("host_state_bytes", "ring_bytes", "host_updated_bytes", "host_update_ms", "host_waited_ms")
            return {**dict.fromkeys(names, 0), "resident_state_bytes": self.state_bytes, "tuning": ()}
        report = optimizer.offload_report()  # type: ignore[attr-defined]
        memory, step = report.memory, report.step
        return {
            "resident_state_bytes": memory.kept_state_bytes,
            "host_state_bytes": memory.host_state_bytes - memory.kept_state_bytes,
            "ring_bytes": memory.device_bytes - memory.kept_state_bytes,
            "tuning": (report.kept.reason,),
            "host_updated_bytes": step.host_updated_bytes or 0,
            "host_update_ms": step.host_update_ms or 0.0,
            "host_waited_ms": step.host_waited_ms or 0.0,
        }

    def trace(self, optimizer: torch.optim.Optimizer, path: Path, *, clip: bool) -> None:
        """Write a Chrome trace of three iterations on the first rank; the middle one is to be drawn.

        An iteration's work begins while work of the last one still runs, and ends during the next one. So a single
        iteration would seem not to overlap. During the first of the three, the profiler starts up.
        """
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        first_rank = dist.get_rank() == 0
        with torch.profiler.profile(activities=activities) if first_rank else nullcontext() as profiler:
            self.iterate(optimizer, 3, clip=clip)
        if profiler is not None:
            profiler.export_chrome_trace(str(path))

    def _reshard(self) -> None:
        """Reshard the root: after a forward without a backward it stays gathered, and would miss the next update."""
        for module in fsdp_modules(self._model):
            module.reshard()

    def iterate(self, optimizer: torch.optim.Optimizer, count: int, *, clip: bool = False) -> None:
        """Train for ``count`` more steps."""
        for _ in range(count):
            with phase("forward"):
                loss = self._model(self._tokens)
            with phase("backward"):
                loss.backward()
            del loss  # frees its graph before the next forward makes another one
            if clip:
                with phase("clip"):
                    self._clip_gradients(optimizer)
            with phase("step"):
                optimizer.step()
            optimizer.zero_grad()
            self._steps += 1


def _forget(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()  # else remove_offload would copy all state back to the device
    remove_offload(optimizer)


def main(argv: Sequence[str]) -> None:
    """Measure with the options of ``argv``."""
    run(measure, argv)
