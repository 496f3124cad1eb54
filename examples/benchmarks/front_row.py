"""Trains one rank of one row of :mod:`.front`, with one policy or plainly, in a process of its own.

:mod:`.front` calls ``python -m examples.benchmarks.front_row FILE``. This reads a :class:`Row` from the file and writes
figures to the same folder. With a policy, it imports ``fsdp_offload`` before CUDA starts, as users do. Plain training
imports it only afterwards: for masters, and for the link when all other figures are measured.
"""

import gc
import hashlib
import itertools
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from .models import build
from .record import median
from .timeline import read_trace

_COUNTED = ("hooks", "step", "updates", "class_step", "class_step_beside", "zero_grad")
QUEUES = "CUDA_DEVICE_MAX_COPY_CONNECTIONS"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Settings of the training of one row.

    Attributes:
        name: text of the row in ``--policies``.
        policy: fields of ``OffloadPolicy``; ``None``: plain training.
        listener: ``"commits"``: commit each step to memory; ``"deltas"``: record weight deltas; or ``""``.
        model, tokens, recomputed, dtype: see :func:`.models.build`.
        masters: kind of ``add_masters``, or ``"none"``.
        lr: learning rate.
        batch: sequences in a micro-batch of one rank.
        accumulate: micro-batches in an iteration.
        warm, iterations: number of iterations before the timed ones, and of timed ones.
        host: also measure our time on the host, in ``iterations`` more iterations.
        link: measure the link afterwards.
        trace: folder for a trace of three more iterations, or ``""``.
        ranks: number of ranks.
    """

    name: str
    policy: dict[str, Any] | None
    listener: str
    model: str
    tokens: int
    recomputed: int | None
    dtype: str
    masters: str
    lr: float
    batch: int
    accumulate: int
    warm: int
    iterations: int
    host: bool
    link: bool
    trace: str
    ranks: int


class Loop:
    """Training of one row."""

    def __init__(self, row: Row, device: torch.device, folder: Path) -> None:
        self.row, self.device, self.rank = row, device, dist.get_rank()
        mesh = init_device_mesh(device.type, (row.ranks,))
        dtype = torch.bfloat16 if row.dtype == "bf16" else torch.float32
        trained = build(row.model, mesh, dtype=dtype, tokens=row.tokens, recomputed=row.recomputed)
        self.model, self._loss, self._vocabulary = trained
        self.params = sum(param.numel() for param in self.model.parameters())
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=row.lr, fused=True)
        if row.masters != "none":
            from fsdp_offload import add_masters

            self.optimizer = add_masters(self.optimizer, row.masters)
        self.attach_s = 0.0
        self.deltas: Any = None
        self.behind_step: Callable[[], object] = lambda: None
        if row.policy is not None:
            from fsdp_offload import OffloadPolicy, offload_optimizer

            begin = time.perf_counter()
            offload_optimizer(self.optimizer, model=self.model, policy=OffloadPolicy(**row.policy))
            if row.listener:
                self._listen(folder)
            self.attach_s = time.perf_counter() - begin
        self._random = torch.Generator(device).manual_seed(100 + self.rank)
        self.losses: list[Tensor] = []
        self.marks: list[list[Any]] = []  # by iteration: its begin, then the end of each forward and each backward
        self.step: Callable[[], object] = self.optimizer.step
        self.zero_grad: Callable[[], object] = self.optimizer.zero_grad

    def _listen(self, folder: Path) -> None:
        from fsdp_offload.listeners import recoverable, weight_deltas

        if self.row.listener == "commits":
            self.behind_step = recoverable(self.optimizer, folder / "homes").commit
        else:
            self.deltas = weight_deltas(self.optimizer)

    def mark(self) -> Any:
        """Record an event on the current stream; on the CPU, return the time."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def iterate(self, count: int) -> None:
        for _ in range(count):
            marks = [self.mark()]
            for _ in range(self.row.accumulate):
                shape = (self.row.batch, self.row.tokens)
                tokens = torch.randint(self._vocabulary, shape, device=self.device, generator=self._random)
                loss = self._loss(tokens)
                marks.append(self.mark())
                loss.backward()
                marks.append(self.mark())
                self.losses.append(loss.detach())
                del loss  # frees its graph before the next forward makes another one
            self.marks.append(marks)
            self.step()
            self.behind_step()
            self.zero_grad()

    def measure(self) -> dict[str, Any]:
        """Train; return times and bytes, and, to compare with plain training, losses and a checksum of parameters."""
        row, on_cpu = self.row, self.device.type == "cpu"
        self.iterate(row.warm)
        if not on_cpu:
            torch.accelerator.reset_peak_memory_stats(self.device)
        self.marks.clear()
        wall, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
        self.iterate(row.iterations)
        # Read the clocks before waiting for the device, which takes CPU time as well.
        host_s = (time.perf_counter() - wall, time.process_time() - process, time.thread_time() - thread)
        self.marks.append([self.mark()])
        self.synchronize()
        names = ("issue_ms", "process_cpu_ms", "main_cpu_ms")
        found = {name: 1e3 * seconds / row.iterations for name, seconds in zip(names, host_s, strict=True)}
        found |= self._times()
        if not on_cpu:
            found["peak_bytes"] = torch.accelerator.max_memory_allocated(self.device)
            found["reserved_bytes"] = torch.accelerator.max_memory_reserved(self.device)
        if row.policy is not None:
            found["report"] = self.optimizer.offload_report().metrics()
            found["notes"] = list(self.optimizer.offload_report().notes)
        found |= {"params": self.params, "attach_s": self.attach_s, "parameters": self._digest()}
        found["losses"] = [loss.item().hex() for loss in self.losses]
        if row.host:
            with HostTimes(self).watched() as times:
                self.iterate(row.iterations)
            self.synchronize()
            found["ours"] = times.per_iteration(row.iterations, offloaded=row.policy is not None)
        if self.deltas is not None:
            found |= self._take_deltas()
        return found | (self._traced(Path(row.trace)) if row.trace else {})

    def _take_deltas(self) -> dict[str, Any]:
        """Return how many weights one step changes, their bytes, and how long it takes to hand them out."""
        for _ in self.deltas:  # take, and drop, the changes of all steps until now
            pass
        self.iterate(1)
        self.synchronize()
        begin, changed, nbytes = time.perf_counter(), 0, 0
        for delta in self.deltas:
            changed += len(delta.values)
            nbytes += delta.values.nbytes + delta.indices.nbytes
        return {"changed": changed, "delta_bytes": nbytes, "take_s": time.perf_counter() - begin}

    def _traced(self, folder: Path) -> dict[str, Any]:
        """Trace the device; return the compute stream's mean idle time per iteration, and its longest idle time."""
        activity = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activity.CPU if self.device.type == "cpu" else activity.CUDA]) as prof:
            self.iterate(3)
            self.synchronize()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.row.name.replace(':', '-')}-{self.rank}.json.gz"
        prof.export_chrome_trace(str(path))
        streams: defaultdict[int, list[Any]] = defaultdict(list)
        for event in read_trace(path)["traceEvents"]:
            if event.get("cat") == "kernel":
                streams[event["args"]["stream"]].append((event["ts"], event["ts"] + event["dur"]))
        spans = sorted(max(streams.values(), key=len, default=[]))
        idle_ms = [max(0.0, later[0] - one[1]) / 1e3 for one, later in itertools.pairwise(spans)]
        return {"idle_ms": sum(idle_ms) / 3, "longest_idle_ms": max(idle_ms)} if idle_ms else {}

    def synchronize(self) -> None:
        if self.row.policy is not None:
            self.optimizer.synchronize()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _times(self) -> dict[str, Any]:
        def ms(begin: Any, end: Any) -> float:
            return float(1e3 * (end - begin) if self.device.type == "cpu" else begin.elapsed_time(end))

        parts: defaultdict[str, list[float]] = defaultdict(list)
        for marks, after in itertools.pairwise(self.marks):
            parts["all_ms"].append(ms(marks[0], after[0]))
            spans = [ms(*pair) for pair in itertools.pairwise(marks)]
            parts["forward_ms"].append(sum(spans[::2]))
            parts["backward_ms"].append(sum(spans[1::2]))
        medians = {name: median(parts[name]) for name in ("forward_ms", "backward_ms")}
        return {"ms": median(parts["all_ms"]), **medians, "all_ms": [round(one, 1) for one in parts["all_ms"]]}

    def _digest(self) -> str:
        """Return a checksum over this rank's parameters, of the sum of each one's bits as integers."""
        sums = []
        for value in self.model.state_dict().values():
            local = value.to_local() if hasattr(value, "to_local") else value
            bits = local.detach().view(torch.int32 if local.element_size() == 4 else torch.int16)
            sums.append(bits.sum(dtype=torch.int64).item())
        return hashlib.sha256(json.dumps(sums).encode()).hexdigest()[:16]


