"""Weights straight from their homes: no device memory, no collective, one consistent set while training runs.

A loop over :func:`weights` reads homes as the writer of an asynchronous save does (R4): the updates of the next step go
to spare homes; without a spare home that is free, training waits for the end of the loop.
"""

import ctypes
import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
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
from ..state.shard import Reader
from .deltas import wait_parameters_home

logger = logging.getLogger(__name__)

_POLL_SECONDS, _WARN_SECONDS = 0.002, 60
_STILL_HELD = 2
"""Tensors that a loop may still hold when it ends: the last one, and the one before."""


class _Reading(Reader):
    """One loop over weights, which reads their homes. It ends with its thread."""

    def __init__(self, engine: Engine, parts: list[Part]) -> None:
        self.thread, self._core = threading.current_thread(), engine.core
        self._updated = [part for part in parts if part.sharded.param in engine.plan.shards]
        self._over = threading.Event()
        self.waited_seconds = 0.0

    def is_reading(self) -> bool:
        return not self._over.is_set() and self.thread.is_alive()

    def check_step(self) -> None:
        """Raise if the thread of this loop begins a step, and some parameter that it updates has no free spare home."""
        if any(part.spare is None or part.spare.is_read() for part in self._updated):
            self._check_other_thread()

    def _check_other_thread(self) -> None:
        if self.is_reading() and self.thread.ident == self._core.thread:
            raise RuntimeError(
                "an update was called for within a loop over weights(model), in the same thread, and there are no "
                "spare homes: it would wait for itself. End the loop before the backward and step(), or give "
                "OffloadPolicy(snapshot_bytes=...) as many bytes as state and parameters have."
            )

    def wait(self) -> None:
        """Block the thread that trains until the loop ends; raise a RuntimeError if the loop runs in that thread."""
        self._check_other_thread()
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
    """Make a tensor over a home, with its own storage; ``handed`` gets a weak reference, dead once no view is left."""
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

        for name, tensor in weights(model):  # in any thread, also while it trains
            send(name, tensor.to_local())    # this rank's shard, on the host

    All weights are of one step: the last one that has ended when the loop begins. The loop first waits for a step under
    way. Tensors have the parameter's dtype and type (for a DTensor, its mesh and placements); do not write them. They
    are valid until the loop ends: copy what you keep. (A module with one or two parameters gives copies.)

    Training continues meanwhile. Its next updates go to spare homes, within ``OffloadPolicy.snapshot_bytes``; without
    spare homes, training waits for the loop, and the log (``INFO``) says how long. Buffers are not handed out.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: some of its parameters have no home.
        RuntimeError: weights are half updated; several optimizers train the model, and not all have made their step,
            or the thread does not train; as the loop ends, other code has written parameters in place, or the caller
            holds more than the last tensors.
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
            if (its := found.get((id(module), name))) is None:
                without.append(full)
            else:
                named.setdefault(its[1], (canonical_fqn(model, full), its[0]))
    if without or not named:
        raise ValueError(
            f"weights: {listed(without) or 'no parameter'} of this {type(model).__name__} has no home on the host. "
            "Give OffloadPolicy(parameters=True) to offload_optimizer(optimizer, model=model), for each optimizer of "
            "the model, or read model.state_dict() in the thread that trains."
        )
    return _loop(named)


def _loop(named: dict[Part, tuple[str, Engine]]) -> Iterator[tuple[str, Tensor]]:
    of_engine: defaultdict[Engine, list[Part]] = defaultdict(list)
    for part, (_, engine) in named.items():
        of_engine[engine].append(part)
    if len(of_engine) > 1 and any(engine.core.is_foreign for engine in of_engine):
        raise RuntimeError(
            f"weights: {len(of_engine)} optimizers train this model, and another thread cannot know when all of them "
            "have made their step. Loop in the thread that trains, between two iterations."
        )
    if any(engine.weights.parts.get(part.sharded.param) is not part for part, (_, engine) in named.items()):
        raise RuntimeError(
            "weights: an optimizer of the model was removed from offload, or attached anew, since weights(model) was "
            "called. Call it again."
        )
    readings = [_Reading(*each) for each in of_engine.items()]
    try:
        with ExitStack() as stack:
            for engine in of_engine:
                stack.enter_context(engine.between_steps())
                engine.check_usable("weights(model)")
                wait_parameters_home(engine)
                if engine.core.loading:
                    raise RuntimeError(
                        "weights: model.load_state_dict() is under way in this thread, and some weights are still old. "
                        "Loop behind it."
                    )
            # Of each engine: were any of its gradients reduced since its last step() or zero_grad()?
            waiting = {any(map(engine.core.of_group.get, engine.core.reductions.counts)) for engine in of_engine}
            if len(waiting) > 1:
                raise RuntimeError(
                    "weights: since the last backward, one optimizer of the model has made its step, and another has "
                    "not: weights of two steps would be mixed. Loop behind the step() of the last one; if it makes "
                    "none this time, call its zero_grad() first."
                )
            homes = {part: part.home for part in named}
            versions = versions_of(homes.values())
            for reading, (engine, parts) in zip(readings, of_engine.items(), strict=True):
                engine.lending.lend(reading, [homes[part] for part in parts])
        handed: list[weakref.ref[Any]] = []
        few = len(named) <= _STILL_HELD  # a caller that keeps so few tensors looks like a loop that has ended
        for part, (name, _) in named.items():
            local = homes[part].weights
            assert local is not None, "the home of a parameter"
            yield name, over_local(part.sharded.param, local.clone() if few else _over_memory_of(local, handed))
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
