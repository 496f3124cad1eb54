"""Public functions, each called with every kind of object: it works, or it raises; nothing is passed by in silence."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import fsdp_offload
import fsdp_offload.integrations
from fsdp_offload import OffloadedOptimizer, is_offloaded, offload_optimizer, synchronize
from fsdp_offload.engine.engine import Engine
from tests.cpu.test_megatron_chain import Loop

pytestmark = pytest.mark.filterwarnings("ignore:offload_optimizer", "ignore:add_masters has no effect")


def plain() -> Optimizer:
    return torch.optim.RMSprop(nn.Linear(5, 3).parameters())


def offloaded() -> Optimizer:
    return offload_optimizer(plain())


def each_other() -> Optimizer:
    """Make two that would be each other's wrapper."""
    one, other = plain(), plain()
    one.optimizer, other.optimizer = other, one  # type: ignore[attr-defined]
    return one


KINDS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "model": lambda: nn.Linear(5, 3),
    "string": lambda: "optimizer",
    "number": lambda: 1,
    "class": lambda: torch.optim.RMSprop,
    "dict": lambda: {"a": offloaded()},
    "generator": lambda: (one for one in [offloaded()]),
    "parameters": lambda: list(nn.Linear(5, 3).parameters()),
    "empty list": list,
    "models": lambda: [nn.Linear(5, 3)],
    "nested": lambda: [[offloaded()]],
    "plain": plain,
    "each other": each_other,
    "plain list": lambda: [plain(), plain()],
    "plain chain": lambda: Loop(False).optimizer,
    "offloaded": offloaded,
    "list": lambda: [offloaded(), offloaded()],
    "tuple": lambda: (offloaded(),),
    "chain": lambda: Loop(True).optimizer,
    "scheduler": lambda: torch.optim.lr_scheduler.ConstantLR(offloaded()),
}
ONE = {"plain", "each other"}
PLAIN = {*ONE, "plain list", "plain chain"}
OFFLOADED = {"offloaded", "list", "tuple", "chain", "scheduler"}  # a scheduler is looked through, as any wrapper is
ATTACHED = {"plain", "plain chain", "offloaded", "chain"}


def accelerator() -> Any:
    return SimpleNamespace(prepare=lambda *objects: objects, clip_grad_norm_=lambda *_: None)


def fabric() -> Any:
    return SimpleNamespace(
        setup_optimizers=lambda *_: None, strategy=SimpleNamespace(clip_gradients_norm=lambda *_: None)
    )


Call = Callable[[Any, Any], object]
"""Of the function and an object."""

