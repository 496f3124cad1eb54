"""Make every step a checkpoint: homes are files in memory, which outlive a killed process; a record names valid ones.

::

    commit 41 ─▶ its homes count as read (R4): updates of the next step go to the spare homes
        └─▶ its stores have ended ─▶ record 41 is written ─▶ the homes of commit 40 are free once all ranks are here:
                                                             no rank reduces a gradient of the next step earlier

So each rank has the homes of the newest commit that all ranks have, no matter when a rank is killed.
"""

import logging
import os
import pickle
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ..api.attach import offload_optimizer, remove_offload
from ..api.wrapped import Attachment, attached, attachment_of, optimizers_in
from ..core.loop import Core
from ..core.packing import place_homes
from ..device.arena import Region
from ..device.host_limits import check_host_memory, memory_is_replaced
from ..device.lanes import Mark
from ..device.worker import Worker
from ..engine.engine import Engine, states_of
from ..engine.homes import ArenaHome, home_of, versions_of
from ..fsdp.dtensor import (
    canonical_fqn,
    has_inner_tensors,
    is_dtensor,
    local_shard,
    placements_of,
    version_of,
    world_size,
)
from ..fsdp.fully_shard import parameters_of
from ..policy import OffloadPolicy, listed, tells
from ..state.layout import params_of
from ..state.shard import ShardHome
from .commit import AT_HOME, AtHome, Commit, record_of, tree_of
from .folder import RankFolder, free_bytes_at, newest_commit

logger = logging.getLogger(__name__)

_FORMAT = 2
"""Version of the files' contents and layout."""