class HostTimes:
    """Wall time of our code in all threads, by entry point; ``step()`` of the optimizer's own class is counted apart.

    A call of ours within another one, in the same thread, is counted with the outer one. Counting takes time itself, so
    nothing else is measured meanwhile.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop, self._depth = loop, threading.local()
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)  # all threads append

    @contextmanager
    def watched(self) -> Iterator["HostTimes"]:
        """Count in the context; afterwards restore the methods that it replaces."""
        loop, undo = self._loop, []

        def exchange(owner: Any, name: str, value: Any) -> None:
            undo.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

        if loop.row.policy is not None:
            from fsdp_offload.core.loop import Core
            from fsdp_offload.engine.hooks import ModelHooks

            exchange(ModelHooks, "call", self._entered("hooks", ModelHooks.call))
            exchange(Core, "update", self._counted("updates", Core.update))
            step: Any = torch.optim.AdamW.step  # torch's wrapper; __wrapped__ is the class's step
            if hasattr(step, "__wrapped__"):
                exchange(step, "__wrapped__", self._counted("class_step", step.__wrapped__))
        exchange(loop, "step", self._entered("step", loop.step))
        exchange(loop, "zero_grad", self._entered("zero_grad", loop.zero_grad))
        try:
            yield self
        finally:
            for owner, name, value in reversed(undo):
                setattr(owner, name, value)

    def _entered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._counted(name, function)

        def enter(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._depth, "is_within", False):
                return function(*args, **kwargs)
            self._depth.is_within = True
            try:
                return timed(*args, **kwargs)
            finally:
                self._depth.is_within = False

        return enter

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                # In the thread of updates on the CPU, the class's step is not inside of any entry point of ours.
                is_within = name != "class_step" or getattr(self._depth, "is_within", False)
                self.seconds[name if is_within else "class_step_beside"].append(time.perf_counter() - begin)

        return call

    def per_iteration(self, iterations: int, *, offloaded: bool) -> dict[str, float]:
        """Return milliseconds and numbers of calls per iteration."""
        seconds = {name: list(values) for name, values in self.seconds.items()}
        ms = defaultdict(float, {name: 1e3 * sum(values) / iterations for name, values in seconds.items()})
        if not offloaded:
            return {"class_step_ms": ms["step"], "zero_grad_ms": ms["zero_grad"]}
        calls = {name: len(seconds.get(name, ())) / iterations for name in ("hooks", "updates", "class_step")}
        return {
            "ms": ms["hooks"] + ms["step"] - ms["class_step"],
            **{f"{name}_ms": ms[name] for name in _COUNTED},
            **{f"{name}_calls": count for name, count in calls.items()},
        }


def link_rates(device: torch.device) -> dict[str, float]:
    """Return the rates of this rank's copies, in 10**9 bytes per second, while all ranks copy."""
    from .link import Link

    link, found = Link(device), {}
    for name, ways in (("load", ("load",)), ("store", ("store",)), ("two_way", ("load", "store"))):
        dist.barrier()
        found[f"{name}_gb_per_s"] = median([link.gb_per_s(32, **dict.fromkeys(ways, True)) for _ in range(3)])
    return found


