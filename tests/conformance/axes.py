"""The axes of the conformance suite as data: values of each, rules on what goes together, and cases for all pairs."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, NAdam, Optimizer
from torch.utils.checkpoint import checkpoint

from tests.fused_adam_reference import FusedAdam
from tests.parity import local, loss_of

# Models --------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, inner: int | None = None) -> None:
        super().__init__()
        inner = inner or 2 * width
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.weight = nn.Parameter(torch.randn(4, width, width) / 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return x + torch.einsum("...w,ewv->...v", self.norm(x), weight).tanh()


class Net(nn.Module):
    """Blocks in groups of their own, one that is used twice, experts that may go unused, and the rest in the root."""

    def __init__(self, *, rows: int = 20, small: int = 4, model: str = "usual") -> None:
        super().__init__()
        width = 16
        self.embed = nn.Embedding(rows, width)
        self.blocks = nn.ModuleList([*(Block(width) for _ in range(2)), Experts(width)])
        self.extra = Block(width)
        self.small = nn.Linear(width, small)
        self.head = nn.Linear(width, rows, bias=False)
        self.recomputes = {"checkpointed": (False,) * 3, "recomputed": (None, None, True)}.get(model, (None,) * 3)
        """Whether a checkpoint around the block is a reentrant one; ``None``: there is none."""
        for block, is_reentrant in zip(self.blocks, (True, False), strict=False) if model == "recomputed" else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=is_reentrant)  # within what is gathered
        if model == "tied":
            self.head.weight = self.embed.weight
        if model == "frozen":
            for name, param in self.named_parameters():
                param.requires_grad_("blocks.0" not in name and "embed" not in name)
        if model == "unused":
            self.blocks[1].unused = nn.Linear(3, 5)

    def forward(self, tokens: Tensor, *, extra: bool = True) -> Tensor:
        x = self.embed(tokens % self.embed.num_embeddings)
        for block, is_reentrant in zip(self.blocks, self.recomputes, strict=True):
            x = block(x) if is_reentrant is None else checkpoint(block, x, use_reentrant=is_reentrant)
        if extra:
            x = self.extra(self.extra(x))  # its gradients are reduced twice
        return self.head(x).float().logsumexp(-1).mean() + self.small(x).float().pow(2).mean()


class Coupled(Optimizer):
    """Not in the table, so that it moves as a whole: each update depends on all gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        params = [(param, group) for group in self.param_groups for param in group["params"] if param.grad is not None]
        total = sum(local(param.grad).double().square().sum().item() for param, _ in params)
        for param, group in params:
            velocity = self.state[param].setdefault("velocity", torch.zeros_like(param))
            velocity.mul_(0.9).add_(param.grad / (1 + total)).add_(param, alpha=group["weight_decay"])
            param.sub_(velocity, alpha=group["lr"])
        return loss


# Layouts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How a model is sharded, over so many ranks; ``None``: not at all."""

    shard: Callable[..., object] | None
    ranks: int = 1
    net: Mapping[str, int] | None = None
    sharing: int = 1
    """Ranks that see the same batch."""


def _mesh(sizes: Mapping[str, int], device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _groups(model: Net, device: str, *, ranks: int = 1, root_only: bool = False, **options: Any) -> None:
    options = {"mesh": _mesh({"dp": ranks}, device), **options}
    for block in () if root_only else (*model.blocks, model.extra):
        fully_shard(block, **options)
    fully_shard(model, **options)


def _root_resharded(model: Net, device: str, **options: Any) -> None:
    _groups(model, device, **options)
    model.set_reshard_after_forward(True, recurse=False)  # type: ignore[operator]


def _prefetched(model: Net, device: str, **options: Any) -> None:
    """Each gathers the next two before it runs, and the two before it behind."""
    _groups(model, device, **options)
    blocks: list[Any] = [*model.blocks, model.extra]
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, number - 2) : number][::-1])