class Recoverable:
    """Commits steps of one optimizer to a folder; see :func:`recoverable`.

    Attributes:
        commits: number of the last commit, counted over all processes that have trained in the folder.
        extra: in a process that has recovered, the ``extra`` of the recovered commit; else ``None``.
        is_left: closed without deleting the commits: no step may write the homes any more.
    """

    stores_kept = True

    def __init__(self, optimizer: Optimizer, attachment: Attachment, folder: RankFolder) -> None:
        engine = attachment.engine
        self._optimizer, self._engine, self._model = weakref.ref(optimizer), weakref.ref(engine), attachment.model
        self.folder, self._core = folder, weakref.ref(engine.core)
        self.commits, self.extra = 0, None
        self._writer = Worker("fsdp_offload commits", engine.device)
        self._pending: Commit | None = None
        self._newest: Commit | None = None
        self._before = 0  # number of the newest commit when the last step began
        self._watches = False  # from a commit until the next reduction or step
        self._has_reduced = False  # gradients were reduced in this process: all ranks have begun
        self.is_left = False
        known = {*params_of(optimizer), *engine.weights.parts}
        theirs = {} if self._model is None else parameters_of(self._model() or nn.Module())
        self._theirs = {param: (name, version_of(param)) for param, name in theirs.items() if param not in known}
        self.arenas = [one for one in engine.plan.all_arenas if one.regions[0].nbytes]
        self._on_device = [one for one in params_of(optimizer) if one not in engine.weights.parts]
        self._places = place_homes([local_shard(one).nbytes] for one in self._on_device)
        self._offsets = {param: at for param, (at,) in zip(self._on_device, self._places.offsets, strict=True)}
        self._files: list[Region] = []
        self._leave = weakref.finalize(self, folder.leave, deletes=False)
        self._leave.atexit = False

    @property
    def needed_bytes(self) -> int:
        """Return the bytes of all files of this rank."""
        return 2 * (self._places.nbytes + sum(one.regions[0].nbytes for one in self.arenas))

    # The memory -------------------------------------------------------------------------------------------------------

    def move(self, engine: Engine, optimizer: Optimizer, *, copies: bool) -> None:
        """Move all homes into the files; without ``copies``, the files have the contents already."""
        states = states_of(optimizer).unwaited

        def region(name: str, nbytes: int, breaks: Sequence[int]) -> Region:
            with self.folder.file(name, nbytes, makes=copies) as file:
                pin = engine.policy.pins(engine.device.type)
                return Region(nbytes, device=engine.device, pin=pin, breaks=breaks, file=file)

        engine.settle()
        engine.lending.wait()
        for number, arena in enumerate(self.arenas):
            taken = region(f"homes-{number}-0", arena.regions[0].nbytes, arena.layout.breaks)
            engine.failure = f"moving its homes into {self.folder.path} did not come to its end"
            arena.move_to(taken, states.get, copies=copies)
            for home in _item_homes(engine):
                home.follow(anew=True)  # frees the old memory
            if copies:  # else the homes have other values until go_on() ends
                engine.failure = ""
            arena.take_spare(partial(region, f"homes-{number}-1"))
        if self._places.nbytes:
            both = (f"device-{number}" for number in range(2))
            self._files = [region(name, self._places.nbytes, self._places.breaks) for name in both]

    def layout(self, engine: Engine, optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
        """Describe, in types of JSON, all that must be equal for a recovery."""
        names = {param: canonical_fqn(model, name) for param, name in parameters_of(model).items()}
        described: dict[str, Any] = {
            "version": [_FORMAT, torch.__version__],
            "rank": [_rank(), world_size()],
            "ranks_here": min(world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))),
            "optimizer": f"{engine.cls.__module__}.{engine.cls.__qualname__}",
            "groups": [[names.get(one, "") for one in group["params"]] for group in optimizer.param_groups],
        }
        for param, shard in engine.plan.shards.items():
            state = {name: list(map(str, value.leaves)) for name, value in shard.layout.values.items()}
            sizes = [list(param.shape), list(local_shard(param).shape), str(param.dtype), str(placements_of(param))]
            described[names.get(param, shard.name)] = [*sizes, state]
        described |= {f"homes {at}": list(map(list, one.layout.offsets)) for at, one in enumerate(self.arenas)}
        described["buffers"] = {name: [list(one.shape), str(one.dtype)] for name, one in _saved_buffers(model)}
        return described | {"on the device": list(self._offsets.values())}

    def _of_device(self, param: Tensor, which: int) -> Tensor:
        """Return the bytes of a parameter that stays on the device, in file ``which``: flat, uint8."""
        return self._files[which].bytes[self._offsets[param] :][: local_shard(param).nbytes]

    def _store_parameters(self, core: Core, which: int) -> None:
        """Copy all parameters on the device to file ``which``: their versions miss writes through ``.data``."""
        copies = [
            (self._of_device(one, which), local_shard(one).detach().reshape(-1).view(torch.uint8))
            for one in self._on_device
            if local_shard(one).numel()
        ]
        if copies:
            store = core.lanes.store
            store.wait(core.lanes.compute.mark(), *core.updated.values())  # R3: all that has written the parameters
            store.copy(copies)
            mark = store.mark()
            for item in core.weights.values():
                if not item.nbytes:
                    item.used["store"] = mark  # R1: the next update writes the parameters that this store reads

    # Commits ----------------------------------------------------------------------------------------------------------

    def commit(self, extra: object = None) -> None:
        """Commit the last step: a recovery finds it once its stores have ended. Does not wait for the stores.

        Call it between ``step()`` and the next backward, after all that belongs to the step: the scheduler, a write to
        weights or state. After a later write, call it again before the backward. Not every step needs a commit.

        Args:
            extra: all else that the loop needs to continue: states of schedulers, data and generators. It is pickled.

        Raises:
            RuntimeError: the backward has updated and ``step()`` was not called; an exception has left weights half
                updated; parameters are asleep; the model is gone; the optimizer is not offloaded any more, or has got
                other homes; another thread than the training's calls it.
        """
        engine, optimizer, core = self._still("commit()")
        if core.is_foreign:
            raise RuntimeError("commit() has to be called in the thread that trains.")
        engine.check_whole("commit()")
        if core.updates is not None:
            raise RuntimeError("commit() between a backward and step(): call it behind step().")
        if (model := None if self._model is None else self._model()) is None:
            raise RuntimeError(
                "commit(): the model that was given is gone, with its buffers. Give the one that is kept."
            )
        if not self._has_reduced:
            # Another rank may still have a commit with this number from the previous process.
            raise RuntimeError("commit() before the first step: there is nothing to go on from.")
        asleep = [
            one for one in self._on_device if (it := local_shard(one)).numel() and not it.untyped_storage().nbytes()
        ]
        if asleep:
            raise RuntimeError(f"commit(): {engine.names.get(asleep[0])} is asleep. Call reload_model(model) first.")
        if written := [name for param, (name, version) in self._theirs.items() if version_of(param) != version]:
            raise RuntimeError(
                f"commit(): {listed(written)} was written, and is not in the optimizer: a recovery would not find it. "
                "Add it to a param group (it may be frozen) before offload_optimizer(). If that was a load, call "
                "close(), and recoverable() again."
            )
        pickled = pickle.dumps(extra)
        self._wait_written(forgives=True)
        states = states_of(optimizer).unwaited
        engine.adopt_exchanged(states)
        homes, last = [one.home for one in engine.plan.housed()], self._newest
        has_begun = last is None or last.number == self._before
        which = 0 if last is None else last.which ^ has_begun
        if last is not None:
            # Both commits share homes that no step has left (no step, or no gradient); the loop may have written them.
            there = set(homes)
            both = zip(last.homes, last.seen, strict=False)
            if not has_begun or any(one in there and versions_of([one]) != version for one, version in both):
                self.folder.prune(() if has_begun else (self._before,))
        core.cache.flush()
        self._store_parameters(core, which)
        groups = [{name: value for name, value in one.items() if name != "params"} for one in optimizer.param_groups]
        others = {key: value for key, value in dict[Any, Any].items(optimizer.state) if not isinstance(key, Tensor)}
        copies: dict[int, Tensor] = {}  # copied now: the loop may write the originals before the next reduction
        tree = tree_map_only(
            Tensor,
            lambda one: copies.setdefault(id(one), one.detach().clone()),
            {"groups": groups, "others": others, "buffers": dict(_saved_buffers(model))},
        )
        plan, state = engine.plan, list[dict[str, Any]]()
        for param, shard in plan.shards.items():
            entry, its = states.get(param), shard.homes
            state.append({name: AT_HOME if value is its.get(name, AT_HOME) else value for name, value in entry.items()})
        tree |= {"homes": [one.which for one in plan.housed()], "device": which, "extra": pickled}
        record = record_of(tree | {"state": state}, core)
        made = Commit(self.commits + 1, which, homes, self._versions(homes), self._before, self._give_up, record)
        engine.lending.lend(made, homes)
        made.written = self._writer.submit(self._write, made, core.lanes.store.mark(), copies)
        self._pending, self.commits, self._watches = made, made.number, True

    def go_on(self, number: int, engine: Engine, optimizer: Optimizer, model: nn.Module) -> None:
        """Give the optimizer and the model the contents of commit ``number``, and continue from it."""
        record = tree_of(self.folder.read(number), engine.device)
        self.move(engine, optimizer, copies=False)
        engine.failure = f"the recovery from {self.folder.path} did not come to its end"
        states = states_of(optimizer).unwaited
        for one, which in zip(list(engine.plan.housed()), record["homes"], strict=True):
            if which != one.which:
                one.move(states.get)
        for home in _item_homes(engine):
            home.follow()
        with torch.no_grad():
            for (param, shard), entry in zip(engine.plan.shards.items(), record["state"], strict=True):
                if entry or states.has(param):
                    states.of(param).clear()
                    its = {name: shard.homes[name] for name, value in entry.items() if isinstance(value, AtHome)}
                    states.of(param).update(entry | its)
            dict.update(optimizer.state, record["others"])
            placed: dict[int, Tensor] = {}
            for group, its in zip(optimizer.param_groups, record["groups"], strict=True):
                for name, value in its.items():
                    _put(group, name, value, placed)
            for param in self._on_device:
                local = local_shard(param)
                saved = self._of_device(param, record["device"]).view(param.dtype)
                local.copy_(saved.view(local.shape))
            for name in dict(_saved_buffers(model)) | record["buffers"]:
                prefix, _, last = name.rpartition(".")
                _put(model.get_submodule(prefix)._buffers, last, record["buffers"].get(name), placed)
        for param, shard in engine.plan.shards.items():
            shard.existed = bool(states.get(param))
        engine.note_made(states)
        self.commits, self.extra, self._before = number, pickle.loads(record["extra"]), number
        self.folder.prune((number,))  # deletes newer ones, which other ranks do not have
        homes = [one.home for one in engine.plan.housed()]
        self._newest = Commit(number, record["device"], homes, self._versions(homes), number, self._give_up)
        engine.lending.lend(self._newest, homes)
        self._watches = True
        engine.failure = ""

    def _write(self, made: Commit, stored: Mark, copies: dict[int, Tensor]) -> None:
        stored.synchronize()  # R2, on the host
        copies.clear()  # not before: they were allocated on another stream than that of the store that reads them
        # The device has reduced gradients of this step, so all ranks have commit ``made.before``. The host did not know
        # that when it issued the step, which may have been long before.
        self.folder.prune(range(made.before, made.number))
        self.folder.write(made.number, made.record)
        made.record = {}

    def _wait_written(self, *, forgives: bool = False) -> None:
        """Block the host until the record of the last commit is written; this frees the previous commit's homes.

        Raises:
            OSError: the record could not be written. With ``forgives``, drop the commit instead.
        """
        made = self._pending
        if made is None:
            return
        if (error := made.written.exception()) is None:
            if self._newest is not None:
                self._newest.is_over = True
            self._newest = made
        elif forgives:
            made.is_over = True
        else:
            raise error
        self._pending = None  # last: an interrupted wait is waited for again

    def before_reduction(self) -> None:
        """Wait for the last commit: a reduced gradient tells the other ranks that this rank has it."""
        if self.is_left:
            raise RuntimeError(
                "close(deletes=False) has left the homes to a recovery, and an update would write them. Call "
                "remove_offload(optimizer), or recover(), before the next backward."
            )
        self._wait_written()
        if self._watches and self._newest is not None and self._newest.seen != self._versions(self._newest.homes):
            raise RuntimeError(
                "weights or optimizer state were written between commit() and the backward, so that a recovery would "
                "find some of the old values and some of the new ones. Write them before commit(), or call commit() "
                "again behind the write."
                if self._has_reduced
                else "weights or optimizer state were written between recover() and the backward, so that another "
                "recovery would find some of the old values and some of the new ones. Write them before recover(), "
                "which puts those of the commit in their place."
            )
        self._watches, self._has_reduced = False, True

    def begin(self) -> None:
        """Begin a step, which may write the homes of all commits but the newest one."""
        self.before_reduction()
        core = self._core()
        if world_size() > 1 and core is not None and not core.reductions.counts:
            raise RuntimeError(
                "a step without a backward since the last one: other ranks may not have come to the last commit yet. "
                "Give recoverable() an optimizer whose every step follows a backward."
            )
        if self._newest is not None:
            self._before = self._newest.number

    def _give_up(self) -> None:
        """Delete all commits: their homes are about to be written between two steps."""
        self._wait_written(forgives=True)
        if self._newest is not None:
            logger.warning(
                "%s: homes are written by a load, or by the loop. Nothing can be recovered until the next commit().",
                self.folder.path,
            )
            self.folder.prune()
            self._newest.is_over = True
            self._newest, self._watches = None, False

    def _versions(self, homes: Sequence[ShardHome]) -> list[object]:
        return [*(versions_of([one]) for one in homes), *(version_of(one) for one in self._on_device)]

    def _still(self, what: str) -> tuple[Engine, Optimizer, Core]:
        """Return the engine, the optimizer and the core; raise if its homes are no longer those in the files."""
        engine, optimizer = self._engine(), self._optimizer()
        attachment = attachment_of(optimizer)
        if engine is None or optimizer is None or attachment is None or attachment.engine is not engine:
            raise RuntimeError(f"{what}: its optimizer is not offloaded any more. Call recoverable() again.")
        arenas = [one for one in engine.plan.all_arenas if one.regions[0].nbytes]
        if self.is_left or self not in engine.contents.listeners or arenas != self.arenas:
            raise RuntimeError(
                f"{what}: close() was called, or the optimizer has got state for other parameters or options since. "
                "Call close(), and recoverable() again."
            )
        return engine, optimizer, engine.core

    def close(self, *, deletes: bool = True) -> None:
        """Stop committing; with ``deletes``, delete the commits and unlink the files. Homes stay in these files.

        Call it when all ranks have made their last commit. Without ``deletes``, the next backward raises, and the files
        take memory until you delete them.
        """
        self._wait_written(forgives=True)
        if self._newest is not None:
            self._newest.is_over = True
        if (engine := self._engine()) is not None and self in engine.contents.listeners:
            self.is_left = not deletes
            if deletes:
                engine.contents.listeners.remove(self)
        self._leave.detach()
        self.folder.leave(deletes=deletes)


