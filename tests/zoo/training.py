"""Trains one class plain and offloaded from the same seeds, and compares all that training leaves behind."""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fsdp_offload import OffloadPolicy, offload_optimizer
from tests.parity import same_bits
from tests.parity import same_value as same_tensor

from .outcomes import ATTACH_CRASHED, CRASHED, NOT_REPEATED, NOT_RUN, REFUSED, SAME, WRONG, Combination, Outcome
from .recipes import Recipe, build, dtype_for, recipes_for, with_smaller_lr

POLICIES = {"default": OffloadPolicy(), "small": OffloadPolicy(bucket_bytes=1024)}
"""The smallest bucket there may be: a parameter of more than a few hundred elements is alone in its bucket."""

Attach = Callable[..., Any]


class Net(nn.Module):
    """Matrices of repeated shapes, large enough to be quantized; vectors, a 4-D weight, and sizes that fill nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.down = nn.Linear(64, 24)
        self.narrow = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.norm = nn.LayerNorm(24)
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.head = nn.Linear(36, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        hidden = self.down(hidden)
        for block in self.narrow:
            hidden = hidden + torch.tanh(block(hidden))
        image = self.conv(self.norm(hidden).view(len(x), 2, 3, 4))
        return self.head(image.flatten(1))


def seed(number: int) -> None:
    """Of every generator that an optimizer may draw from."""
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def generators() -> dict[str, Any]:
    """Where each of them stands."""
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}


class Training:
    """One model and its optimizer, at some step."""

    def __init__(self, cls: type[Optimizer], recipe: Recipe, groups: int, dtype: str = "") -> None:
        seed(0)
        self.recipe = recipe
        self.dtype = getattr(torch, dtype) if dtype else dtype_for(cls)
        self.model = Net().to(self.dtype)
        self.optimizer = build(cls, recipe, self.model, groups)
        if callable(getattr(self.optimizer, "train", None)):  # schedule-free ones want to be told
            self.optimizer.train()  # type: ignore[attr-defined]
        self.steps = 0
        seed(1)

    def step(self) -> None:
        """One step of training, as the recipe calls it."""
        generator = torch.Generator().manual_seed(1000 + self.steps)
        x, y = (torch.randn(8, size, generator=generator).to(self.dtype) for size in (13, 5))

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            with torch.enable_grad():
                loss = nn.functional.mse_loss(self.model(x), y)
                loss.backward(create_graph=self.recipe.call == "backward(create_graph=True)")
            return loss

        closure()
        if self.recipe.call == "step(closure)":
            self.optimizer.step(closure)  # type: ignore[arg-type]
        else:
            self.optimizer.step()
        self.steps += 1

    def save(self, file: Path) -> None:
        """What people save."""
        saved = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**saved, "generators": generators(), "steps": self.steps}, file)

    def load(self, file: Path, *, put: bool = False) -> None:
        """Go on from there; ``put``: with the very state, which torch's own load rounds to the dtype of parameters."""
        saved = torch.load(file, weights_only=False)
        self.model.load_state_dict(saved["model"])
        if put:
            for group, entries in zip(self.optimizer.param_groups, saved["optimizer"]["param_groups"], strict=True):
                group |= {name: value for name, value in entries.items() if name != "params"}
            params = [param for group in self.optimizer.param_groups for param in group["params"]]
            for key, state in saved["optimizer"]["state"].items():
                self.optimizer.state[params[key] if isinstance(key, int) else key] = state
        else:
            self.optimizer.load_state_dict(saved["optimizer"])
        self.steps = saved["steps"]
        torch.set_rng_state(saved["generators"]["torch"])
        np.random.set_state(saved["generators"]["numpy"])
        random.setstate(saved["generators"]["python"])

    def weights(self) -> list[Tensor]:
        """All parameters, whether the optimizer has them or not."""
        return [param.detach() for param in self.model.parameters()]


