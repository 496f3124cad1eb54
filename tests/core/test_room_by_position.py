"""Blocks come where the model leaves memory free, and leave before it takes it again; the bits are those of plain.

The CPU has no allocator that counts, so hooks on the model count for it: each block of the model takes ``ACTIVATIONS``
in the forward, and frees them in the backward.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fsdp_offload import OffloadPolicy, offload_report
from fsdp_offload.core.cache import Cache
from fsdp_offload.core.curve import Reading
from fsdp_offload.core.items import Block, Item
from fsdp_offload.core.loop import Core
from fsdp_offload.engine import step as steps
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.optimizers.bucket_update import BoundRange
from tests.overlapping import Loop, adamw, same

ACTIVATIONS = 60_000
"""Of each block: more than the state of one, 50 kB."""


class Activations:
    """What a model takes, and what lies on the device beside it at each point and between points."""

    def __init__(self, loop: Loop, optimizers: int = 1) -> None:
        self.used = self.ever = self.operations = 0
        self.nbytes, self.optimizers = ACTIVATIONS, optimizers
        self.events: list[int] = []
        self.core: Core = engine_of(loop.optimizer).core
        self.beside: list[tuple[int, int]] = []  # bytes of the model and blocks, whenever the model takes some
        for block in (*loop.model.blocks, loop.model.extra):
            block.register_forward_hook(self.take)
        self.core.curve.read, self.core.curve.history = self.read, self

    def take(self, block: nn.Module, args: Any, result: Tensor) -> None:
        if torch.is_grad_enabled():
            nbytes = self.nbytes
            self.count(nbytes)
            result.register_hook(lambda _: self.count(-nbytes))

    def count(self, nbytes: int) -> None:
        self.used, self.ever, self.operations = (*(self.used + nbytes, self.ever + max(0, nbytes)), self.operations + 1)
        self.events.append(nbytes)
        if nbytes > 0:
            self.beside.append((self.used, self.core.cache.nbytes))

    def read(self) -> Reading:
        return Reading(self.used, self.ever, self.operations, self.optimizers)

    def begin(self) -> bool:
        self.events = []
        return True

    def end(self) -> list[int]:
        return self.events

    @property
    def blocks_bytes(self) -> list[int]:
        """Bytes of blocks whenever the model has taken some, since the last call."""
        found, self.beside = [blocks for _, blocks in self.beside], []
        return found


class Gradients(Activations):
    """What grows in the backward, and is gone behind the step."""

    def take(self, block: nn.Module, args: Any, result: Tensor) -> None:
        if torch.is_grad_enabled():
            result.register_hook(lambda _: self.count(self.nbytes))

    def step(self) -> None:
        self.count(-self.used)


LIMITED = {"bucket_bytes": 8192, "device_bytes": 4 * 8192}
WAYS: dict[str, dict[str, Any]] = {
    "a number": {"overlap": "iteration", **LIMITED},
    "auto": {"overlap": "iteration", "bucket_bytes": 8192},
    "into the forward": {"overlap": "forward", **LIMITED},
    "parameters": {"overlap": "iteration", "parameters": True, "bucket_bytes": 8192},
}
PEAK = 6 * ACTIVATIONS  # the last block runs twice


def made(mesh: DeviceMesh, fields: dict[str, Any]) -> tuple[Loop, Loop, Activations]:
    plain, loop = Loop(mesh, adamw, None), Loop(mesh, adamw, OffloadPolicy(**fields))
    model = Activations(loop)
    model.core.gives_way = fields.get("device_bytes", "auto") == "auto"
    return plain, loop, model


@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
def test_blocks_lie_in_the_valley_and_not_above_the_peak(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    plain, loop, model = made(mesh, fields)
    assert same(plain.train(8), loop.train(8))
    assert model.core.curve.room_bytes
    model.beside = []
    assert same(plain.train(4, first=8), loop.train(4, first=8))
    lasting_bytes = sum(pool.count * pool.nbytes for pool in model.core.cache.pools)
    above = [used + blocks - PEAK - lasting_bytes for used, blocks in model.beside]
    assert max(above) <= 0
    at_peak = [blocks for used, blocks in model.beside if used == PEAK]
    elsewhere = [blocks for used, blocks in model.beside if used == ACTIVATIONS]
    assert max(elsewhere) > lasting_bytes
    state = [pool for pool in model.core.cache.pools if any(b.state.pool is pool for b in model.core.buckets)]
    if model.core.gives_way:
        assert max(at_peak) <= lasting_bytes - sum(pool.passing * pool.nbytes for pool in state)
        assert sum(pool.passing for pool in state) > 0


def test_blocks_do_not_leave_while_updates_need_them(mesh: DeviceMesh) -> None:
    plain, loop = Loop(mesh, adamw, None), Loop(mesh, adamw, OffloadPolicy(**WAYS["auto"]))
    model = Gradients(loop)
    model.core.gives_way = True
    loop.optimizer.register_step_post_hook(lambda *_: model.step())
    assert same(plain.train(8), loop.train(8))
    assert model.core.curve.room_bytes
    model.beside = []
    assert same(plain.train(2, first=8), loop.train(2, first=8))
    (pool,) = model.core.cache.pools
    assert model.used == 0
    assert min(model.blocks_bytes) >= pool.count * pool.nbytes


def test_what_comes_is_loaded_once(mesh: DeviceMesh) -> None:
    _, loop, model = made(mesh, WAYS["a number"])
    loop.train(12)
    moved = model.core.last_moved
    state_bytes = sum(bucket.state.nbytes for bucket in model.core.buckets if not bucket.state.kept)
    assert moved.loaded_bytes == moved.stored_bytes == state_bytes


def test_memory_that_has_left_comes_back_to_what_was_bound(mesh: DeviceMesh) -> None:
    _, loop, model = made(mesh, WAYS["a number"])
    assert model.core.cache.keeps_bound
    loop.train(12)
    (pool,) = model.core.cache.pools
    assert pool.beyond > 0
    assert pool.made > pool.count
    model.core.come("elsewhere")
    assert pool.made == pool.count
    assert [block.memory.untyped_storage().nbytes() for block in pool.apart] == [0] * len(pool.apart)
    assert pool.apart


def test_the_report_says_how_much_comes(mesh: DeviceMesh) -> None:
    _, loop, model = made(mesh, WAYS["a number"])
    loop.train(12)
    memory = offload_report(loop.optimizer).memory
    (pool,) = model.core.cache.pools
    assert memory.device_bytes == pool.count * pool.nbytes
    assert memory.off_peak_bytes > 0
    assert memory.off_peak_bytes % pool.nbytes == 0


def test_an_evaluation_has_no_room(mesh: DeviceMesh) -> None:
    plain, loop, model = made(mesh, WAYS["a number"])
    assert same(plain.train(8), loop.train(8))
    (pool,) = model.core.cache.pools
    assert pool.made > pool.count
    counts: list[int] = []
    handle = loop.model.blocks[0].register_forward_hook(lambda *_: counts.append(pool.made))
    for one in (plain, loop):
        with torch.no_grad():
            one.model(one.batch(99))
    handle.remove()
    assert counts == [pool.count]
    model.beside = []
    assert same(plain.train(2, first=8), loop.train(2, first=8))
    assert max(model.blocks_bytes) > pool.count * pool.nbytes


@pytest.mark.parametrize(("changed", "part"), [({"nbytes": ACTIVATIONS // 4}, 4), ({"optimizers": 2}, 2)], ids=str)
def test_another_batch_finds_another_place_and_a_second_optimizer_has_half_of_it(
    mesh: DeviceMesh, changed: dict[str, int], part: int
) -> None:
    plain, loop, model = made(mesh, WAYS["a number"])
    assert same(plain.train(8), loop.train(8))
    before = list(model.core.curve.room_bytes)
    vars(model).update(changed)
    assert same(plain.train(4, first=8), loop.train(4, first=8))
    assert model.core.curve.room_bytes == [nbytes // part for nbytes in before]


def test_a_loop_that_is_never_the_same_has_none(mesh: DeviceMesh) -> None:
    plain, loop, model = made(mesh, WAYS["a number"])

    def changing(one: Loop, step: int) -> None:
        one.backward(step, extra=step % 2 == 0)
        one.step()

    assert same(plain.train(12, changing), loop.train(12, changing))
    assert not model.core.curve.room_bytes
    (pool,) = model.core.cache.pools
    assert pool.made <= pool.count


def test_an_interrupt_while_room_is_divided_has_it_divided_again(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, loop, model = made(mesh, WAYS["a number"])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fsdp_offload.core.curve.shares", interrupt)
    with pytest.raises(KeyboardInterrupt):
        loop.train(8)
    monkeypatch.undo()
    for module in loop.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    steps = loop.schedulers[0].last_epoch
    assert model.core.curve.room_bytes
    assert same(plain.train(steps), loop)
    assert same(plain.train(4, first=steps), loop.train(4, first=steps))
    assert max(model.blocks_bytes) > sum(pool.count * pool.nbytes for pool in model.core.cache.pools)


FEW = {"few": {**WAYS["parameters"], "device_bytes": 70_000}}


@pytest.mark.parametrize("fields", [*WAYS.values(), *FEW.values()], ids=[*WAYS, *FEW])
def test_what_was_bound_to_one_place_moves_to_another(
    mesh: DeviceMesh, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "MOST_BOUND", 1)
    rng, room_for = random.Random(0), Cache._room_for

    def shuffled(cache: Cache, item: Item, *args: Any) -> Block | None:
        rng.shuffle(item.pool.free)
        return room_for(cache, item, *args)

    monkeypatch.setattr(Cache, "_room_for", shuffled)
    plain, loop, _ = made(mesh, fields)
    with counted(BoundRange, "move_to") as moved:
        assert same(plain.train(12), loop.train(12))
    assert moved


@contextmanager
def counted(owner: Any, name: str) -> Iterator[list[None]]:
    calls: list[None] = []
    method = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *args, **options: (calls.append(None), method(*args, **options))[1])
        yield calls


def test_a_steady_iteration_binds_nothing_anew(mesh: DeviceMesh) -> None:
    _, loop, _ = made(mesh, WAYS["a number"])
    loop.train(30)
    plan = engine_of(loop.optimizer).plan
    with counted(plan, "bind") as bound, counted(Cache, "_give_back") as given:
        loop.train(2, first=30)
    assert given
    assert not bound
