"""Trains in forked processes that are killed at a line of ours, and recovers in others until a run has come to its end.

    python -m tests.recovering RANKS FIRST_SEED LAST_SEED

Processes are forked from this one, which has imported all and has no threads.
"""

import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch._dynamo  # not in each child: DTensor imports it, and that takes a second
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_offload
from fsdp_offload import OffloadPolicy, add_masters, clip_grad_norm_, offload_optimizer
from fsdp_offload.checkpoint import get_optimizer_state_dict
from fsdp_offload.listeners import newest_commit, recover, recoverable
from tests.parity import leaves, same_bits

OURS = str(Path(fsdp_offload.__file__).parent)
STEPS, TIMEOUT_S = 7, 120
BUCKET_BYTES = 2048


class Program(NamedTuple):
    """The parts of a run, drawn from a seed."""

    overlap: str
    parameters: bool
    masters: str
    clips: bool
    micro_batches: int
    commit_every: int
    momentum: bool
    saves: bool
    rare: bool
    where: str  # a part of the names of the files at whose lines it may be killed
    attached: bool  # before it is made recoverable

    @classmethod
    def draw(cls, rng: random.Random) -> "Program":
        overlap = rng.choice(["step", "forward", "iteration"])
        return cls(
            overlap=overlap,
            parameters=rng.random() < 0.5,
            masters=rng.choice(["", "", "fp32", "remainder"]),
            clips=rng.random() < 0.5,
            micro_batches=rng.choice([1, 1, 2]),
            commit_every=rng.choice([1, 1, 2]),
            momentum=rng.random() < 0.3,
            saves=rng.random() < 0.3,
            rare=rng.random() < 0.4,
            where=rng.choice([OURS, OURS, "/core/", "/listeners/", "/engine/"]),
            attached=rng.random() < 0.5,
        )


