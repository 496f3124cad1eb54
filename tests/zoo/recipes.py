"""How to build an optimizer class that nobody has told us about, and how to call its step."""

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import required  # type: ignore[attr-defined]

Selection = Literal["all", "matrices", "matrices and vectors apart"]
Call = Literal["step()", "step(closure)", "backward(create_graph=True)"]

# Arguments without a default, by name. A class that needs another one is reported as one that cannot be built.
_LENGTH = {"num_epochs": 15, "num_batches_per_epoch": 10}
NEEDED: dict[str, Any] = {"lr": 1e-3, "learning_rate": 1e-3, "momentum": 0.9, "weight_decay": 1e-2, "alpha": 0.5}
NEEDED |= {"nu": 0.7, "ess": 1e4, "rank": 4, "batch_size": 8, "num_data": 64, "dataset_size": 64, **_LENGTH}
NEEDED |= dict.fromkeys(("total_steps", "num_iterations", "num_training_steps", "max_iters", "T"), 150)

# What a class needs beyond that, or does not repeat itself or stay finite without.
_LARS = ("lars:LARS", "lars:LARS32bit", "lars:LARS8bit", "lars:PytorchLARS")
_SGD = ("sgd:SGD", "sgd:SGD32bit", "sgd:SGD8bit")
ARGUMENTS: dict[str, dict[str, Any]] = {
    **{f"bitsandbytes.optim.{name}": {"momentum": 0.9} for name in (*_LARS, *_SGD)},
    "came_pytorch.CAME:CAME": {"lr": 1e-3},
    "ranger21.ranger21:Ranger21": _LENGTH,
    "ranger21.rangerabel:Ranger21abel": _LENGTH,
}

# Modules whose classes take parameters in bfloat16 only.
BFLOAT16 = ("torchastic.stochastic_optim",)

LR_NAMES = ("lr", "learning_rate")


@dataclass(frozen=True)
class Recipe:
    """One way to build a class and to train with it."""

    selection: Selection
    call: Call
    lr: float | None = None  # instead of the class's own, which diverges

    def __str__(self) -> str:
        lr = "" if self.lr is None else f", lr={self.lr:g}"
        return f"{self.selection}, {self.call}{lr}"


def recipes_for(cls: type[Optimizer]) -> Iterator[Recipe]:
    """The ways to try, in this order: as most people do first."""
    for selection, call in itertools.product(get_args(Selection), get_args(Call)):
        yield Recipe(selection, call)


def with_smaller_lr(cls: type[Optimizer], recipe: Recipe) -> Recipe | None:
    """The same with a learning rate at which even a badly chosen default should stay finite."""
    takes_lr = any(name in inspect.signature(cls).parameters for name in LR_NAMES)
    return replace(recipe, lr=1e-5) if recipe.lr is None and takes_lr else None


def build(cls: type[Optimizer], recipe: Recipe, model: nn.Module, groups: int) -> Optimizer:
    """An instance of ``cls`` over the parameters of ``model``, in ``groups`` groups per kind of parameter."""
    params = list(model.parameters())
    apart = [[param for param in params if param.dim() == 2], [param for param in params if param.dim() != 2]]
    kinds = {"all": [params], "matrices": apart[:1], "matrices and vectors apart": apart}[recipe.selection]
    lists = [kind[number::groups] for kind in kinds for number in range(groups)]
    optimizer = _construct(cls, recipe, model, lists)
    if groups > 1 and isinstance(optimizer.param_groups[-1].get("lr"), float):
        optimizer.param_groups[-1]["lr"] *= 0.5  # or nothing would tell the groups apart
    return optimizer


def dtype_for(cls: type[Optimizer]) -> torch.dtype:
    """What the parameters have to be in."""
    return torch.bfloat16 if cls.__module__ in BFLOAT16 else torch.float32


def _construct(cls: type[Optimizer], recipe: Recipe, model: nn.Module, lists: Sequence[list[Tensor]]) -> Optimizer:
    groups: list[Any] = [{"params": params} for params in lists]
    if recipe.selection == "matrices and vectors apart":
        for group in groups:
            group["use_muon"] = group["params"][0].dim() == 2
    over = groups[0]["params"] if len(groups) == 1 else groups
    chosen = dict(ARGUMENTS.get(f"{cls.__module__}:{cls.__name__}", {}))
    parameters = inspect.signature(cls).parameters
    named = {name: one for name, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    chosen.update(_to_wrap(parameters, over))
    for position, (name, parameter) in enumerate(named.items()):
        if name in chosen:
            continue
        if name in LR_NAMES and recipe.lr is not None:
            chosen[name] = recipe.lr
        elif name == "named_parameters":
            chosen[name] = list(model.named_parameters())
        elif name == "model" and parameter.default is parameter.empty:
            chosen[name] = model
        elif parameter.default is parameter.empty or parameter.default is required:
            chosen[name] = over if position == 0 or name == "params" else _needed(cls, name)
    return cls(**chosen)


def _to_wrap(parameters: Mapping[str, inspect.Parameter], over: Any) -> dict[str, Any]:
    """What a class needs that works with another optimizer: that one, or its class where it also takes parameters."""
    chosen: dict[str, Any] = {}
    for name in ("optimizer", "base_optimizer", "base_optimizer_cls", "optimizer_class", "optimizer_cls"):
        if name not in parameters:
            continue
        if name == "optimizer" or (name == "base_optimizer" and "params" not in parameters):
            chosen[name] = torch.optim.SGD(over, lr=1e-2, momentum=0.9)
        else:
            chosen[name] = torch.optim.SGD
            if "lr" not in parameters and any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
                chosen["lr"] = 1e-2
    return chosen


def _needed(cls: type[Optimizer], name: str) -> Any:
    if name not in NEEDED:
        raise TypeError(f"{cls.__name__} needs the argument {name!r}, which the table of arguments does not have")
    return NEEDED[name]
