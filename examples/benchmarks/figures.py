"""Draws an iteration of any training loop: when each lane of the device was busy, and what used the device's memory.

::

    with record_iterations(model, optimizer, folder):
        for batch in batches:  # three are enough: the lanes of the second are drawn, and the memory of the third
            train(batch)

The loop does not change: hooks mark where forwards, backwards and steps begin, and record memory by place at each
group's turn. All else comes from the profiler.
"""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.api.attach import is_offloaded, offload_report
from fsdp_offload.fsdp.dtensor import local_shard
from fsdp_offload.fsdp.fully_shard import fsdp_modules
from fsdp_offload.fsdp.gradients import is_spent

from .memory import Moment, draw_memory
from .record import print_record, run
from .timeline import Timeline, check_matplotlib, draw, phase, read_trace, timeline_of
from .train import GPT

_SAMPLE = "fsdp_offload memory"


@dataclass(eq=False)
class Recording:
    """Result of a recording, complete when its context is left.

    Attributes:
        folder: folder with the files ``trace.json.gz`` (for ui.perfetto.dev), ``timeline.svg`` and ``memory.svg``.
        timeline: lanes of the last iteration that another one follows, or of the only one.
        moments: memory by place at each turn of the last iteration.
    """

    folder: Path
    timeline: Timeline | None = None
    moments: tuple[Moment, ...] = ()


@contextmanager
def record_iterations(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | Path) -> Iterator[Recording]:
    """Trace the training in the context, and draw the lanes of one iteration and the memory of the last one.

    The profiler costs the host some time: a trace shows what overlaps with what, not how long an iteration takes.

    Args:
        model: model whose forward begins an iteration, or a micro-batch of it.
        optimizer: optimizer whose ``step()`` ends the iteration.
        folder: folder for the files; created if necessary.

    Raises:
        SystemExit: matplotlib is missing.
        ValueError: no iteration was trained in the context.
    """
    check_matplotlib()
    recording = Recording(Path(folder))
    recording.folder.mkdir(parents=True, exist_ok=True)
    recorder = _IterationRecorder(model, optimizer)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler, recorder.hooked():
        yield recording
    path = recording.folder / "trace.json.gz"
    profiler.export_chrome_trace(str(path))
    trace = read_trace(path)
    recording.timeline = timeline_of(trace)
    samples = recorder.placed()
    _add_counters(trace, samples)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(trace, file)
    draw({"iteration": recording.timeline}, recording.folder / "timeline.svg")
    recording.moments = tuple(_one_iteration(samples))
    draw_memory(recording.moments, recording.folder / "memory.svg")


