"""Optimizers whose step is not that of one parameter after the other, and several of them at once."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn, optim

from fsdp_offload import offload_optimizer
from tests.parity import Zoo, attach, make_pair


class Lookahead(optim.Optimizer):
    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.inner.step(closure)


def test_state_that_belongs_to_no_parameter_is_not_divided() -> None:
    optimizer = optim.SGD(Zoo().parameters(), lr=0.1, momentum=0.9)
    optimizer.state["k"] = 3  # type: ignore[index]
    with pytest.raises(ValueError, match="'k', which is not a parameter"):
        attach(optimizer)


def test_a_wrapper_around_another_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'inner'.*Attach to the inner optimizer"):
        attach(Lookahead(optim.AdamW(Zoo().parameters())))


def test_a_closure_of_a_trusted_class_is_refused() -> None:
    optimizer = attach(type("Own", (optim.SGD,), {})(Zoo().parameters(), lr=0.1, momentum=0.9), trust_separable=True)
    with pytest.raises(RuntimeError, match=r"Call the closure yourself.*Nothing has been changed"):
        optimizer.step(lambda: 1.0)


class LoadsMore(optim.AdamW):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.02)
        self.extra = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "extra": self.extra}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.extra = state_dict["extra"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "extra"})


def test_what_a_class_adds_to_its_state_dict_is_loaded() -> None:
    pair = make_pair(Zoo, LoadsMore)
    pair.train(2)
    pair.each(lambda run: run.optimizer.load_state_dict({**run.optimizer.state_dict(), "extra": 7}))
    assert [run.optimizer.extra for run in pair] == [7, 7]
    pair.train(2)


def test_the_offloaded_class_is_not_a_constructor() -> None:
    optimizer = attach(optim.AdamW(Zoo().parameters()))
    with pytest.raises(TypeError, match="build one of the class AdamW"):
        type(optimizer)(Zoo().parameters())


def test_a_model_of_another_type() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Mo"):
        offload_optimizer(optim.AdamW(Zoo().parameters()), model=[nn.Linear(1, 1)])  # type: ignore[arg-type]