def _item_homes(engine: Engine) -> list[ArenaHome[Any]]:
    state = [home_of(bucket) for bucket in engine.plan.buckets]
    return [*state, *(item.home for item in engine.weights.items.values() if isinstance(item.home, ArenaHome))]


def _put(there: dict[str, Any], name: str, value: Any, placed: dict[int, Tensor]) -> None:
    """Set ``there[name]`` to ``value``; write it into the present tensor, which a loop may hold, if that has its form.

    ``placed``: by id of a value, the tensor that holds it: one tensor for each value, and one value for each tensor.
    """
    mine: Any = there.get(name)
    if isinstance(value, Tensor) and id(value) not in placed:
        is_free = isinstance(mine, Tensor) and all(mine is not one for one in placed.values())
        placed[id(value)] = value
        if is_free:
            old, new = local_shard(mine), local_shard(value)
            forms = [(one.shape, one.dtype, one.device) for one in (old, new)]
            if forms[0] == forms[1] and 0 not in old.stride():  # an expanded one cannot be written
                old.copy_(new)
                placed[id(value)] = mine
    there[name] = placed.get(id(value), value)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _saved_buffers(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Iterate over names and local tensors of the buffers that a state dict of ``model`` has."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", local_shard(buffer)


# What users call ------------------------------------------------------------------------------------------------------


@tells("recoverable(optimizer, folder, model=model)")
def recoverable(
    optimizer: Optimizer,
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    policy: OffloadPolicy | Mapping[str, Any] | None = None,
) -> Recoverable:
    """Offload ``optimizer``, and keep in ``folder`` all that a new process needs to continue after a kill.

    ::

        if newest_commit(folder) is None:
            run = recoverable(optimizer, folder, model=model, policy=policy)
        else:                                       # in the process that takes over
            run = recover(optimizer, folder, model=model, policy=policy)
            scheduler.load_state_dict(run.extra["scheduler"])
        ...
            optimizer.step()
            scheduler.step()
            run.commit({"scheduler": scheduler.state_dict()})
        run.close()                                 # deletes the files

    Homes of state, and of parameters on the host, become files in ``folder``. Each home has a spare one, as updates
    must not write the homes of the last commit. Parameters on the device get two places in files. From then on, each
    update stores all that it changes, kept items included. The log says first how many bytes the files take.

    Args:
        optimizer: trains all of ``model``, and is between two steps. If it is offloaded already, its homes move.
        folder: in memory (a tmpfs such as ``/dev/shm``), the same for all ranks of a host.
        model: that of :func:`offload_optimizer`.
        policy: that of :func:`offload_optimizer`.

    Raises:
        TypeError: ``optimizer`` is no optimizer and holds none.
        ValueError: this training cannot be recovered (says why), or ``folder`` is not in memory.
        RuntimeError: ``optimizer`` is not offloaded and there is no ``model``; a step has begun; this is not the thread
            that trains; ``folder`` is in use, or has a commit that all ranks have.
        MemoryError: there is no room in ``folder``, or on the host; nothing has changed.
    """
    with _attached(optimizer, folder, "recoverable", model, policy) as (run, engine, target, its_model):
        if (number := newest_commit(folder)) is not None:
            raise RuntimeError(
                f"recoverable: {folder} has commit {number} of a run that has ended. Go on from it with "
                "recover(optimizer, folder), or delete the folder."
            )
        run.folder.clear()
        needed_bytes, layout = run.needed_bytes, run.layout(engine, target, its_model)
        logger.warning(
            "recoverable: takes %.1f GB in %s on each of %d ranks of this host, instead of %.1f GB of host memory",
            needed_bytes / 1e9, folder, layout["ranks_here"], sum(one.nbytes for one in engine.plan.regions) / 1e9,
        )  # fmt: skip
        free_bytes = free_bytes_at(Path(folder))
        if needed_bytes > free_bytes:
            raise MemoryError(
                f"recoverable: {folder} needs {needed_bytes} bytes for this rank, and {free_bytes} are free: twice the "
                "optimizer state and the parameters. Have that tmpfs made larger (docker run --shm-size), or shard "
                "over more ranks."
            )
        more_bytes = needed_bytes - sum(region.taken_bytes for arena in run.arenas for region in arena.regions)
        check_host_memory(more_bytes, engine.policy.host_limit_bytes, what="recoverable(): a second set of homes")
        run.move(engine, target, copies=True)
        run.folder.write_layout(layout)
    return run


@tells("recover(optimizer, folder, model=model)")
def recover(
    optimizer: Optimizer,
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    policy: OffloadPolicy | Mapping[str, Any] | None = None,
    commit: int | None = None,
) -> Recoverable:
    """Continue, in a new process, from the newest commit that all ranks have, and commit further steps there.

    Build the model and the optimizer as before: the files become the homes as they are, and no other host memory is
    taken. Weights, state, counters, param groups and buffers are those of the commit, bit for bit. ``extra`` of the
    result is what :meth:`Recoverable.commit` was given.

    Args:
        optimizer: has made no step. If it is offloaded already, there must be host memory for its homes, too.
        folder: that of :func:`recoverable`.
        model: that of :func:`offload_optimizer`.
        policy: that of :func:`offload_optimizer`, as before.
        commit: number of the commit; ``None``: that of :func:`newest_commit`.

    Raises:
        TypeError: ``optimizer`` is no optimizer and holds none.
        ValueError: there is no such commit, or it is of another training: other names, shapes, optimizer, policy,
            number of ranks or versions (says which). Nothing has changed.
        RuntimeError: as :func:`recoverable` raises.
    """
    with _attached(optimizer, folder, "recover", model, policy) as (run, engine, target, its_model):
        number = newest_commit(folder) if commit is None else commit
        if number is None or number not in run.folder.commits():
            raise ValueError(
                f"recover: {folder} has no {'commit that all ranks have' if number is None else f'commit {number}'}. "
                "Start with recoverable(optimizer, folder)."
            )
        wanted, there = run.layout(engine, target, its_model), run.folder.layout() or {}
        for name in {**there, **wanted}:
            if there.get(name) != wanted.get(name):
                both = f"{there.get(name)!r:.200} there, {wanted.get(name)!r:.200} here"
                raise ValueError(f"recover: {folder} is of another training: {name}: {both}.")
        run.go_on(number, engine, target, its_model)
    return run


@contextmanager
def _attached(
    optimizer: Optimizer,
    folder: str | os.PathLike[str],
    function: str,
    model: nn.Module | None,
    policy: OffloadPolicy | Mapping[str, Any] | None,
) -> Iterator[tuple[Recoverable, Engine, Optimizer, nn.Module]]:
    """Offload ``optimizer`` unless it is offloaded, check it, lock this rank's folder; undo all if the block raises."""
    first, *others = optimizers_in(optimizer, function)
    if others:
        raise RuntimeError(f"{function}: this {type(first).__name__} holds {1 + len(others)} optimizers; give one.")
    is_new, run = attachment_of(first) is None, None
    if is_new and model is None:
        raise RuntimeError(f"{function}: this {type(first).__name__} is not offloaded. Give model=model, and policy=.")
    if model is not None or policy is not None:
        with memory_is_replaced():
            offload_optimizer(optimizer, model=model, policy=policy, exist_ok=True)
    attachment = attached(first)
    listeners = attachment.engine.contents.listeners
    if running := [one for one in listeners if isinstance(one, Recoverable) and not one.is_left]:
        raise RuntimeError(
            f"{function}: this {type(first).__name__} commits to {running[0].folder.path} already. Call close() of "
            "that run first; if that is lost, remove_offload(optimizer)."
        )
    try:
        known = _check(first, attachment, function)
        run = Recoverable(first, attachment, RankFolder(Path(folder) / f"rank-{_rank():05d}"))
        run.folder.hold(world_size())
        yield run, attachment.engine, first, known
        listeners[:] = [*(one for one in listeners if not isinstance(one, Recoverable)), run]
    except BaseException:
        if run is not None:
            run.close(deletes=False)
        if is_new and not attachment.engine.failure:
            remove_offload(first)
        raise


def _check(optimizer: Optimizer, attachment: Attachment, function: str) -> nn.Module:
    """Return the model, or raise if ``optimizer`` cannot be made recoverable."""
    engine, kind = attachment.engine, type(optimizer).__name__
    model = None if attachment.model is None else attachment.model()
    if engine.core.is_foreign:
        raise RuntimeError(f"{function}: call it in the thread that trains.")
    if model is None:
        raise ValueError(
            f"{function}: names are those of the model, and it is not known. Call offload_optimizer(optimizer, "
            "model=model)."
        )
    params, wrong = dict.fromkeys(params_of(optimizer)), ""
    strangers = [name for param, name in parameters_of(model).items() if param.requires_grad and param not in params]
    odd = (one for one in params if has_inner_tensors(one) or not local_shard(one).is_contiguous())
    several = [engine.names.get(one, "a parameter") for one in odd]
    spread = [engine.names.get(one, "a parameter") for one in params if not _reduces_with_all(one)]
    if engine.layouts.capabilities.moves_whole:
        wrong = f"{kind} moves as a whole, and has no homes before its first step"
    elif engine.host is not None:
        wrong = "the CPU updates a part of the state in its home. Use OffloadPolicy(host_fraction=0)"
    elif attachment.parked.params:
        wrong = "Megatron keeps masters of its own. Use add_masters(optimizer)"
    elif engine.device.type not in ("cpu", "cuda") and engine.policy.pins(engine.device.type):
        wrong = "only CUDA page-locks files in memory. Use OffloadPolicy(pin_memory=False)"
    elif strangers:
        wrong = f"{listed(strangers)} are trained by another optimizer, which may be a step ahead. Train all by one"
    elif several:
        wrong = f"{listed(several)} are made of several tensors, or not contiguous"
    elif spread or (world_size() > 1 and attachment.hooks is None):
        wrong = (
            f"gradients of {listed(spread) or 'all parameters'} are not reduced over all ranks, whose commits could be "
            "several steps apart. Shard the model over all ranks, with replicas if need be, and nothing else"
        )
    if wrong:
        raise ValueError(f"{function}: {wrong}.")
    engine.check_usable(function)
    return model


def _reduces_with_all(param: Tensor) -> bool:
    """Return whether each reduction of the gradient of ``param`` waits for all ranks."""
    if world_size() == 1:
        return True
    if not is_dtensor(param):
        return False
    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    return bool(mesh.size() == world_size() and sum(one.is_shard() for one in placements) == 1)