def _columns(model: Net, device: str, *, ranks: int = 1, **options: Any) -> None:
    def place(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.dim() == 2 else None

    _groups(model, device, ranks=ranks, shard_placement_fn=place, **options)


def _replicated(model: Net, device: str, *, replicas: int, ranks: int, **options: Any) -> None:
    _groups(model, device, mesh=_mesh({"replicas": replicas, "dp": ranks}, device), **options)


def _tensor_parallel(model: Net, device: str, **options: Any) -> None:
    """``up`` is sharded twice on one dim (``_StridedShard``), ``down`` on two."""
    mesh = _mesh({"dp": 2, "tp": 2}, device)
    for block in (*model.blocks[:2], model.extra):
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    _groups(model, device, mesh=mesh["dp"], **options)


def _two_meshes(model: Net, device: str, **options: Any) -> None:
    """As torchtitan shards experts: over one mesh for each expert, and what is beside them over all ranks."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult  # torch >= 2.13

    mesh = _mesh({"edp": 2, "ep": 2}, device)
    every, experts = mesh._flatten("dp"), model.blocks[2]
    assert isinstance(experts, Experts)
    weight = distribute_tensor(experts.weight.detach(), mesh["ep"], [Shard(0)])
    experts.weight = nn.Parameter(weight)

    own, beside = FSDPMeshInfo(mesh["edp"], 0), FSDPMeshInfo(every, 0)  # one object for all that share a mesh

    def place(param: nn.Parameter) -> Any:
        if param is experts.weight:
            return ShardPlacementResult(Shard(1), own)
        return ShardPlacementResult(Shard(0), beside)

    fully_shard(experts, mesh=every, shard_placement_fn=place, **options)
    for block in (*model.blocks[:2], model.extra, model):
        fully_shard(block, mesh=every, **options)


ODD, EMPTY = {"rows": 21, "small": 3}, {"rows": 21, "small": 1}
LAYOUTS = {
    "blocks": Layout(_groups),
    "root": Layout(partial(_groups, root_only=True)),
    "gathered": Layout(partial(_groups, reshard_after_forward=False)),
    "root-resharded": Layout(_root_resharded),
    "columns": Layout(_columns),
    "unsharded": Layout(None),
    "even": Layout(partial(_groups, ranks=2), 2),
    "uneven": Layout(partial(_groups, ranks=2), 2, ODD),
    "empty": Layout(partial(_groups, ranks=2), 2, EMPTY),
    "columns-2": Layout(partial(_columns, ranks=2), 2),
    "root-2": Layout(partial(_groups, ranks=2, root_only=True), 2, ODD),
    "gathered-2": Layout(partial(_groups, ranks=2, reshard_after_forward=False), 2),
    "prefetched": Layout(partial(_prefetched, ranks=2), 2),
    "replicated": Layout(partial(_replicated, replicas=2, ranks=1), 2),
    "thirds": Layout(partial(_groups, ranks=3), 3, EMPTY),
    "by-two": Layout(partial(_groups, ranks=4, reshard_after_forward=2), 4),
    "hsdp": Layout(partial(_replicated, replicas=2, ranks=2), 4, ODD),
    "tp-fsdp": Layout(_tensor_parallel, 4, None, 2),
    **({"two-meshes": Layout(_two_meshes, 4)} if hasattr(_fsdp_common, "ShardPlacementResult") else {}),
}

# Optimizers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """An optimizer's class and arguments; ``traits``: whole, masters, host."""

    cls: Callable[..., Optimizer]
    options: Mapping[str, Any]
    traits: frozenset[str] = frozenset()

    def __call__(self, params: Any, **more: Any) -> Optimizer:
        return self.cls(params, **{"lr": 0.02, **self.options, **more})


BOTH = frozenset({"masters", "host"})
OPTIMIZERS = {
    "adamw": Made(AdamW, {}, BOTH),
    "adamw-for": Made(AdamW, {"foreach": False}, BOTH),
    "adamw-foreach": Made(AdamW, {"foreach": True}, BOTH),
    "adamw-fused": Made(AdamW, {"fused": True}, BOTH),
    "amsgrad": Made(Adam, {"amsgrad": True}, BOTH),
    "sgd-momentum": Made(SGD, {"momentum": 0.9}, BOTH),
    "no-state": Made(SGD, {}),
    "nadam": Made(NAdam, {}, frozenset({"masters"})),
    "adafactor": Made(Adafactor, {}, frozenset({"whole"})),
    "muon": Made(Muon, {"ns_steps": 1}, frozenset({"whole", "matrices"})),
    "fused-adam": Made(FusedAdam, {}, frozenset({"others"})),
    "unlisted": Made(Coupled, {}, frozenset({"whole"})),
}

# The axes ------------------------------------------------------------------------------------------------------------

AXES: dict[str, tuple[Any, ...]] = {
    "overlap": ("step", "forward", "iteration"),
    "device_bytes": ("small", "auto"),
    "parameters": (False, True),
    "model": ("usual", "tied", "frozen", "unused", "groups", "checkpointed", "recomputed"),
    "layout": ("blocks", "root", "gathered", "root-resharded", "columns", "unsharded"),
    "optimizer": tuple(OPTIMIZERS),
    "dtype": ("fp32", "bf16", "mixed"),
    "micro": (1, 3),
    "attached": ("first", "late"),
    "clip": ("never", "sometimes", "always"),
    "save": ("none", "memory", "sync", "async"),
    "phases": ("none", "between", "within"),
    "sleep": (False, True),
    "masters": ("none", "remainder", "fp32"),
    "host": (0.0, 0.5, 1.0),
    "looks": ("each", "end"),
    "serial": (False, True),
    "deltas": (False, True),
}


@dataclass(frozen=True)
class Case:
    """One value of each axis, and a program: a list of the loop's habits, one for each step."""

    overlap: str = "step"
    device_bytes: str = "small"
    parameters: bool = False
    model: str = "usual"
    layout: str = "blocks"
    optimizer: str = "adamw"
    dtype: str = "fp32"
    micro: int = 1
    attached: str = "first"
    clip: str = "never"
    save: str = "none"
    phases: str = "none"
    sleep: bool = False
    masters: str = "none"
    host: float = 0.0
    looks: str = "each"
    serial: bool = False
    deltas: bool = False
    """Whether a copy of the weights is kept up by ``weight_deltas``, and trained so slowly that few change."""
    program: tuple[str, ...] = ()

    def __str__(self) -> str:
        """What differs from the usual."""
        values = ((one.name, getattr(self, one.name), one.default) for one in fields(self))
        return " ".join(f"{name}={value}" for name, value, usual in values if value != usual) or "usual"

    @property
    def made(self) -> Made:
        made = OPTIMIZERS[self.optimizer]
        return replace(made, options={"lr": 3e-4, **made.options}) if self.deltas else made

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout].ranks