class Model(nn.Module):
    """Blocks with dropout and a buffer that changes; shards of odd sizes; one parameter that is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(9, 33), nn.Dropout(0.2), nn.Linear(33, 9)) for _ in range(3)
        )
        self.rare = nn.Parameter(torch.ones(1100))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, *, rarely: bool) -> Tensor:
        with torch.no_grad():
            self.seen.add_(1)
        for block in self.blocks:
            x = x + block(x)
        return x.float().square().mean() + (self.rare.float().sum() * 1e-3 if rarely else 0)


class Killed:
    """Kills this process at line ``at`` of ours, of those ``where``, in any of its threads; counts the lines."""

    def __init__(self, at: int, where: str) -> None:
        self.at, self.where, self.lines = at, where, 0

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line" and self.where in frame.f_code.co_filename:
            self.lines += 1
            if self.lines == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._trace

    def __enter__(self) -> "Killed":
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def made(program: Program, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    """Make the model, and the optimizer without offload."""
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16 if program.masters else torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    params = list(model.parameters())
    optimizer: Any = (
        torch.optim.SGD(params, lr=0.1, momentum=0.9) if program.momentum else torch.optim.AdamW(params, lr=0.02)
    )
    if program.masters:
        add_masters(optimizer, program.masters)  # type: ignore[arg-type]
    return model, optimizer


def train(
    program: Program, rank: int, world: int, folder: Path | None, at: int, told: Callable[..., None]
) -> list[Tensor]:
    """Train to the end, from a commit if there is one; kill at line ``at``. Returns what the run has in the end."""
    torch.manual_seed(rank)
    mesh, group = init_device_mesh("cpu", (world,)), dist.new_group(backend="gloo")  # for the writer's thread
    model, optimizer = made(program, mesh)
    params = list(model.parameters())
    policy = OffloadPolicy(
        overlap=program.overlap,  # type: ignore[arg-type]
        parameters=program.parameters,
        bucket_bytes=BUCKET_BYTES,
        device_bytes=8 * BUCKET_BYTES,
    )
    if folder is None or program.attached:
        offload_optimizer(optimizer, model=model, policy=policy)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 5)
    torch.manual_seed(100 + rank)
    with Killed(at, program.where) as killed:
        first, run, saving = 0, None, None
        if folder is not None:
            begin = recoverable if newest_commit(folder) is None else recover
            run = begin(optimizer, folder, model=model, policy=policy)
            if begin is recover:
                first = run.extra["step"] + 1
                scheduler.load_state_dict(run.extra["scheduler"])
                torch.set_rng_state(run.extra["random"])
        for step in range(first, STEPS):
            for micro in range(program.micro_batches):
                data = torch.randn(4, 9, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))
                model(data.to(params[0].dtype), rarely=not program.rare or step % 3 == 1).backward()
            if program.clips:
                clip_grad_norm_(optimizer, 1e9 if step % 3 else 1e-2)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if run is not None and (step + 1) % program.commit_every == 0:
                run.commit({"step": step, "scheduler": scheduler.state_dict(), "random": torch.get_rng_state()})
                told(step)
            if program.saves and folder is not None and step == 3:
                state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
                path = folder.parent / f"{folder.name}-saved-{first}"
                saving = dcp.async_save(state, checkpoint_id=path, process_group=group)
        if saving is not None:
            saving.result()
    told(killed.lines)
    found = values_in(model, params, optimizer)
    if run is not None:
        dist.barrier()  # a rank that is behind may still be killed
        run.close()
    return found


def values_in(model: nn.Module, params: Sequence[Tensor], optimizer: Any) -> list[Tensor]:
    """Copy learning rates, the buffer, weights, state and counters."""
    values = [params[0].new_tensor([group["lr"] for group in optimizer.param_groups], dtype=torch.float64), model.seen]
    values += [one.to_local() for one in model.state_dict().values() if hasattr(one, "to_local")]
    for param in params:
        entry = optimizer.state.get(param, {})
        values += [leaf for name in sorted(entry) if isinstance(entry[name], Tensor) for leaf in leaves(entry[name])]
    return [one.detach().clone() for one in values]


def tell(pipe: int, number: int) -> None:
    os.write(pipe, b"%d\n" % number)


class Ended(NamedTuple):
    """How one run of all ranks ended."""

    codes: list[int]
    told: list[list[int]]

    @property
    def is_whole(self) -> bool:
        return self.codes == [0] * len(self.codes)


def run(
    program: Program, world: int, folder: Path | None, out: Path, kills: Sequence[int], after_s: float = 0
) -> Ended:
    """Fork ``world`` ranks, of which each is killed at a line of its own (0: at none), or all ``after_s`` seconds.

    A rank that is left alone when another has been killed waits for it; it is killed as well, as a launcher does.
    """
    pipes = [os.pipe() for _ in range(world)]
    rendezvous = out / f"rendezvous-{time.monotonic_ns()}"
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                sys.stderr = open(out / f"stderr-{rank}", "a")  # noqa: SIM115
                dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
                found = train(program, rank, world, folder, kills[rank], partial(tell, pipes[rank][1]))
                torch.save(found, out / f"values-{rank}")
                dist.barrier()
                code = 0
            except BaseException:  # noqa: BLE001  # nothing of the test may run on in the child
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        pids.append(pid)
    codes: dict[int, int] = {}
    begin = time.monotonic()
    give_up = begin + (after_s or TIMEOUT_S)
    while len(codes) < world:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid]:
                give_up = min(give_up, time.monotonic() + 1)
        elif time.monotonic() > give_up:
            for one in set(pids) - codes.keys():
                os.kill(one, signal.SIGKILL)
            give_up = float("inf")
        else:
            time.sleep(0.002)
    told = []
    for read, write in pipes:
        os.close(write)
        with os.fdopen(read) as lines:
            told.append([int(line) for line in lines])
    return Ended([codes[pid] for pid in pids], told)


def values_of(out: Path, world: int) -> list[list[Tensor]]:
    return [torch.load(out / f"values-{rank}") for rank in range(world)]


def check(seed: int, world: int, shared: Path, out: Path) -> str:
    """Kill a random program once or twice, recover, and compare with the same one in peace."""
    rng = random.Random(f"{seed} {world}")
    program = Program.draw(rng)
    peace = run(program, world, None, out, [0] * world)
    assert peace.is_whole, (program, peace, (out / "stderr-0").read_text()[-1500:])
    wanted = values_of(out, world)
    counted = run(program, world, shared / "counted", out, [0] * world)
    assert counted.is_whole, (program, counted, (out / "stderr-0").read_text()[-1500:])
    assert not list((shared / "counted").iterdir())
    assert_same(values_of(out, world), wanted, f"{program}: not killed")
    folder, tries = shared / "killed", [0, 0]
    for _ in range(rng.choice([1, 1, 2])):
        lines = [told[-1] for told in counted.told]
        kills = [rng.randrange(rng.choice([1, count // 3]), count) for count in lines]  # attaching runs many lines
        if world > 1 and rng.random() < 0.3:  # one alone
            kills = [at if rank == 0 else 0 for rank, at in enumerate(kills)]
        before = newest_commit(folder) or 0
        ended = run(program, world, folder, out, kills, rng.choice([0, 0, 0.2]))
        if ended.is_whole:
            break
        newest = newest_commit(folder) or 0
        tries = [newest, before]
        made = min(len([step for step in one if step < STEPS]) for one in ended.told)
        has_ended = max(max(one, default=0) for one in ended.told) >= STEPS  # and has begun to delete
        assert has_ended or newest >= before + made - 1, (
            f"{program}: {ended} has lost a commit: {newest} of {before} + {made}"
        )
    else:
        ended = run(program, world, folder, out, [0] * world)
    assert ended.is_whole, (
        program,
        tries,
        ended,
        *((out / f"stderr-{rank}").read_text()[-3000:] for rank in range(world)),
    )
    assert_same(values_of(out, world), wanted, f"{program}: recovered from {tries}")
    return f"{tries}"


def assert_same(one: list[list[Tensor]], other: list[list[Tensor]], what: str) -> None:
    for rank, (mine, its) in enumerate(zip(one, other, strict=True)):
        assert len(mine) == len(its), what
        wrong = [at for at, (a, b) in enumerate(zip(mine, its, strict=True)) if not same_bits(a, b)]
        assert not wrong, f"{what}: rank {rank}, values {wrong} of {len(mine)}"


def main(world: int, first: int, last: int) -> int:
    """Check the programs of these seeds; returns how many have gone wrong."""
    warnings.filterwarnings("ignore")
    wrong = 0
    for seed in range(first, last):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as shared, tempfile.TemporaryDirectory() as out:
            try:
                said = check(seed, world, Path(shared), Path(out))
            except AssertionError as error:
                wrong += 1
                said = f"WRONG: {str(error)[:3000]}"
            sys.stdout.write(f"{seed}: {said}\n")
            sys.stdout.flush()
    return wrong


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