def main(path: Path) -> None:
    """Measure the row in the file ``path``; write ``rank-N.json`` to the same folder."""
    row = Row(**json.loads(path.read_text()))
    start_s = time.perf_counter()
    if row.policy is not None:  # import it before CUDA starts, as users do
        import fsdp_offload  # noqa: F401
    asked = os.environ.get(QUEUES, "default")
    accelerator = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    rank, on_cpu = int(os.environ["RANK"]), accelerator.type == "cpu"
    device = accelerator if on_cpu else torch.device(accelerator.type, rank)
    if not on_cpu:
        torch.accelerator.set_device_index(rank)
        torch.zeros(1, device=device)  # starts CUDA: the driver reads environment variables now
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    backends = {kind: dist.get_default_backend_for_device(kind) for kind in ("cpu", device.type)}
    backend = ",".join(f"{kind}:{name}" for kind, name in backends.items())
    store = dist.FileStore(str(path.with_name("store")), row.ranks)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=row.ranks)
    loop = Loop(row, device, path.parent)
    found = loop.measure()
    found |= {
        "device": "cpu" if on_cpu else torch.cuda.get_device_name(device),
        "copy_queues": asked,
        "threads": torch.get_num_threads(),
        "transformers": getattr(sys.modules.get("transformers"), "__version__", None),
        "row_s": time.perf_counter() - start_s,
    }
    if row.link and not on_cpu:
        del loop
        gc.collect()
        torch.accelerator.empty_cache()
        found["link"] = link_rates(device)
    path.with_name(f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()  # a rank that ended earlier would close connections that others use
    dist.destroy_process_group()


def write(row: Row, path: Path) -> None:
    """Write the file that :func:`main` reads."""
    path.write_text(json.dumps(asdict(row)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
