"""ArenaStager: asynchronous saves that do not copy the arena.

::

    state dict ──▶ tensors at home ─────▶ tensors over the same memory, lent to the writer ─┐
               ──▶ everything else ─copy─▶ one pinned buffer, kept from save to save ───────┴─▶ staged dict ──▶ writer

=================  ====================================================================================================
noun               meaning
=================  ====================================================================================================
staged dict        what ``dcp.async_save`` hands to its writing thread: it does not change, whatever training does
Loan               the memory of one staged dict; it ends when the last tensor over it is gone, or the writing thread
writing thread     whoever first looks into the staged dict from another thread than the one that staged it
=================  ====================================================================================================

A home that is lent is not written: the next steps store into a spare home (``OffloadPolicy.snapshot_bytes``), or wait.
"""

import copy
import ctypes
import logging
import threading
import time
import weakref
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager
from torch.optim import Optimizer

from ..arena import Region
from ..buckets import aligned
from ..engine import Engine
from ..fsdp import is_dtensor, local_shard, over_local
from ..lending import Lending
from ..shards import Home, describe_value, leaves_of
from ..update import ENGINE_ATTRIBUTE

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.005


class ArenaStager(AsyncStager):
    """A stager for ``dcp.async_save`` that lends the homes of offloaded state to the writer instead of copying them.

    ::

        stager = ArenaStager(optimizer)
        future = dcp.async_save(state_dict, checkpoint_id=path, async_stager=stager)
        ...                                    # train on; the file gets the state of the call
        future.result()

    ``async_save`` returns when everything else (the model's shards, counters, state that is resident on the device) is
    copied to host memory that the stager keeps for the next save. Put enough ``OffloadPolicy.snapshot_bytes`` aside for
    the state (as many bytes as the state has), or the first step during a save waits for its end.

    One save at a time: the collectives of two would mix. Writing in place into a home during a save (your own
    ``copy_``, a ``dcp.load`` into a state dict that did not come from ``get_optimizer_state_dict(for_load=True)``)
    spoils it. ``AsyncCheckpointerType.PROCESS`` is refused: give that torch's ``DefaultStager``.

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
        # Weakly, as everything of ours: dropping an optimizer frees its arena.
        self._optimizers = [weakref.ref(_check_offloaded(optimizer)) for optimizer in optimizers]
        self._when_busy = when_busy
        self._buffer: Region | None = None
        self._loan: _Loan | None = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """``state_dict`` as it is now, to be written while training goes on. Called by ``dcp.async_save``.

        Waits for stores of the last step and for the copy of what is not at home. No collective.

        Raises:
            RuntimeError: a save is still running (``when_busy="error"``), the optimizer's state is half updated, or
                ``state_dict`` was made before the last step and state has moved since.
        """
        self._wait_for_writer()
        engines = [engine for optimizer in self._optimizers if (engine := _engine_of(optimizer())) is not None]
        for engine in engines:
            engine.check_usable("dcp.async_save()")
            engine.wait_all_home()
        found = _Leaves(engines)
        found.look_into(state_dict)
        loan = _Loan()
        found.take(loan, self._buffer_for(found.copied, engines))
        self._loan = loan
        return _StagedDict(loan, found.replaced(state_dict))

    def close(self) -> None:
        """Wait for the writer, then free the buffer."""
        if self._loan is not None:
            self._loan.wait()
        self._loan = self._buffer = None

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


class _Loan:
    """The memory of one staged dict, and who reads it: a :class:`~fsdp_offload.shards.Reader` of homes.

    Ends when the tensors over it are gone. A writer that failed may leave its tensors to the exception that it raised,
    and that to whoever holds the future; but its thread ends, so that counts as well.
    """

    def __init__(self) -> None:
        self._memory: list[weakref.ref[Any]] = []
        self._owner = threading.current_thread()
        self._thread: threading.Thread | None = None

    def tensor(self, like: Tensor) -> Tensor:
        """A tensor over the memory of ``like``, on the CPU, of which this loan knows when it goes."""
        nbytes = like.numel() * like.element_size()
        memory = (ctypes.c_ubyte * nbytes).from_address(like.data_ptr())
        memory.keeps = like  # type: ignore[attr-defined]  # and with it the arena
        self._memory.append(weakref.ref(memory))
        return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())

    def is_looked_into(self) -> None:
        """Called in whatever thread looks into the staged dict."""
        thread = threading.current_thread()
        if self._thread is None and thread is not self._owner:
            self._thread = thread

    def is_reading(self) -> bool:
        """Whether the writer may still look at what it was given."""
        if self._thread is not None and not self._thread.is_alive():
            return False
        while self._memory and self._memory[-1]() is None:  # asked often; this looks at each only once
            self._memory.pop()
        return bool(self._memory)

    def wait(self) -> None:
        """Block until it no longer does."""
        while self.is_reading():
            if self._thread is None or self._thread is threading.current_thread():
                time.sleep(_POLL_SECONDS)
            else:
                self._thread.join(_POLL_SECONDS)  # a thread of a pool outlives the save: its tensors tell then


class _StagedDict(dict[str, Any]):
    """The top level of what is handed to the writer: tells the loan which thread that is."""

    def __init__(self, loan: _Loan, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._loan = loan

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """As ``dict.items``."""
        self._loan.is_looked_into()
        return super().items()

    def __iter__(self) -> Iterator[str]:
        self._loan.is_looked_into()
        return super().__iter__()

    def __getitem__(self, key: str) -> Any:
        self._loan.is_looked_into()
        return super().__getitem__(key)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "ArenaStager lends memory of this process, which a process of its own cannot read. Use "
            "AsyncCheckpointerType.THREAD, or torch's DefaultStager, which copies."
        )


class _Leaves:
    """The dense tensors of a state dict: which of them are at home, and which have to be copied."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._homes = {
            address: (engine.lending, *found)
            for engine in engines
            for address, found in engine.lending.homes_by_address().items()
        }
        self._lent: dict[int, Tensor] = {}  # by address
        self._copied: dict[_Key, Tensor] = {}
        self._staged: dict[_Key, Tensor] = {}
        self._homes_lent: dict[Lending, dict[int, Home]] = {}

    @property
    def copied(self) -> list[Tensor]:
        """What has to be copied."""
        return list(self._copied.values())

    def look_into(self, values: Any) -> None:
        """Note every tensor inside ``values``."""
        for value in _tensors_in(values):
            for leaf in _leaves(value):
                self._note(leaf)

    def _note(self, leaf: Tensor) -> None:
        address = leaf.data_ptr()
        found = self._homes.get(address) if leaf.device.type == "cpu" and leaf.numel() else None
        if found is None:
            self._copied[_key(leaf)] = leaf
            return
        lending, home, is_current = found
        if not is_current:
            raise RuntimeError(
                "dcp.async_save: this state dict was made before the last step, and its tensors hold old state. Make "
                "a new one with get_optimizer_state_dict() right before saving."
            )
        self._homes_lent.setdefault(lending, {})[id(home)] = home
        self._lent[address] = leaf

    def take(self, loan: _Loan, buffer: Region) -> None:
        """Make what is staged for every leaf; returns when all copies have arrived."""
        self._lent = {address: loan.tensor(leaf) for address, leaf in self._lent.items()}
        self._copy(loan, buffer)
        for lending, homes in self._homes_lent.items():
            lending.lend(loan, homes.values())

    def _copy(self, loan: _Loan, buffer: Region) -> None:
        offset = 0
        ordered = sorted(self._copied.items(), key=lambda item: _is_counter(item[1]))
        for counters, run in groupby(ordered, key=lambda item: _is_counter(item[1])):
            if counters:
                offset = self._copy_counters(loan, buffer, dict(run), offset)
                continue
            for key, leaf in run:
                nbytes = leaf.numel() * leaf.element_size()
                target = buffer.range(offset, nbytes, leaf.dtype, tuple(leaf.shape), _dense_stride(leaf))
                offset += aligned(nbytes)
                target.copy_(leaf, non_blocking=True)
                self._staged[key] = loan.tensor(target) if nbytes else target
        for device in {leaf.device for leaf in self._copied.values() if leaf.device.type != "cpu"}:
            torch.accelerator.current_stream(device).synchronize()

    def _copy_counters(self, loan: _Loan, buffer: Region, counters: "dict[_Key, Tensor]", offset: int) -> int:
        """Thousands of single elements: one copy for all of a dtype and device."""
        kinds: dict[tuple[torch.dtype, torch.device], list[_Key]] = {}
        for key, leaf in counters.items():
            kinds.setdefault((leaf.dtype, leaf.device), []).append(key)
        for (dtype, _), keys in kinds.items():
            together = torch.stack([counters[key] for key in keys])
            nbytes = together.numel() * dtype.itemsize
            target = buffer.range(offset, nbytes, dtype, tuple(together.shape), (1,))
            offset += aligned(nbytes)
            target.copy_(together, non_blocking=True)
            for number, key in enumerate(keys):
                self._staged[key] = loan.tensor(target[number])
        return offset

    def replaced(self, values: Any) -> Any:
        """``values`` with everything that training may change exchanged for what is staged."""
        if isinstance(values, Mapping):
            return {key: self.replaced(value) for key, value in values.items()}
        if isinstance(values, list):
            return [self.replaced(value) for value in values]
        if isinstance(values, tuple) and type(values) is tuple:
            return tuple(self.replaced(value) for value in values)
        if isinstance(values, Tensor):
            return self._replaced_tensor(values)
        return values if isinstance(values, _UNCHANGING) else copy.deepcopy(values)

    def _replaced_tensor(self, value: Tensor) -> Tensor:
        local = local_shard(value)
        if type(local) in _PLAIN:
            staged = self._for(local)
            return over_local(value, staged) if is_dtensor(value) else staged
        return describe_value(value).build([self._for(leaf) for leaf in leaves_of(value)])

    def _for(self, leaf: Tensor) -> Tensor:
        lent = self._lent.get(leaf.data_ptr()) if leaf.device.type == "cpu" and leaf.numel() else None
        return lent if lent is not None else self._staged[_key(leaf)]


class _Key(NamedTuple):
    """The same for two tensors of the same elements: tied weights are copied once."""

    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_PLAIN = (Tensor, torch.nn.Parameter)
_UNCHANGING = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def _key(leaf: Tensor) -> _Key:
    return _Key(leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype, leaf.device)


def _is_counter(leaf: Tensor) -> bool:
    return leaf.dim() == 0


def _dense_stride(leaf: Tensor) -> tuple[int, ...]:
    return tuple(torch.empty_like(leaf, device="meta").stride())


def _tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors_in(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors_in(value)


def _leaves(value: Tensor) -> list[Tensor]:
    return [leaf.detach() for leaf in leaves_of(value)]


def _engine_of(optimizer: Optimizer | None) -> Engine | None:
    attachment = getattr(optimizer, "__dict__", {}).get(ENGINE_ATTRIBUTE)
    return None if attachment is None else attachment.engine


def _check_offloaded(optimizer: Optimizer) -> Optimizer:
    if _engine_of(optimizer) is None:
        raise ValueError(
            f"ArenaStager: expected an offloaded optimizer, got a {type(optimizer).__name__} that is not; call "
            "offload_optimizer() first."
        )
    return optimizer