def build(case: Case, device: torch.device) -> Net:
    layout = LAYOUTS[case.layout]
    net = Net(**(layout.net or {}), model=case.model).to(device)
    if case.dtype == "bf16":
        net.bfloat16()
    if layout.shard is not None:
        options = {}
        if case.dtype == "mixed":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        layout.shard(net, device.type, **options)
    return net


# What goes together --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A condition under which a case is no legal training or not promised, and the changes that mend it."""

    when: Callable[[Case], bool]
    ways: tuple[Mapping[str, Any], ...] = ()
    habits: frozenset[str] = frozenset()

    def broken(self, case: Case) -> bool:
        return self.when(case) and (not self.habits or bool(self.habits & set(case.program)))


def rule(when: Callable[[Case], bool], *ways: Mapping[str, Any], habits: str = "") -> Rule:
    return Rule(when, ways, frozenset(habits.split()))


def legal(case: Case, axes: Mapping[str, tuple[Any, ...]], fixed: frozenset[str] = frozenset()) -> Case | None:
    """The case with as little changed, within the axes, as its rules ask for; ``None`` if only what is fixed could."""
    for _ in range(40):
        broken = next((one for one in RULES if one.broken(case)), None)
        if broken is None:
            return case
        free = [
            way
            for way in broken.ways
            if not fixed & way.keys() and all(value in axes[axis] for axis, value in way.items())
        ]
        if free:
            case = replace(case, **free[0])
        elif broken.habits and "program" not in fixed:
            case = replace(case, program=tuple("usual" if one in broken.habits else one for one in case.program))
        else:
            return None
    return None


