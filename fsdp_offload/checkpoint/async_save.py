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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager
from torch.optim import Optimizer

from ..core.attached import Engine, engine_of, find_offloaded
from ..core.lending import Lending
from ..device.arena import Region
from ..planning.buckets import aligned
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
            loan, staging = Loan(), _Staging(engines)
            buffer = self._buffer_for(staging.look_into(state_dict), engines)
            loan.add(region for engine in engines for region in engine.plan.regions)
            loan.add([buffer])
            staged = StagedDict(loan, staging.staged(state_dict, loan, buffer))
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

    def _buffer_for(self, leaves: "list[Tensor]", engines: Sequence[Engine]) -> Region:
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
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._homes = {
            address: (engine.lending, *found)
            for engine in engines
            for address, found in engine.lending.homes_by_address().items()
        }
        self._lent: dict[Lending, dict[int, Home]] = {}
        self._leaves: list[Tensor] = []  # of all tensors, in the order in which they are found
        self._copied: dict[_Key, Tensor] = {}
        self._keys: list[_Key | None] = []  # of each leaf; None is at home

    def look_into(self, values: Any) -> list[Tensor]:
        """Note every tensor inside ``values``. Returns what has to be copied."""
        for value in _tensors_in(values):
            local = local_shard(value)
            for leaf in (local,) if type(local) in _PLAIN else leaves_of(value):
                self._leaves.append(leaf)
                self._keys.append(None if self._is_at_home(leaf) else self._to_copy(leaf))
        return list(self._copied.values())

    def _is_at_home(self, leaf: Tensor) -> bool:
        found = self._homes.get(leaf.data_ptr()) if leaf.device.type == "cpu" else None
        if found is None:
            return False
        lending, home, is_current = found
        if not is_current:
            raise RuntimeError(
                "dcp.async_save: this state dict was made before the last step, and its tensors hold old state. Make "
                "a new one with get_optimizer_state_dict() right before saving."
            )
        if leaf.stride() != _dense_stride(leaf):
            return False  # some columns of a home: they are read as they are, not from the home's first byte on
        self._lent.setdefault(lending, {})[id(home)] = home
        return True

    def _to_copy(self, leaf: Tensor) -> "_Key":
        key = _Key(leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
        self._copied.setdefault(key, leaf.detach())
        return key

    def staged(self, values: Any, loan: Loan, buffer: Region) -> Any:
        """Stage ``values`` as they are now; returns when all copies have arrived."""
        copies = self._issue_copies(loan, buffer)
        leaves = iter(
            [
                loan.tensor(leaf) if key is None else copies[key]
                for leaf, key in zip(self._leaves, self._keys, strict=True)
            ]
        )
        replaced = _replaced(values, leaves)  # while the device copies
        for lending, homes in self._lent.items():  # last: whoever could not stage has lent nothing
            lending.lend(loan, homes.values())
        for device in {leaf.device for leaf in self._copied.values() if leaf.device.type != "cpu"}:
            torch.accelerator.current_stream(device).synchronize()
        return replaced

    def _issue_copies(self, loan: Loan, buffer: Region) -> "dict[_Key, Tensor]":
        targets: dict[_Key, Tensor] = {}
        offset = 0
        for key, leaf in self._copied.items():
            if not key.shape:
                continue
            nbytes = leaf.numel() * leaf.element_size()
            targets[key] = buffer.range(offset, nbytes, leaf.dtype, tuple(leaf.shape), _dense_stride(leaf))
            targets[key].copy_(leaf, non_blocking=True)
            offset += aligned(nbytes)
        counters: dict[tuple[torch.dtype, torch.device], list[_Key]] = {}
        for key in self._copied:
            if not key.shape:
                counters.setdefault((key.dtype, key.device), []).append(key)
        for keys in counters.values():
            # Thousands of single elements: one copy for all of a dtype and device.
            together = torch.stack([self._copied[key] for key in keys])
            nbytes = together.numel() * together.element_size()
            target = buffer.range(offset, nbytes, together.dtype, tuple(together.shape), (1,))
            target.copy_(together, non_blocking=True)
            targets.update(zip(keys, target.unbind(), strict=True))
            offset += aligned(nbytes)
        return {key: loan.tensor(target) for key, target in targets.items()}


class _Key(NamedTuple):
    """Identity of a tensor's elements, equal for tied weights, so that they are copied once."""

    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _replaced(values: Any, leaves: Iterator[Tensor]) -> Any:
    """``values`` with every tensor made anew of the next of ``leaves``, and with copies of what else may change."""
    if isinstance(values, Tensor):
        local = local_shard(values)
        if type(local) not in _PLAIN:
            return describe_value(values).build([next(leaves) for _ in leaves_of(values)])
        return next(leaves) if local is values else over_local(values, next(leaves))
    if isinstance(values, Mapping):
        return {key: _replaced(value, leaves) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)([_replaced(value, leaves) for value in values])
    return values if isinstance(values, _UNCHANGING) else copy.deepcopy(values)


_PLAIN = (Tensor, torch.nn.Parameter)
_UNCHANGING = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


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


def _tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors_in(value)
    elif type(values) in (list, tuple):
        for value in values:
            yield from _tensors_in(value)