class Reference:
    """A plain run: the parameters after each step, and everything else at the end."""

    def __init__(self, cls: type[Optimizer], recipe: Recipe, groups: int, steps: int, dtype: str = "") -> None:
        self.training = Training(cls, recipe, groups, dtype)
        self.start = [weight.clone() for weight in self.training.weights()]
        self.weights: list[list[Tensor]] = []
        for _ in range(steps):
            self.training.step()
            self.weights.append([weight.clone() for weight in self.training.weights()])
        self.generators = generators()

    @property
    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(weight).all()) for weight in self.weights[-1])

    @property
    def has_moved(self) -> bool:
        return any(not torch.equal(*pair) for pair in zip(self.start, self.weights[-1], strict=True))

    def difference(self, other: Training, *, resumed: bool = False) -> str:
        """What is not the same in ``other``, in words; the rest is looked at once it has come to the last step.

        State dicts have no attributes of the optimizer, and a class's load may drop entries of groups: where these
        matter, the parameters tell.
        """
        mine = self.weights[other.steps - 1]
        for (name, _), one, two in zip(other.model.named_parameters(), mine, other.weights(), strict=True):
            if not same_bits(one, two):
                return f"step {other.steps}: parameter {name} differs"
        if other.steps < len(self.weights):
            return ""
        found = [
            *differences(self.training.optimizer, other.optimizer, attributes=not resumed),
            *different(*(dict(flat("generator", one, {})) for one in (self.generators, generators()))),
        ]
        if resumed:
            dropped = [one for one in found if one.startswith("param_groups") and one.endswith(" and None")]
            found = [
                one for one in found if one not in dropped and not (dropped and one.startswith("keys of param_gr"))
            ]
        return "; ".join(found[:3])


def judge(
    cls: type[Optimizer], combinations: Iterable[Combination], attach: Attach = offload_optimizer, folder: Path = Path()
) -> Iterator[Any]:
    """Yields how ``cls`` can be trained, or why it cannot; then each combination, and what came of it.

    What is to be resumed is saved in ``folder``, and only then; what comes of that, :func:`resume` tells.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about everything; theirs, not ours
        recipe, problem = find_recipe(cls)
        yield recipe, problem
        if recipe is None:
            return
        references: dict[tuple[int, int, str], Reference | str] = {}
        for combination in combinations:
            key = combination.groups, combination.steps, combination.dtype
            if key not in references:
                references = {key: _repeated(cls, recipe, *key)}  # one at a time: they are large
            reference = references[key]
            if isinstance(reference, str):
                outcome = NOT_REPEATED if reference.startswith(NOT_REPEATED) else NOT_RUN
                yield Outcome(combination, outcome, reference)
            else:
                yield combination
                yield compare(cls, recipe, combination, reference, attach, folder / f"{combination}.pt")


def find_recipe(cls: type[Optimizer]) -> tuple[Recipe | None, str]:
    """The first recipe with which two steps run and move the parameters; else what the first one failed with."""
    problem = ""
    for recipe in recipes_for(cls):
        try:
            reference = Reference(cls, recipe, groups=1, steps=12)
            smaller = None if reference.is_finite else with_smaller_lr(cls, recipe)
            if smaller is not None:
                recipe, reference = smaller, Reference(cls, smaller, groups=1, steps=12)
        except Exception as error:  # noqa: BLE001  # whatever theirs raises is the result
            problem = problem or say(error)
            continue
        if reference.has_moved and reference.is_finite:
            return recipe, ""
        problem = problem or ("diverges" if reference.has_moved else "12 steps change no parameter")
    return None, problem


def _repeated(cls: type[Optimizer], recipe: Recipe, groups: int, steps: int, dtype: str) -> Reference | str:
    """A plain run that has come out the same twice; or why there is none."""
    try:
        first = Reference(cls, recipe, groups, steps, dtype)
        again = Training(cls, recipe, groups, dtype)
        for _ in range(steps):
            again.step()
            difference = first.difference(again)
            if difference:
                return f"{NOT_REPEATED}: {difference}"
    except Exception as error:  # noqa: BLE001  # whatever theirs raises is the result
        return say(error)
    return first


def compare(
    cls: type[Optimizer], recipe: Recipe, combination: Combination, reference: Reference, attach: Attach, file: Path
) -> Outcome:
    """Train with offload from ``combination.attach_after`` on, next to what a plain run has come to."""
    training = Training(cls, recipe, combination.groups, combination.dtype)
    refusal = ""
    while training.steps < combination.steps:
        if training.steps == combination.attach_after and not refusal:
            try:
                attach(training.optimizer, policy=POLICIES[combination.buckets])
            except ValueError as error:
                refusal = say(error)  # and go on without: being refused must not change anything
                if "Attach to the inner optimizer" in refusal:
                    for inner in held_by(training.optimizer):
                        attach(inner, policy=POLICIES[combination.buckets])
            except Exception as error:  # noqa: BLE001  # a crash is a result
                return Outcome(combination, ATTACH_CRASHED, say(error))
        try:
            training.step()
            difference = reference.difference(training)
            if training.steps == combination.resume_after and not refusal:
                training.save(file)
        except Exception as error:  # noqa: BLE001  # a crash is a result
            return Outcome(combination, CRASHED, f"step {training.steps + 1}: {say(error)}")
        if difference:
            after = f"after it was refused ({refusal}): " if refusal else ""
            return Outcome(combination, WRONG, after + difference)
    if refusal:
        return Outcome(combination, REFUSED, refusal)
    return Outcome(combination, SAME)


def resume(cls: type[Optimizer], combination: Combination, folder: Path) -> Iterator[Outcome]:
    """Yields what comes of loading what :func:`judge` has saved, and going on: beside a run that nobody interrupted.

    A class counts if a plain optimizer can go on from there, with the very state or by a load.
    """
    warnings.simplefilter("ignore")
    recipe, _ = find_recipe(cls)
    assert recipe is not None, "it has been trained"
    about = cls, recipe, combination.groups
    reference = Reference(*about, combination.steps, combination.dtype)

    def go_on(*, offloaded: bool, put: bool = False) -> str:
        training = Training(*about, combination.dtype)
        if offloaded:
            offload_optimizer(training.optimizer, policy=POLICIES[combination.buckets])
        training.load(folder / f"{combination}.pt", put=put)
        difference = ""
        while training.steps < combination.steps and not difference:
            training.step()
            difference = reference.difference(training, resumed=True)
        return difference

    plain = []
    for put in (True, False):
        try:
            plain.append(go_on(offloaded=False, put=put))
        except Exception as error:  # noqa: BLE001  # whatever theirs raises is the result
            plain.append(say(error))
    if all(plain):
        yield Outcome(combination, NOT_REPEATED, f"resumed without offload: {plain[0]}")
        return
    try:
        difference = go_on(offloaded=True)
    except Exception as error:  # noqa: BLE001  # a crash is a result
        yield Outcome(combination, CRASHED, f"resumed: {say(error)}")
        return
    yield Outcome(combination, WRONG if difference else SAME, difference and f"resumed: {difference}")


def held_by(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that another one wraps."""
    held = (one for value in vars(optimizer).values() for one in tree_leaves(value) if isinstance(one, Optimizer))
    return list(dict.fromkeys(held))


