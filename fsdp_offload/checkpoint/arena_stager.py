"""ArenaStager: asynchronous saves that do not copy the arena.

::

    state dict ──▶ tensors at home ─────▶ tensors over the same memory, lent to the writer ─┐
               ──▶ everything else ─copy─▶ one pinned buffer, kept from save to save ───────┴─▶ staged dict ──▶ writer

``dcp.async_save`` hands the staged dict to its writing thread. A home that is lent is not written: the next steps store
into a spare home (``OffloadPolicy.snapshot_bytes``), or wait.
"""

import copy
import ctypes
import gc
import itertools
import logging
import math
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten, tree_leaves, tree_leaves_with_path, tree_unflatten

from ..api.wrapped import offloaded, optimizers_in
from ..device.arena import Region, aligned
from ..engine.engine import Engine, engine_of
from ..engine.homes import Lending
from ..fsdp.dtensor import local_shard, over_local
from ..policy import check_is, tells
from ..state.layout import dense_stride, describe_value, leaves_of
from ..state.shard import Reader, ShardHome
from .plain import refuse_templates

logger = logging.getLogger(__name__)

_Key = tuple[Any, ...]  # identifies a tensor's elements; equal for tied weights, which are copied once

_POLL_SECONDS = 0.005
_BEGIN_SECONDS = 60  # a writing thread starts within milliseconds; if it never does, training must not hang


