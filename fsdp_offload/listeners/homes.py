"""Weights straight from their homes: no device memory, no collective, one consistent set while training runs.

A loop over :func:`weights` reads homes as the writer of an asynchronous save does (R4): the updates of the next step go
to spare homes, and where there are none, or these are read as well, training waits for the end of the loop.
"""

import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..api.wrapped import attachment_of, offloaded
from ..engine.engine import Engine
from ..engine.homes import versions_of
from ..engine.weights import Part
from ..fsdp.dtensor import canonical_fqn, over_local
from ..model.sleep import check_is_module
from ..policy import listed, tells
from .deltas import wait_parameters_home

logger = logging.getLogger(__name__)

_POLL_SECONDS, _WARN_SECONDS = 0.002, 60
_STILL_HELD = 2
"""Tensors that a loop may still hold when it ends: the last one, and the one before."""


class _Reading:
    """One loop over weights: a :class:`~fsdp_offload.state.shard.Reader` of their homes. It ends with its thread."""

    def __init__(self, engine: Engine) -> None:
        self.thread = threading.current_thread()
        self._core = engine.core
        self._over = threading.Event()
        self.waited_seconds = 0.0

    def is_reading(self) -> bool:
        return not self._over.is_set() and self.thread.is_alive()

    def when_over(self, look: Callable[[], object]) -> None:
        """Do nothing: the loop checks by itself whether other code has written what it read."""

    def wait(self) -> None:
        """Block the thread that trains; a RuntimeError if it is the one that reads."""
        if self.is_reading() and self.thread.ident == self._core.thread:
            raise RuntimeError(
                "an update was called for within a loop over weights(model), in the same thread, and there are no "
                "spare homes: it would wait for itself. End the loop before the backward and step(), or give "
                "OffloadPolicy(snapshot_bytes=...) as many bytes as state and parameters have."
            )
        begin, warned = time.perf_counter(), False
        while self.is_reading():
            self._over.wait(_POLL_SECONDS)
            if not warned and time.perf_counter() - begin > _WARN_SECONDS:
                warned = True
                logger.warning("training has waited for %d s for a loop over weights(model) to end", _WARN_SECONDS)
        self.waited_seconds += time.perf_counter() - begin

    def end(self) -> None:
        self._over.set()
        if self.waited_seconds:
            logger.info("training has waited for %.3f s for a loop over weights(model)", self.waited_seconds)


def _over_memory_of(home: Tensor, handed: "list[weakref.ref[Any]]") -> Tensor:
    """Another tensor over a home, with a storage of its own; ``handed`` gets what is gone with all views of it."""
    if not home.numel():
        return home.detach()
    memory = (ctypes.c_ubyte * home.nbytes).from_address(home.data_ptr())
    memory.keeps = home  # type: ignore[attr-defined]
    handed.append(weakref.ref(memory))
    return torch.frombuffer(memory, dtype=home.dtype).as_strided(home.shape, home.stride())


@tells("weights(model)")
def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over (name, tensor) of all parameters of ``model``, out of their homes (``parameters=True``).

    ::

        for name, tensor in weights(model):     # in any thread, while the model trains, or is asleep
            send(name, tensor.to_local())       # this rank's shard, on the host

    All are weights of one step: the last that had ended when the loop began, which waits for the end of a step under
    way. Tensors are of the parameter's type, a DTensor of its mesh and placements, and dtype; do not write them. They
    are true until the loop ends: copy what you keep.

    Training continues meanwhile. Its next updates go to spare homes, within ``OffloadPolicy.snapshot_bytes``; without
    them, training waits for the loop, and the log (``INFO``) says how long. Buffers are not parameters.

    Raises:
        TypeError: it is no module.
        ValueError: some of its parameters have no home.
        RuntimeError: weights are half updated; several optimizers train the model, and the thread does not; as the loop
            ends, other code has written parameters in place, or the caller holds more than the last tensors.
    """
    check_is_module(model, "weights")
    found = {}
    for optimizer in list(offloaded):
        if (attachment := attachment_of(optimizer)) is not None:
            of_module = (
                (one, part) for part in attachment.engine.weights.parts.values() for one in part.sharded.places()
            )
            found.update({(id(module), name): (attachment.engine, part) for (module, name), part in of_module})
    named: dict[Part, tuple[str, Engine]] = {}
    without: list[str] = []
    for prefix, module in model.named_modules():
        for name in [name for name, param in module._parameters.items() if param is not None]:
            full = f"{prefix}.{name}" if prefix else name
            engine, part = found.get((id(module), name), (None, None))
            if engine is None or part is None:
                without.append(full)
            else:
                named.setdefault(part, (canonical_fqn(model, full), engine))
    if without or not named:
        raise ValueError(
            f"weights: {listed(without) or 'no parameter'} of this {type(model).__name__} has no home on the host. "
            "Give OffloadPolicy(parameters=True) to offload_optimizer(optimizer, model=model), for each optimizer of "
            "the model, or read model.state_dict() in the thread that trains."
        )
    return _loop(
        {part: name for part, (name, _) in named.items()}, list({engine: None for _, engine in named.values()})
    )


def _loop(named: dict[Part, str], engines: list[Engine]) -> Iterator[tuple[str, Tensor]]:
    if len(engines) > 1 and any(engine.core.is_foreign for engine in engines):
        raise RuntimeError(
            f"weights: {len(engines)} optimizers train this model, and another thread cannot know when all of them "
            "have made their step. Loop in the thread that trains, between two iterations."
        )
    attached = {attachment.engine for one in list(offloaded) if (attachment := attachment_of(one)) is not None}
    if not attached.issuperset(engines):
        raise RuntimeError(
            "weights: an optimizer of the model was removed from offload, or attached anew, since weights(model) was "
            "called. Call it again."
        )
    readings = [_Reading(engine) for engine in engines]
    try:
        with ExitStack() as stack:
            for engine in engines:
                stack.enter_context(engine.between_steps())
                engine.check_usable("weights(model)")
                wait_parameters_home(engine)
            homes = {part: part.home for part in named}
            versions = versions_of(homes.values())
            for reading, engine in zip(readings, engines, strict=True):
                own = {*engine.weights.parts.values()}
                engine.lending.lend(reading, [home for part, home in homes.items() if part in own])
        handed: list[weakref.ref[Any]] = []
        for part, name in named.items():
            local = homes[part].weights
            assert local is not None, "the home of a parameter"
            yield name, over_local(part.sharded.param, _over_memory_of(local, handed))
        if versions_of(homes.values()) != versions:
            raise RuntimeError(
                "weights: a parameter was written in place during the loop, which may have handed out some of its old "
                "values and some of the new ones. Loop again, and write parameters behind it."
            )
        still = sum(memory() is not None for memory in handed)
        if still > _STILL_HELD:
            raise RuntimeError(
                f"weights: {still} of the tensors are still held as the loop ends, and the next steps change them. "
                "Copy what you keep: {name: tensor.clone() for name, tensor in weights(model)}."
            )
    finally:
        for reading in readings:
            reading.end()
