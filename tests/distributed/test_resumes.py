"""A resume in fresh processes has the bits of the run that was not interrupted, whichever class and way to save.

torch's own load rounds state to the dtype of its parameter; what is compared is the plain run that nobody interrupts.
"""

import fnmatch
import functools
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as torchs_get
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict as torchs_set
from torch.distributed.fsdp import fully_shard

from fsdp_offload import OffloadPolicy
from fsdp_offload.checkpoint import get_optimizer_state_dict, load, set_optimizer_state_dict
from fsdp_offload.optimizers import capabilities_of
from tests.distributed.launch import mesh, run_cases, spawn, this_device
from tests.parity import attach, leaves, local
from tests.tiers import some_cases
from tests.zoo import local as own
from tests.zoo.libraries import INSTALLED, find
from tests.zoo.libraries import load as load_class
from tests.zoo.recipes import Recipe, build
from tests.zoo.training import different, flat

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    """A matrix that is quantized also in halves, rows that do not divide, an empty shard, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.norm = nn.Linear(12, 128), nn.Linear(128, 128), nn.LayerNorm(128)
        self.branch, self.head, self.gain = nn.Linear(12, 5), nn.Linear(128, 5), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, *, branch: bool) -> Tensor:
        found = self.head(self.norm(torch.tanh(self.middle(torch.tanh(self.first(x)))))) * self.gain
        return found + self.branch(x) if branch else found


# Classes --------------------------------------------------------------------------------------------------------------

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DTENSORS = ("Adafactor", "LBFGS", "Rprop")
"""Their own steps fail on DTensors."""
CLOSURES = ("Closure", "LBFGS")
NOT_HERE = {
    "torch.optim.sparse_adam:SparseAdam": "is refused",
    "torchao.optim.adam:_AdamBase": "is abstract",
    "torchao.optim.cpu_offload:CPUOffloadOptimizer": "wants a GPU",
}


@dataclass
class Run:
    """A model and its optimizer, which is offloaded if there is a policy."""

    name: str
    dtype: str
    steps: int = 0

    def __post_init__(self) -> None:
        cls, drawn = load_class(self.name), random.Random(zlib.crc32(f"{self.name} {self.dtype}".encode()))
        quantizes = self.dtype == "bf16" and cls.__name__.endswith(("bit", "Fp8"))  # there its lerp fails on DTensors
        self.is_sharded = not (cls.__name__.endswith(DTENSORS) or quantizes)
        parameters = self.is_sharded and drawn.random() < 0.3 and not capabilities_of(cls).moves_whole
        self.policy = OffloadPolicy(bucket_bytes=2048, parameters=parameters)
        self.before, self.attach_after = drawn.choice([2, 3, 4]), drawn.choice([0, 0, 1])
        self.takes_closure = cls.__name__.endswith(CLOSURES)
        torch.manual_seed(0)
        self.model = Net().to(this_device(), DTYPES[self.dtype])
        if self.is_sharded:
            options = {"mesh": mesh(dist.get_world_size())}
            fully_shard(self.model.middle, **options)
            fully_shard(self.model, **options)
        recipe = Recipe("matrices" if cls.__name__ == "Muon" else "all", "step()")
        self.optimizer = build(cls, recipe, self.model, 1 if cls.__name__ == "LBFGS" else drawn.choice([1, 2]))
        for group in self.optimizer.param_groups:
            group |= {"max_iter": 3, "max_eval": 4} if "max_iter" in group else {}
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # type: ignore[attr-defined]

    def offload(self) -> None:
        attach(self.optimizer, policy=self.policy, model=self.model if self.is_sharded else None)

    def train(self, until: int) -> None:
        """Step up to this number; in every third step the branch gets no gradient."""
        while self.steps < until:
            data = torch.Generator().manual_seed(10 * self.steps + (dist.get_rank() if self.is_sharded else 0))
            x, y = (torch.randn(4, size, generator=data).to(this_device(), DTYPES[self.dtype]) for size in (12, 5))

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                self.optimizer.zero_grad()
                with torch.enable_grad():
                    loss = nn.functional.mse_loss(self.model(x, branch=self.steps % 3 != 2), y)
                    loss.backward()
                return loss

            torch.manual_seed(self.steps)
            if not self.takes_closure:
                closure()
            self.optimizer.step(closure if self.takes_closure else None)  # type: ignore[arg-type]
            self.steps += 1

    def everything(self) -> dict[str, Any]:
        """Bits of parameters, of param groups and of state, by name."""
        named = {name: param.detach() for name, param in self.model.named_parameters()}
        places = {param: name for name, param in self.model.named_parameters()}
        groups = [{name: one for name, one in g.items() if name != "params"} for g in self.optimizer.param_groups]
        parts = {"parameters": named, "groups": groups, "state": dict(self.optimizer.state)}
        found = {}
        for name, value in flat("", parts, places):
            values = leaves(value) if isinstance(value, Tensor) else [value]
            found |= {f"{name} {number}": one for number, one in enumerate(values)}
        return {name: one.detach().clone() if isinstance(one, Tensor) else one for name, one in found.items()}


# Ways to save and to load ---------------------------------------------------------------------------------------------


class Way(NamedTuple):
    save: Callable[[Run, Path], object]
    load: Callable[[Run, Path], object]


def by_torch(**options: Any) -> Way:
    """torch's functions, which make the state of a fresh optimizer by a hidden step."""

    def get(run: Run) -> dict[str, Any]:
        return {"optimizer": torchs_get(run.model, run.optimizer, options=StateDictOptions(**options))}

    def load_there(run: Run, folder: Path) -> None:
        state = get(run)
        dcp.load(state, checkpoint_id=folder)
        torchs_set(run.model, run.optimizer, state["optimizer"], options=StateDictOptions(**options))

    return Way(lambda run, folder: dcp.save(get(run), checkpoint_id=folder), load_there)