class ArenaStager(AsyncStager):
    """A stager for ``dcp.async_save`` that lends the homes of offloaded state to the writer instead of copying them.

    ::

        stager = ArenaStager(optimizer)
        group = dist.new_group(backend="gloo")  # the writer's, not training's
        future = dcp.async_save(
            state, checkpoint_id=path, async_stager=stager, process_group=group
        )
        ...  # train on; the file gets the state of the call
        future.result()
        stager.close()  # raises if the last save's state was written in place

    ``async_save`` returns when everything else (the model's shards, counters, state that has no home on the host) is
    copied to host memory that the stager keeps for the next save. Reserve ``OffloadPolicy.snapshot_bytes`` for the
    state (a little more than its bytes), or the first step during a save waits until the save ends. Give
    ``planner=SavePlanner()``, too, and the save refuses what :func:`save` refuses.

    One save at a time, as the collectives of two would mix: a second one waits for the end of the first. Writing in
    place into a home during a save (your own ``copy_``, a ``dcp.load`` into a state dict without ``for_load=True``)
    spoils the file. Writes that torch's version counters show are logged when the save ends, and raise in the next
    step, the next save or :meth:`close`. The counters miss ``torch._foreach_*`` on ``param.detach()``, and NumPy.
    ``AsyncCheckpointerType.PROCESS`` is refused, with a TypeError in its future: give it torch's ``DefaultStager``.

    Args:
        optimizers: their state is lent while they are offloaded; everything else is copied.

    Raises:
        TypeError: an argument is no optimizer and holds none.
    """

    _synchronize_after_execute = False  # staging is complete when `stage` returns

    def __init__(self, *optimizers: Optimizer) -> None:
        # Weak references: dropping an optimizer frees its arena.
        found = optimizers_in([*tree_leaves(optimizers)], "ArenaStager") if optimizers else []
        self._optimizers = [weakref.ref(one) for one in found]
        self._buffer: Region | None = None
        self._loan: Loan | None = None

    @tells("async_stager=ArenaStager(optimizer)")  # for a call on the class instead of an instance
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Stage ``state_dict`` as it is now, to be written during training. Called by ``dcp.async_save``.

        Waits for the last save, for stores of the last step and for copies of values without a home. No collective.

        Raises:
            ValueError: ``state_dict`` was made with ``for_load=True``, and nothing was loaded into it; or it has state
                of an offloaded optimizer that the stager was not given.
            RuntimeError: the optimizer's state is half updated, or ``state_dict`` was made before the last step and
                state has moved since.
        """
        line = "dcp.async_save(state_dict, checkpoint_id=path, async_stager=stager)"
        check_is(state_dict, Mapping, "ArenaStager.stage: expected a dict", line)
        if self._loan is not None and self._loan.is_reading():
            logger.info("the last asynchronous save is still being written; waiting for it")
            self._loan.wait()
        engines = self._unspoiled_engines()
        for engine in engines:
            engine.check_usable("dcp.async_save()")
            engine.wait_all_home()
        values = {keystr(path): value for path, value in tree_leaves_with_path(state_dict)}
        if not set(refuse_templates(values, offloaded)) <= set(engines):
            raise ValueError(
                "ArenaStager: the state dict has state of an offloaded optimizer that the stager was not given, and "
                "that steps since may have changed. Write ArenaStager(optimizer), with all whose state is saved."
            )
        collects = gc.isenabled()
        gc.disable()  # new objects would trigger a full collection, which takes longer than staging
        try:
            return self._staged(state_dict, engines)
        finally:
            if collects:
                gc.enable()

    def synchronize_staging(self) -> None:
        """Do nothing: staging is complete when :meth:`stage` returns."""

    def close(self) -> None:
        """Wait for the writer, then free the buffer.

        Raises:
            RuntimeError: state was written in place while the last save was being written; do not use that checkpoint.
        """
        if self._loan is not None:
            self._loan.wait()
        self._loan = self._buffer = None
        self._unspoiled_engines()

    def _unspoiled_engines(self) -> list[Engine]:
        """List the engines still attached; raise if state was written in place during the last save."""
        engines = [engine for optimizer in self._optimizers if (engine := engine_of(optimizer())) is not None]
        for engine in engines:
            engine.lending.check_unspoiled()
        return engines

    def _staged(self, state_dict: dict[str, Any], engines: Sequence[Engine]) -> "StagedDict":
        """Lend homes, and copy everything else that training may change."""
        values, structure = tree_flatten(state_dict)
        leaves = [leaves_of(value) for value in values]
        every = [*itertools.chain.from_iterable(leaves)]
        under = ((one.lending, one.plan.homes_under(every, "dcp.async_save")) for one in engines)
        homes = {at: (lending, home) for lending, found in under for at, home in found.items()}
        lent: dict[Lending, set[ShardHome]] = defaultdict(set)
        copied: dict[_Key, Tensor] = {}
        for leaf in every:
            found = homes.get(leaf.data_ptr()) if leaf.device.type == "cpu" else None
            # Not lent: a view of some columns, which starts at the home's first byte but has other strides.
            if found is None or leaf.stride() != dense_stride(leaf):
                copied.setdefault(_key(leaf), leaf.detach())
            else:
                lent[found[0]].add(found[1])
        copies = self._copies(copied, pin=all(engine.policy.pin_memory is not False for engine in engines))
        loan = Loan(filter(None, [self._buffer, *(region for engine in engines for region in engine.plan.regions)]))
        copies = {key: loan.tensor(made) for key, made in copies.items()}
        for number, (value, parts) in enumerate(zip(values, leaves, strict=True)):  # while the device copies
            staged = [copies[key] if (key := _key(leaf)) in copies else loan.tensor(leaf) for leaf in parts]
            if not isinstance(value, Tensor):
                values[number] = copy.deepcopy(value)
            elif type(local_shard(value)) in (Tensor, torch.nn.Parameter):  # the usual case, and the faster one
                values[number] = over_local(value, staged[0])
            else:
                values[number] = describe_value(value).build(staged)
        result = StagedDict(loan, tree_unflatten(values, structure))
        for lending, read in lent.items():  # last, so that a failed stage() lends nothing
            lending.lend(loan, read)
        for device in {leaf.device for leaf in copied.values() if leaf.device.type != "cpu"}:
            torch.accelerator.current_stream(device).synchronize()
        loan.seal()
        self._loan = loan
        return result

    def _copies(self, copied: Mapping[_Key, Tensor], *, pin: bool) -> dict[_Key, Tensor]:
        """Issue dense copies into the buffer, reusing the last save's if it is large enough; do not wait for them."""
        nbytes = sum(aligned(leaf.nbytes) for leaf in copied.values())
        if self._buffer is None or self._buffer.nbytes < nbytes:
            device = next((leaf.device for leaf in copied.values() if leaf.device.type != "cpu"), torch.device("cpu"))
            self._buffer = None  # free the old one first
            self._buffer = Region(nbytes, device=device, pin=pin and device.type != "cpu")
        made, offset = {}, 0
        for key, leaf in copied.items():
            target = self._buffer.range(offset, leaf.nbytes, leaf.dtype, tuple(leaf.shape), dense_stride(leaf))
            made[key] = target.copy_(leaf, non_blocking=True)
            offset += aligned(leaf.nbytes)
        return made


def _key(leaf: Tensor) -> _Key:
    return leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype, leaf.device