RULES: tuple[Rule, ...] = (
    # Overlap and streamed parameters hang on fully_shard's hooks.
    rule(
        lambda case: case.layout == "unsharded" and (case.overlap != "step" or case.parameters),
        {"layout": "blocks"},
        {"overlap": "step", "parameters": False},
    ),
    # Mixed precision is fully_shard's.
    rule(lambda c: c.layout == "unsharded" and c.dtype == "mixed", {"dtype": "fp32"}),
    # Micro-batches without a reduction are fully_shard's.
    rule(lambda c: c.layout == "unsharded", habits="unreduced keep-gathered"),
    # Early updates learn the number of reductions from four steps, of new objects anew: it must not grow later.
    rule(
        lambda c: (
            c.overlap == "iteration"
            and (
                c.save in ("sync", "async")
                or bool({"reattach", "unused"} & set(c.program))
                or c.program.count("unreduced") > 3
            )
        ),
        {"overlap": "forward"},
        habits="unreduced",
    ),
    # A sleep takes what fully_shard has sharded, and streamed parameters are on the host already.
    rule(
        lambda case: case.sleep and (case.layout == "unsharded" or case.parameters),
        {"sleep": False},
        {"layout": "blocks", "parameters": False},
    ),
    # Masters are for elementwise optimizers of torch.optim.
    rule(
        lambda case: case.masters != "none" and "masters" not in case.made.traits,
        {"masters": "none"},
        {"optimizer": "adamw"},
    ),
    # Parameters in fp32 are their own masters.
    rule(lambda case: case.masters != "none" and case.dtype != "bf16", {"dtype": "bf16"}, {"masters": "none"}),
    # The CPU updates elementwise with a fused class of torch.optim.
    rule(lambda case: case.host > 0 and "host" not in case.made.traits, {"host": 0.0}, {"optimizer": "adamw"}),
    # The CPU updates masters only of its own.
    rule(lambda case: case.host > 0 and case.masters != "none", {"host": 0.0}, {"masters": "none"}),
    # What the device streams for the forward is not updated on the CPU.
    rule(lambda case: case.host > 0 and case.parameters, {"host": 0.0}, {"parameters": False}),
    # What moves as a whole leaves parameters on the device.
    rule(lambda case: case.parameters and case.optimizer == "unlisted", {"parameters": False}, {"optimizer": "adamw"}),
    # Muon's step fails on a matrix of fewer rows than ranks, in torch itself.
    rule(
        lambda case: case.optimizer == "muon" and case.layout in {"empty", "thirds"},
        {"optimizer": "adamw"},
        {"layout": "even"},
    ),
    # Adafactor's step fails on DTensor shards, in torch itself.
    rule(
        lambda case: case.optimizer == "adafactor" and case.layout != "unsharded",
        {"layout": "unsharded", "overlap": "step", "parameters": False, "sleep": False},
        {"optimizer": "adamw"},
    ),
    # Deltas need names of a model that is sharded, and optimizers that tell which weights they update.
    rule(
        lambda case: case.deltas and (case.layout == "unsharded" or case.optimizer == "unlisted" or case.host > 0),
        {"deltas": False},
        {"layout": "blocks", "optimizer": "adamw", "host": 0.0},
    ),
    # CUDA unscales no gradients in bf16.
    rule(lambda case: case.dtype == "bf16", {"dtype": "mixed", "masters": "none"}, habits="scaler"),
    # Transformer Engine's FusedAdam calls closures without gradients.
    rule(lambda c: c.optimizer == "fused-adam", habits="closure"),
    # torch's fused SGD, which the CPU runs, wants a momentum of all of its parameters or of none.
    rule(
        lambda c: c.optimizer == "sgd-momentum" and c.host > 0,
        {"host": 0.0},
        habits="replace-state begin-anew set-aside",
    ),
    # Plain training keeps masters, and what the CPU updates, elsewhere than in the entries that are deleted.
    rule(
        lambda case: case.masters != "none" or case.host > 0,
        {"masters": "none", "host": 0.0},
        habits="delete-between begin-anew set-aside ask-for-more",
    ),
    # A new optimizer, as a resume makes it, does not know that the last one has come to keep more.
    rule(lambda case: case.save in {"sync", "async"}, {"save": "memory"}, {"save": "none"}, habits="ask-for-more"),
    # A written weight moves its master in a way of its own, which is a story.
    rule(lambda case: case.masters != "none", {"masters": "none"}, habits="write-parameters write-between"),
    # A load by torch's planner asks for state of every parameter, also of one that was never used.
    rule(lambda case: case.model == "unused" and case.save in {"sync", "async"}, {"save": "none"}, {"model": "usual"}),
    # NAdam's product of momenta is rounded to the parameter's dtype when torch loads it.
    rule(
        lambda case: case.optimizer == "nadam" and case.dtype == "bf16" and case.save != "none",
        {"save": "none"},
        {"dtype": "fp32", "masters": "none"},
    ),
    # NAdam's product of momenta, as above.
    rule(
        lambda case: case.optimizer == "nadam" and case.dtype == "bf16",
        {"dtype": "fp32", "masters": "none"},
        habits="load-between load-over-held",
    ),
    # A closure's backward is within step(), where nobody clips: such a step is not announced.
    rule(lambda case: case.overlap == "iteration" and case.clip != "never", habits="closure"),
    # Updates in the backward wait for gradients that are changed afterwards only where the first steps did that.
    rule(
        lambda case: case.overlap == "iteration" and case.clip == "never",
        habits="scaler clip-otherwise look-at-gradients scale-gradients exchange-gradients",
    ),
    # Of two forwards in a reentrant checkpoint fully_shard leaves gradients unreduced; early updates refuse them.
    rule(lambda case: case.model == "recomputed", habits="two-forwards"),
    # Masters and what the CPU has updated have other bits than a plain step.
    rule(lambda case: case.masters != "none" or case.host > 0, {"masters": "none", "host": 0.0}, habits="reattach"),
    # With updates in the backward that are no guesses, parameters are new after it.
    rule(
        lambda case: case.overlap == "iteration" and case.clip == "never",
        habits="evaluate-before-step skip step-twice write-state write-group"
        " look-at-parameters write-between read-between load-between delete-between",
    ),
)