def checked(**options: Any) -> Way:
    """Those of this library."""

    def get(run: Run, **more: Any) -> dict[str, Any]:
        return {"optimizer": get_optimizer_state_dict(run.model, run.optimizer, **options, **more)}

    def load_there(run: Run, folder: Path) -> None:
        torchs_get(run.model, run.optimizer)
        state = get(run, for_load=True)
        load(state, checkpoint_id=folder)
        set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"])

    return Way(lambda run, folder: dcp.save(get(run), checkpoint_id=folder), load_there)


def in_file(get: Callable[[Run], Any], put: Callable[[Run, Any], object]) -> Way:
    """A file for each rank."""

    def path(folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        return folder / f"{dist.get_rank()}.pt"

    return Way(
        lambda run, folder: torch.save(get(run), path(folder)),
        lambda run, folder: put(run, torch.load(path(folder), weights_only=False)),
    )


def full(**options: Any) -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, **options)


WAYS = {
    "torch": by_torch(),
    "torch, flat": by_torch(flatten_optimizer_state_dict=True),
    "checked": checked(),
    "checked, flat": checked(flatten_optimizer_state_dict=True),
    "state_dict": in_file(
        lambda run: run.optimizer.state_dict(), lambda run, state: run.optimizer.load_state_dict(state)
    ),
    "copies": in_file(
        lambda run: get_optimizer_state_dict(run.model, run.optimizer, cpu_offload=True),
        lambda run, state: set_optimizer_state_dict(run.model, run.optimizer, state),
    ),
    "full": in_file(
        lambda run: torchs_get(run.model, run.optimizer, options=full()),
        lambda run, state: set_optimizer_state_dict(run.model, run.optimizer, state),
    ),
    "broadcast": in_file(
        lambda run: torchs_get(run.model, run.optimizer, options=full(cpu_offload=True)),
        lambda run, state: torchs_set(run.model, run.optimizer, state, options=full(broadcast_from_rank0=True)),
    ),
}
HIDDEN_STEP = ("torch", "torch, flat", "checked", "checked, flat", "broadcast")
WITHOUT = {
    "*:LBFGS": HIDDEN_STEP,  # which gives no closure
    "schedulefree.*": HIDDEN_STEP,  # train() leaves empty entries, which torch takes for state that has been made
    "torchao.*bit": ("full", "broadcast"),  # quantized tensors are neither broadcast nor divided
    "torchao.*Fp8": ("full", "broadcast"),
    "*:SGD": ("broadcast",),  # of no state
    "*:Assorted": ("torch, flat",),  # which takes no lists
}
"""By class: ways that do not work in plain training either, or have nothing to show."""