@dataclass(eq=False)
class _IterationRecorder:
    """Hooks of one model and one optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    _phase: ExitStack = field(default_factory=ExitStack)
    _forwards: int = 0  # since the last step
    _samples: list[Moment] = field(default_factory=list)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Install the hooks in the context."""
        groups = {*fsdp_modules(self.model), self.model}
        names = {name or "model": module for name, module in self.model.named_modules() if module in groups}
        with ExitStack() as hooks:
            hooks.callback(self._phase.close)
            before = self.model.register_forward_pre_hook(self._forward_begins, prepend=True)
            after = self.model.register_forward_hook(self._forward_ends)
            step = self.optimizer.register_step_pre_hook(lambda *_: self._enter("step"))
            done = self.optimizer.register_step_post_hook(lambda *_: self._step_ends())
            handles: list[Any] = [before, after, step, done]
            for name, group in names.items():
                handles.append(group.register_forward_hook(partial(self._watch, name)))
            for handle in handles:
                hooks.callback(handle.remove)
            yield

    def _enter(self, name: str) -> None:
        self._phase.close()
        self._phase.enter_context(phase(name))

    def _forward_begins(self, *_: object) -> None:
        self._forwards += 1
        self._enter("forward" if self._forwards == 1 else f"forward_{self._forwards}")
        self._sample("forward")

    def _forward_ends(self, *_: object) -> None:
        self._enter("backward")

    def _step_ends(self) -> None:
        self._sample("step")
        self._phase.close()
        self._forwards = 0

    def _watch(self, name: str, module: nn.Module, args: object, output: object) -> None:
        self._sample(f"{name} forward")
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if tensors:
            tensors[0].register_hook(lambda grad: self._sample(f"{name} backward"))

    def _sample(self, name: str) -> None:
        with torch.profiler.record_function(f"{_SAMPLE} {len(self._samples)}"):
            # While the model is gathered, its parameters are others: the optimizer's are the shards.
            params: list[Tensor] = [param for group in self.optimizer.param_groups for param in group["params"]]
            grads = [param.grad for param in params if param.grad is not None and not is_spent(param)]
            places = {
                "parameters": sum(_nbytes(local_shard(param)) for param in params),
                "gradients": sum(_nbytes(local_shard(grad)) for grad in grads),
            }
            device = params[0].device
            allocated = 0 if device.type == "cpu" else torch.accelerator.memory_allocated(device)
            self._samples.append(Moment(name, places, allocated))

    def placed(self) -> list[Moment]:
        """Return the samples with figures that are known only at the end: state kept on the device, and staging."""
        if is_offloaded(self.optimizer):
            memory = offload_report(self.optimizer).memory
            passing_bytes = memory.device_bytes - memory.kept_state_bytes
            state = {"optimizer state": memory.kept_state_bytes, "staging": passing_bytes}
        else:
            values = [value for one in self.optimizer.state.values() for value in one.values()]
            state = {"optimizer state": sum(_nbytes(local_shard(one)) for one in values if isinstance(one, Tensor))}
        return [Moment(one.name, {**one.places, **state}, one.allocated_bytes) for one in self._samples]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _add_counters(trace: Mapping[str, Any], samples: list[Moment]) -> None:
    """Add the samples to the trace as counters, at the host's time of each sample."""
    events: list[dict[str, Any]] = trace["traceEvents"]
    times = {event["name"]: (event["ts"], event["pid"]) for event in events if event["name"].startswith(_SAMPLE)}
    for number, one in enumerate(samples):
        if (at := times.get(f"{_SAMPLE} {number}")) is not None:
            megabytes = {name: nbytes / 1e6 for name, nbytes in one.by_place().items()}
            events.append({"name": "memory by place, MB", "ph": "C", "ts": at[0], "pid": at[1], "args": megabytes})


def _one_iteration(samples: list[Moment]) -> Iterator[Moment]:
    """Yield the samples of the iteration that :func:`timeline_of` takes, from its first forward to its step."""
    ends = [number for number, one in enumerate(samples) if one.name == "step"]
    if not ends:
        raise ValueError("no iteration was trained while recording: no step() of this optimizer was called")
    begin, end = [-1, *ends][-3:-1] if len(ends) > 1 else (-1, ends[0])
    yield from samples[begin + 1 : end + 1]


def measure(
    folder: Annotated[Path, typer.Argument(help="For the pictures and the trace.")],
    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = 12,
    width: Annotated[int, typer.Option(help="Of the model, a multiple of 128.")] = 1024,
    length: Annotated[int, typer.Option(help="Tokens of the one sequence.")] = 2048,
    bucket_mib: Annotated[int, typer.Option(help="OffloadPolicy.bucket_bytes, in MiB.")] = 64,
) -> None:
    """Draw an iteration of a GPT on one device, which may be the CPU, under the default policy."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = GPT(layers, width, 32_768).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    offload_optimizer(optimizer, policy=OffloadPolicy(bucket_bytes=bucket_mib << 20))
    tokens = torch.randint(32_768, (1, length + 1), device=device)
    with record_iterations(model, optimizer, folder) as recording:
        for _ in range(3):
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert recording.timeline is not None
    print_record("figures", folder=str(folder), profiled_ms=recording.timeline.ms)


def main(argv: Sequence[str]) -> None:
    """Draw with the options of ``argv``."""
    run(measure, argv)