# All pairs -----------------------------------------------------------------------------------------------------------


def pairs_of(case: Case, axes: Mapping[str, tuple[Any, ...]]) -> Iterator[frozenset[tuple[str, Any]]]:
    values = [(axis, getattr(case, axis)) for axis in axes]
    yield from map(frozenset, itertools.combinations(values, 2))
    for habit in sorted(set(case.program) - {"usual"}):
        yield from (frozenset({value, ("habit", habit)}) for value in values)


def all_pairs(
    axes: Mapping[str, tuple[Any, ...]], habits: tuple[str, ...], *, lead: int = 2, seed: int = 0
) -> list[Case]:
    """Cases in which every two values of different axes come together, wherever a rule lets them; greedily few."""
    drawn = random.Random(seed)
    values = [[(axis, value) for value in of_axis] for axis, of_axis in axes.items()]
    values.append([("habit", habit) for habit in habits])
    missing = {frozenset(both): None for a, b in itertools.combinations(values, 2) for both in itertools.product(a, b)}
    cases: list[Case] = []
    while missing:
        wanted = next(iter(missing))
        candidates = filter(None, (_filled(dict(wanted), axes, habits, lead, drawn) for _ in range(80)))
        scored = [(sum(pair in missing for pair in pairs_of(case, axes)), case) for case in candidates]
        if not scored:
            del missing[wanted]  # a rule's
            continue
        best = max(scored, key=lambda one: one[0])[1]
        cases.append(best)
        for pair in pairs_of(best, axes):
            missing.pop(pair, None)
        missing.pop(wanted, None)
    return cases


def _filled(
    wanted: dict[str, Any],
    axes: Mapping[str, tuple[Any, ...]],
    habits: tuple[str, ...],
    lead: int,
    drawn: random.Random,
) -> Case | None:
    some = drawn.sample(habits, 5)
    if "habit" in wanted:
        some[0] = wanted["habit"]
    program = (*["usual"] * lead, *some[:3], "usual", *some[3:])
    chosen = {axis: drawn.choice(of_axis) for axis, of_axis in axes.items()}
    given = {axis: value for axis, value in wanted.items() if axis != "habit"}
    case = legal(Case(**{**chosen, **given, "program": program}), axes, frozenset(given))
    if case is None or ("habit" in wanted and wanted["habit"] not in case.program):
        return None
    return case