def ways_of(name: str) -> list[str]:
    without = {way for pattern, ways in WITHOUT.items() if fnmatch.fnmatch(name, pattern) for way in ways}
    if name.endswith(":Assorted") and torch.cuda.is_available():
        without.add("broadcast")  # torch's refuses counters on the device beside homes on the host
    return [way for way in WAYS if way not in without]


def save(name: str, dtype: str, folder: Path) -> Iterator[str]:
    """Save in all ways, go on, and leave behind what a plain run has come to, there and at the end."""
    plain, run = Run(name, dtype), Run(name, dtype)
    plain.train(plain.before)
    saved = plain.everything()
    plain.train(plain.before + 3)
    run.train(run.attach_after)
    run.offload()
    run.train(run.before)
    yield from different(saved, run.everything())
    folder = folder / f"{name} {dtype}"
    folder.mkdir(exist_ok=True)
    for way in ways_of(name):
        WAYS[way].save(run, folder / way)
    run.train(run.before + 3)
    yield from different(plain.everything(), run.everything())
    torch.save((saved, plain.everything()), folder / f"{dist.get_rank()}.pt")


def resume(name: str, dtype: str, way: str, folder: Path) -> Iterator[str]:
    """Load, and go on."""
    folder = folder / f"{name} {dtype}"
    saved, wanted = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=False)
    run = Run(name, dtype)
    run.offload()
    with torch.no_grad():
        for key, param in run.model.named_parameters():
            local(param).copy_(saved[f"['parameters'][{key!r}] 0"])
    WAYS[way].load(run, folder / way)
    yield from (f"loaded: {one}" for one in different(saved, run.everything()))
    run.steps = run.before
    run.train(run.before + 3)
    yield from different(wanted, run.everything())


def run_saves(rank: int, world_size: int, names: list[str], every: int, folder: Path) -> None:
    torch.compiler.set_stance("force_eager")
    cases = {f"{name} {dtype}": functools.partial(save, name, dtype, folder) for name in names for dtype in DTYPES}
    run_cases(cases, every)


def run_resumes(rank: int, world_size: int, names: list[str], every: int, folder: Path) -> None:
    torch.compiler.set_stance("force_eager")
    cases = [(name, dtype) for name in names for dtype in DTYPES][::every]
    run_cases(
        {
            f"{name} {dtype} {way}": functools.partial(resume, name, dtype, way, folder)
            for name, dtype in cases
            for way in ways_of(name)
        }
    )


def check(names: list[str], world_size: int, every: int, tmp_path: Path) -> None:
    spawn(run_saves, world_size, tmp_path, names, every, tmp_path)
    spawn(run_resumes, world_size, tmp_path, names, every, tmp_path)  # of which each rank is a fresh process


def test_state_of_any_kind(tmp_path: Path) -> None:
    check([f"{own.__name__}:{name}" for name in ("Wide", "Narrow", "Assorted")], 2, 1, tmp_path)


@some_cases({2: 7})  # an odd number: each dtype has its turn
def test_classes_of_torch_and_of_the_dev_extra(world_size: int, every: int, tmp_path: Path) -> None:
    names = [name for library in INSTALLED for name in find(library).classes if name not in NOT_HERE]
    check(names, world_size, every, tmp_path)