def say(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 600 else text[:600] + " …"


# Comparing two optimizers ---------------------------------------------------------------------------------------------

_PLAIN = (bool, int, float, str, Tensor)


def differences(plain: Optimizer, other: Optimizer, *, attributes: bool = True) -> Iterator[str]:
    """What is not the same in state, param groups and attributes."""
    names = [name for name, value in vars(plain).items() if attributes and isinstance(value, _PLAIN)]
    yield from different(*(dict(_contents(one, names)) for one in (plain, other)))


def _contents(optimizer: Optimizer, attributes: list[str]) -> Iterator[tuple[str, Any]]:
    places: dict[Any, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        places |= {param: f"parameter {number}.{place}" for place, param in enumerate(group["params"])}
        options = {key: value for key, value in group.items() if key != "params"}
        yield from flat(f"param_groups[{number}]", options, places)
    yield from flat("state", dict(optimizer.state), places)
    for name in attributes:
        yield f"attribute {name!r}", vars(optimizer).get(name)


def flat(name: str, value: Any, places: Mapping[Any, str]) -> Iterator[tuple[str, Any]]:
    """Everything within a value of any kind, by name; keys that are parameters are named by their ``places``."""
    if isinstance(value, Mapping):
        named = {places.get(key, key) if isinstance(key, Tensor) else key: one for key, one in value.items()}
        yield f"keys of {name}", sorted(map(str, named))
        for key, one in named.items():
            yield from flat(f"{name}[{key!r}]", one, places)
    elif isinstance(value, list | tuple):
        yield f"length of {name}", len(value)
        for number, one in enumerate(value):
            yield from flat(f"{name}[{number}]", one, places)
    elif isinstance(value, (*_PLAIN, np.ndarray)) or callable(value) or not hasattr(value, "__dict__"):
        yield name, value if isinstance(value, (*_PLAIN, np.ndarray)) else type(value)
    else:
        yield from flat(name, vars(value), places)


def different(one: dict[str, Any], two: dict[str, Any]) -> Iterator[str]:
    """Of two flat contents."""
    for name in [*one, *(two.keys() - one.keys())]:
        mine, others = one.get(name), two.get(name)
        if isinstance(mine, Tensor) and isinstance(others, Tensor):
            if not same_tensor(mine.detach(), others.detach()):
                yield f"{name} differs"
        elif isinstance(mine, np.ndarray) and isinstance(others, np.ndarray):
            if not np.array_equal(mine, others):
                yield f"{name} differs"
        elif type(mine) is not type(others) or not (mine == others or (mine != mine and others != others)):
            yield f"{name} is {mine!r} and {others!r}"