class Loan(Reader):
    """The memory of one staged dict, and its reader: the thread that writes it.

    DCP does not tell a stager when the writer is done. The loan ends when the tensors over its memory are deleted, or
    with the writing thread: after a failure, the future's exception may keep the tensors alive.
    """

    def __init__(self, regions: Iterable[Region]) -> None:
        """Lend ``regions``, in which the tensors of the dict lie."""
        self._memory: list[tuple[range, Any]] = []  # addresses and memory, until seal()
        self._alive: list[weakref.ref[Any]] = []
        self.owner = threading.current_thread()
        self.thread: threading.Thread | None = None  # the writer's
        self._looks: list[Callable[[], object]] = []
        self._is_over = False
        for region in regions:
            if region.nbytes:
                begin = region.bytes.data_ptr()
                memory = (ctypes.c_ubyte * region.nbytes).from_address(begin)
                memory.keeps = region  # type: ignore[attr-defined]  # while any tensor over it lives
                self._memory.append((range(begin, begin + region.nbytes), memory))
                self._alive.append(weakref.ref(memory, self._is_gone))

    def tensor(self, like: Tensor) -> Tensor:
        """Return a CPU tensor over the memory of ``like``, whose deletion ends this loan."""
        if not like.numel():
            return like
        at = like.data_ptr()
        addresses, memory = next(pair for pair in self._memory if at in pair[0])
        flat = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=at - addresses.start)
        return flat if like.dim() == 1 else flat.as_strided(like.shape, like.stride())

    def seal(self) -> None:
        """Finish the loan: from now on only its tensors hold the memory."""
        self._memory.clear()
        self._is_gone(None)

    def when_over(self, look: Callable[[], object]) -> None:
        """Call ``look`` in the writing thread when the save has ended, before the homes may be written again."""
        self._looks.append(look)

    def _is_gone(self, _: object) -> None:
        if not any(memory() is not None for memory in self._alive):
            looks, self._looks = self._looks, []
            for look in looks if self.is_reading() else ():
                look()
            self._is_over = True

    def is_reading(self) -> bool:
        """Return whether the writer may still read the lent memory."""
        if self.thread is not None and not self.thread.is_alive():
            self._looks.clear()  # later writes to the memory do not reach a file
            return False
        return not self._is_over

    def wait(self) -> None:
        """Block until the writer has finished; raise a RuntimeError if no thread begins to write."""
        give_up = time.monotonic() + _BEGIN_SECONDS
        while self.is_reading():
            if time.monotonic() > give_up:
                if self.thread is None:
                    raise RuntimeError(
                        f"an asynchronous save was staged, and for {_BEGIN_SECONDS} s no thread has begun to write it. "
                        "Let go of the future of an async_save that failed, and of what ArenaStager.stage() has "
                        "returned."
                    )
                give_up = math.inf
                logger.warning(
                    "training has waited for %d s for the writer of an asynchronous save. If it has failed, let go of "
                    "its future, whose exception holds what it was given.",
                    _BEGIN_SECONDS,
                )
            if self.thread is None or self.thread is threading.current_thread():
                time.sleep(_POLL_SECONDS)
            else:
                self.thread.join(_POLL_SECONDS)  # not longer: a pool's thread outlives the save


class StagedDict(dict[str, Any]):
    """Dict for the writer: notes the writing thread in the loan, and empties itself when that thread reads the items.

    DCP keeps the dict longer than it writes: in the work item of its thread, and in the traceback of a failure.
    """

    def __init__(self, loan: Loan, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._loan = loan
        self._is_handed_over = False

    def __getattribute__(self, name: str) -> Any:
        # The writing thread first calls isinstance(), which reads __class__, even if the save then fails at once.
        loan = super().__getattribute__("_loan")
        if loan.thread is None and threading.current_thread() is not loan.owner:
            loan.thread = threading.current_thread()
        return super().__getattribute__(name)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Return the items as ``dict`` does; in the writing thread only once."""
        if self._is_handed_over:
            raise RuntimeError("a staged dict is written once, and the writer has it. Call stage() again.")
        if threading.current_thread() is self._loan.owner:
            return super().items()
        self._loan.thread = threading.current_thread()  # replaces threads that only looked, as profilers do
        handed = dict(super().items())
        self.clear()
        self._is_handed_over = True
        return handed.items()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("ArenaStager lends memory of this process: use AsyncCheckpointerType.THREAD, or DefaultStager")
