"""ArenaStager: asynchronous saves that do not copy the arena.

::

    state dict ──▶ tensors at home ─────▶ tensors over the same memory, lent to the writer ─┐
               ──▶ everything else ─copy─▶ one pinned buffer, kept from save to save ───────┴─▶ staged dict ──▶ writer

The staged dict is what ``dcp.async_save`` hands to its writing thread: it does not change, whatever training does. A
home that is lent is not written: the next steps store into a spare home (``OffloadPolicy.snapshot_bytes``), or wait.
"""

import copy
import gc
import logging
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager
from torch.optim import Optimizer

from ..core.engine import Engine, engine_of, find_offloaded
from ..core.lending import Lending
from ..device.arena import Region, aligned
from ..state.layout import describe_value, leaves_of
from ..state.shard import Home
from ..torch_compat.dtensor import local_shard, over_local
from .writer_loan import Loan, StagedDict

logger = logging.getLogger(__name__)


class ArenaStager(AsyncStager):
    """A stager for ``dcp.async_save`` that lends the homes of offloaded state to the writer instead of copying them.

    ::

        stager = ArenaStager(optimizer)
        future = dcp.async_save(state_dict, checkpoint_id=path, async_stager=stager)
        ...                                    # train on; the file gets the state of the call
        future.result()

    ``async_save`` returns when everything else (the model's shards, counters, state that has no home on the host) is
    copied to host memory that the stager keeps for the next save. Put enough ``OffloadPolicy.snapshot_bytes`` aside for
    the state (as many bytes as the state has), or the first step during a save waits for its end.

    One save at a time: the collectives of two would mix. Writing in place into a home during a save (your own
    ``copy_``, a ``dcp.load`` into a state dict that did not come from ``get_optimizer_state_dict(for_load=True)``)
    spoils the file, and is an error when the save has ended: in the next step, the next save or :meth:`close`, and in
    the log at once. ``AsyncCheckpointerType.PROCESS`` is refused, with a TypeError in its future: give that torch's
    ``DefaultStager``.

    Args:
        optimizers: offloaded optimizers; none is fine, everything is copied then.
        when_busy: what a second save does while one is running: ``"wait"`` for its end, or raise an ``"error"``.

    Raises:
        ValueError: an optimizer is not offloaded, or ``when_busy`` is something else.
    """

    _synchronize_after_execute = False  # staging is complete when `stage` returns

    def __init__(self, *optimizers: Optimizer, when_busy: Literal["wait", "error"] = "wait") -> None:
        if when_busy not in ("wait", "error"):
            raise ValueError(f"ArenaStager: when_busy must be 'wait' or 'error', got {when_busy!r}")
        for optimizer in optimizers:
            if find_offloaded(optimizer) is None:
                raise ValueError(
                    f"ArenaStager: expected an offloaded optimizer, got a {type(optimizer).__name__} that is not; call "
                    "offload_optimizer() first."
                )
        # Weakly, as everything of ours: dropping an optimizer frees its arena.
        self._optimizers = [weakref.ref(find_offloaded(optimizer)) for optimizer in optimizers]
        self._when_busy = when_busy
        self._buffer: Region | None = None
        self._loan: Loan | None = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Stage ``state_dict`` as it is now, to be written while training goes on. Called by ``dcp.async_save``.

        Waits for stores of the last step and for the copy of what is not at home. No collective.

        Raises:
            RuntimeError: a save is still running (``when_busy="error"``), the optimizer's state is half updated, or
                ``state_dict`` was made before the last step and state has moved since.
        """
        self._wait_for_writer()
        self._check_unspoiled()
        engines = self._engines()
        for engine in engines:
            engine.steps.check_usable("dcp.async_save()")
            engine.wait_all_home()
        with _no_garbage_collection():
            loan, staging = Loan(), _Staging(state_dict, engines)
            buffer = self._buffer_for(staging.copied.values(), engines)
            loan.add(region for engine in engines for region in engine.plan.regions)
            loan.add([buffer])
            staged = StagedDict(loan, staging.staged(loan, buffer))
            loan.seal()
        self._loan = loan
        return staged

    def synchronize_staging(self) -> None:
        """Nothing is left to wait for when :meth:`stage` returns."""

    def close(self) -> None:
        """Wait for the writer, then free the buffer.

        Raises:
            RuntimeError: state was written in place while the last save was being written; do not use that checkpoint.
        """
        if self._loan is not None:
            self._loan.wait()
        self._loan = self._buffer = None
        self._check_unspoiled()

    def _engines(self) -> list[Engine]:
        return [engine for optimizer in self._optimizers if (engine := engine_of(optimizer())) is not None]

    def _check_unspoiled(self) -> None:
        for engine in self._engines():
            engine.lending.check_unspoiled()

    def _wait_for_writer(self) -> None:
        if self._loan is None or not self._loan.is_reading():
            return
        if self._when_busy == "error":
            raise RuntimeError(
                "ArenaStager: the last asynchronous save is still being written. Wait for its future, save less often, "
                "or use ArenaStager(..., when_busy='wait')."
            )
        logger.info("the last asynchronous save is still being written; waiting for it")
        self._loan.wait()

    def _buffer_for(self, leaves: Collection[Tensor], engines: Sequence[Engine]) -> Region:
        """Host memory for copies of ``leaves``; the same as last time if it is large enough."""
        nbytes = sum(aligned(leaf.numel() * leaf.element_size()) for leaf in leaves)
        if self._buffer is None or self._buffer.nbytes < nbytes:
            device = next((leaf.device for leaf in leaves if leaf.device.type != "cpu"), torch.device("cpu"))
            pin = device.type != "cpu" and all(engine.policy.pin_memory is not False for engine in engines)
            self._buffer = None  # free the old one first
            self._buffer = Region(nbytes, device=device, pin=pin)
        return self._buffer


class _Staging:
    """Makes the staged dict: what is at home is lent, everything else that training may change is copied.

    Thousands of tensors go through here while training stands still, so it looks at each of them three times only: to
    find its dense tensors (*leaves*), to stage those, and to put it together again.

    Attributes:
        copied: leaves that are not at home.
    """

    def __init__(self, state_dict: dict[str, Any], engines: Sequence[Engine]) -> None:
        self._homes = {
            address: (engine.lending, *found)
            for engine in engines
            for address, found in engine.lending.homes_by_address().items()
        }
        self._lent: dict[Lending, dict[int, Home]] = {}
        self.copied: dict[_Key, Tensor] = {}
        self._state_dict = state_dict
        self._tensors = [(tensor, _leaves_of(tensor)) for tensor in _tensors_in(state_dict)]
        self._keys = [self._key_of(leaf) for _, leaves in self._tensors for leaf in leaves]

    def _key_of(self, leaf: Tensor) -> "_Key | None":
        """``None``: it is at home."""
        found = self._homes.get(leaf.data_ptr()) if leaf.device.type == "cpu" else None
        if found is not None and not found[2]:
            raise RuntimeError(
                "dcp.async_save: this state dict was made before the last step, and its tensors hold old state. Make "
                "a new one with get_optimizer_state_dict() right before saving."
            )
        # Some columns of a home are read as they are, not from the home's first byte on.
        if found is None or leaf.stride() != _dense_stride(leaf):
            key = _Key(leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
            self.copied.setdefault(key, leaf.detach())
            return key
        lending, home, _ = found
        self._lent.setdefault(lending, {})[id(home)] = home
        return None

    def staged(self, loan: Loan, buffer: Region) -> dict[str, Any]:
        """The state dict as it is now, over other memory; returns when all copies have arrived."""
        copies, keys = self._issue_copies(loan, buffer), iter(self._keys)
        tensors = (
            _over(tensor, [loan.tensor(leaf) if (key := next(keys)) is None else copies[key] for leaf in leaves])
            for tensor, leaves in self._tensors
        )
        staged: dict[str, Any] = _replaced(self._state_dict, tensors)  # while the device copies
        for lending, homes in self._lent.items():  # last: whoever could not stage has lent nothing
            lending.lend(loan, homes.values())
        for device in {leaf.device for leaf in self.copied.values() if leaf.device.type != "cpu"}:
            torch.accelerator.current_stream(device).synchronize()
        return staged

    def _issue_copies(self, loan: Loan, buffer: Region) -> "dict[_Key, Tensor]":
        targets: dict[_Key, Tensor] = {}
        counters: dict[tuple[torch.dtype, torch.device], list[_Key]] = {}
        offset = 0

        def copy_of(leaf: Tensor) -> Tensor:
            nonlocal offset
            nbytes = leaf.numel() * leaf.element_size()
            target = buffer.range(offset, nbytes, leaf.dtype, tuple(leaf.shape), _dense_stride(leaf))
            offset += aligned(nbytes)
            return target.copy_(leaf, non_blocking=True)

        for key, leaf in self.copied.items():
            if key.shape:
                targets[key] = copy_of(leaf)
            else:
                counters.setdefault((key.dtype, key.device), []).append(key)
        for keys in counters.values():  # thousands of single elements: one copy for all of a dtype and device
            together = copy_of(torch.stack([self.copied[key] for key in keys]))
            targets.update(zip(keys, together.unbind(), strict=True))
        return {key: loan.tensor(target) for key, target in targets.items()}


class _Key(NamedTuple):
    """Identity of a tensor's elements, equal for tied weights, so that they are copied once."""

    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_PLAIN = (Tensor, torch.nn.Parameter)
_UNCHANGING = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def _tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping) or type(values) in (list, tuple):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _tensors_in(value)


def _replaced(values: Any, tensors: Iterator[Tensor]) -> Any:
    """``values`` with the next of ``tensors`` for every tensor, and with copies of what else may change."""
    if isinstance(values, Tensor):
        return next(tensors)
    if isinstance(values, Mapping):
        return {key: _replaced(value, tensors) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)([_replaced(value, tensors) for value in values])
    return values if isinstance(values, _UNCHANGING) else copy.deepcopy(values)


def _leaves_of(value: Tensor) -> Sequence[Tensor]:
    local = local_shard(value)
    return (local,) if type(local) in _PLAIN else leaves_of(value)


def _over(value: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """``value`` over other ``leaves``."""
    local = local_shard(value)
    if type(local) not in _PLAIN:
        return describe_value(value).build(leaves)
    return leaves[0] if local is value else over_local(value, leaves[0])


def _dense_stride(leaf: Tensor) -> tuple[int, ...]:
    if leaf.is_contiguous():
        return leaf.stride()
    return torch.empty_like(leaf, device="meta").stride()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """So many new objects would set it off, and a full collection takes longer than all the rest."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