CALLS: dict[str, tuple[set[str], Call]] = {
    "OffloadPolicy": (set(), lambda make, x: make(x)),
    "OffloadReport": (set(), lambda make, x: make(x)),
    "OffloadedOptimizer": (set(), lambda make, x: make(x)),
    "add_masters": (ONE, lambda call, x: call(x)),
    "clip_grad_norm_": (PLAIN | OFFLOADED, lambda call, x: call(x, 1.0)),
    "is_offloaded": (PLAIN | OFFLOADED, lambda call, x: call(x)),
    "materialize_on_host": ({"model"}, lambda call, x: call(x)),
    "materialize_on_host, initialize": (
        {"None", "model", "class"},
        lambda call, x: call(nn.Linear(5, 3), initialize=x),
    ),
    "offload_model": ({"model"}, lambda call, x: call(x)),
    "offload_optimizer": ({"plain", "plain chain"}, lambda call, x: call(x)),
    "offload_optimizer, model": ({"None"}, lambda call, x: call(plain(), model=x)),
    "offload_optimizer, policy": ({"None"}, lambda call, x: call(plain(), policy=x)),
    "offload_report": ({"offloaded", "tuple", "scheduler"}, lambda call, x: call(x)),
    "offload_states": (OFFLOADED, lambda call, x: call(x)),
    "release_states": (OFFLOADED, lambda call, x: call(x)),
    "reload_before": (OFFLOADED, lambda call, x: call(None, x)),
    "reload_before, callback": ({"None", "model", "class"}, lambda call, x: call(x, offloaded())),
    "reload_model": ({"model"}, lambda call, x: call(x)),
    "reload_states": (OFFLOADED, lambda call, x: call(x)),
    "remove_offload": (OFFLOADED, lambda call, x: call(x)),
    "synchronize": (PLAIN | OFFLOADED, lambda call, x: call(x)),
    "accelerate.prepare": ({"plain", "offloaded"}, lambda call, x: call(accelerator(), x)),
    "accelerate.clip_with": ({"offloaded", "chain", "scheduler"}, lambda call, x: call(accelerator(), x)),
    "lightning.setup_optimizers": (ATTACHED, lambda call, x: call(fabric(), None, x)),
    "lightning.OffloadCallback": ({"None"}, lambda make, x: make(x)),
    "plain_values.policy_from": ({"None"}, lambda call, x: call(x)),
    "plain_values.offload": (ATTACHED, lambda call, x: call(x, None, None)),
    "plain_values.model_of": ({*ONE, "offloaded"}, lambda call, x: call(x, [])),
    "plain_values.metrics_of": (PLAIN | {"offloaded", "tuple", "scheduler"}, lambda call, x: call(x)),
    "plain_values.metrics_of_each": (
        {"plain list", "list", "tuple", "nested", "empty list"},
        lambda call, x: call(x, "{}"),
    ),
    "torchtitan.offloaded": (set(), lambda call, x: call(x)),
    "torchtitan.offload_container": (set(), lambda call, x: call(x)),
    "torchtitan.metrics_of_container": (set(), lambda call, x: call(x)),
    "torchtitan.save_from_arena": (set(), lambda call, x: call(x)),
}
"""By function, and perhaps argument: the kinds with which it works, and the call."""


def function_of(name: str) -> Any:
    *module, name = name.partition(",")[0].split(".")
    if not module:
        return getattr(fsdp_offload, name)
    if module != ["plain_values"]:
        pytest.importorskip(module[0])
    return getattr(importlib.import_module(f"fsdp_offload.integrations.{module[0]}"), name)


@pytest.mark.parametrize("name", CALLS)
def test_each_kind_works_or_raises(name: str) -> None:
    works, call = CALLS[name]
    function, working, said = function_of(name), set(), []
    for kind, make in KINDS.items():
        given = make()
        try:
            call(function, given)
            working.add(kind)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:  # the last: of frameworks, not ours
            said.append(f"{type(error).__name__}: {error}")
    assert working == works
    if "." not in name:
        assert [one for one in said if one.startswith("AttributeError")] == []


def test_no_function_is_left_out() -> None:
    names = set(fsdp_offload.__all__)
    for module in pkgutil.iter_modules(fsdp_offload.integrations.__path__):
        pytest.importorskip(module.name if module.name != "plain_values" else "torch")
        found = importlib.import_module(f"fsdp_offload.integrations.{module.name}")
        functions = inspect.getmembers(found, inspect.isfunction)
        names |= {
            f"{module.name}.{name}" for name, one in functions if one.__module__ == found.__name__ and name[0] != "_"
        }
    assert names <= {name.partition(",")[0] for name in CALLS}


def test_all_of_a_list_are_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Engine] = []
    monkeypatch.setattr(Engine, "synchronize", property(lambda engine: partial(calls.append, engine)))
    for kind, count in {"offloaded": 1, "list": 2, "tuple": 1, "chain": 2, "scheduler": 1, "plain list": 0}.items():
        given = KINDS[kind]()
        calls.clear()
        synchronize(given)
        assert len(calls) == len(set(map(id, calls))) == count, kind
    with pytest.raises(TypeError, match=r"synchronize: expected .*, got Linear. Write synchronize\(optimizer\)"):
        synchronize(KINDS["model"]())


def test_a_list_is_offloaded_if_all_in_it_are() -> None:
    one, other = offloaded(), plain()
    assert isinstance(one, OffloadedOptimizer)
    assert is_offloaded([one])
    assert not is_offloaded([one, other])
