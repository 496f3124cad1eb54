"""What a callback meets in Megatron Bridge, with Bridge's own signatures, at 067f987.

Of ``megatron/bridge/training``: ``callbacks.py`` without its functional half and its documentation, and of ``train.py``
and ``utils/train_utils.py`` which calls come in which order, and how a forward step gets the state.
"""

import functools
import inspect
from collections.abc import Callable as Function
from dataclasses import dataclass, field
from typing import Any

VALID_EVENTS = frozenset(
    f"on_{event}"
    for event in (
        *("data_init_start", "train_start", "train_step_start", "train_step_end", "train_end", "checkpoint_save"),
        *("eval_start", "eval_step_start", "eval_step_end", "eval_end"),
        *("test_start", "test_step_start", "test_step_end", "test_end"),
    )
)


@dataclass
class CallbackContext:
    state: Any
    model: list[Any]
    user_state: dict[str, Any] = field(default_factory=dict)
    optimizer: Any = None
    scheduler: Any = None
    loss_dict: dict[str, Any] | None = None
    grad_norm: float | None = None
    skipped_iter: bool | None = None
    total_loss_dict: dict[str, Any] | None = None


class Callback:
    """Every event is a method that does nothing."""


for event in VALID_EVENTS:
    setattr(Callback, event, lambda self, context: None)


class CallbackManager:
    def __init__(self) -> None:
        self._callbacks: dict[str, list[Function[[CallbackContext], None]]] = {event: [] for event in VALID_EVENTS}

    def add(self, callback: Callback | list[Callback]) -> None:
        for one in callback if isinstance(callback, list) else [callback]:
            for event_name in VALID_EVENTS:
                method, base_method = getattr(one, event_name, None), getattr(Callback, event_name, None)
                if method is not None and method.__func__ is not base_method:
                    self._callbacks[event_name].append(method)

    def fire(self, event_name: str, context: CallbackContext) -> None:
        for function in self._callbacks[event_name]:
            function(context)


def normalize_callbacks(callbacks: list[Callback] | CallbackManager | None) -> CallbackManager:
    if isinstance(callbacks, CallbackManager):
        return callbacks
    manager = CallbackManager()
    manager.add(callbacks or [])
    return manager


def prepare_forward_step_func(forward_step_func: Function[..., Any], state: Any) -> Function[..., Any]:
    """Bind the state, where the first parameter is called so."""
    names = list(inspect.signature(forward_step_func).parameters)
    return functools.partial(forward_step_func, state) if names[0] in ("state", "global_state") else forward_step_func


def pretrain(
    config: Any, forward_step_func: Function[..., Any], callbacks: list[Callback] | CallbackManager | None = None
) -> None:
    """Train ``config``, a loop of the tests, in the order of Bridge's ``train`` and ``train_step``."""
    manager, state = normalize_callbacks(callbacks), object()
    forward_step = prepare_forward_step_func(forward_step_func, state)

    def fire(event_name: str) -> None:
        manager.fire(event_name, CallbackContext(state, config.chunks, {}, config.optimizer))

    fire("on_train_start")
    for step in range(4):
        fire("on_train_step_start")
        config.optimizer.zero_grad()
        for micro_batch in range(2):
            forward_step(iter([2 * step + micro_batch]), config.chunks[0]).backward()
        config.chunks[0].config.finalize_model_grads_func(7)
        config.optimizer.step()
        fire("on_train_step_end")
    fire("on_train_end")
