"""Tensors over homes that others hold: they change in ``step()`` only, and every write into them counts."""

import copy
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as get_as_torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy, is_offloaded, offload_report, synchronize
from fsdp_offload.checkpoint import ArenaStager, get_optimizer_state_dict
from fsdp_offload.core import loop as core_loop
from fsdp_offload.engine.engine import Engine, engine_of
from fsdp_offload.fsdp.dtensor import local_shard
from fsdp_offload.fsdp.gradients import is_spent
from fsdp_offload.listeners import recoverable
from tests.conformance.oracle import NEVER
from tests.overlapping import Loop, Net, adamw, pair, same
from tests.parity import leaves, same_values, turn_amsgrad_on

OPTIMIZERS: list[Callable[[Any], Any]] = [
    adamw,
    lambda params: torch.optim.AdamW(params, lr=0.02, foreach=False, amsgrad=True),
    lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    lambda params: torch.optim.Adagrad(params, lr=0.02),
]
OVERLAPS = pytest.mark.parametrize("overlap", ["step", "forward", "iteration"])


def policy_for(rng: random.Random, overlap: str, **more: Any) -> OffloadPolicy:
    """Place for a few buckets, or for all."""
    small = {"bucket_bytes": rng.choice([1024, 4096, 16384])}
    return OffloadPolicy(
        overlap=overlap, **small, device_bytes=rng.choice([6, 12, 100]) * small["bucket_bytes"], **more
    )


# Writes ---------------------------------------------------------------------------------------------------------------


def _by_numpy(values: list[Tensor]) -> None:
    for local in map(local_shard, values):
        if local.device.type == "cpu":
            local.numpy()[...] *= 0.5  # counts no version
        else:
            local.mul_(0.5)


WRITES: list[Callable[[list[Tensor]], object]] = [
    lambda values: [value.mul_(0.5) for value in values],
    lambda values: [value.to_local().mul_(0.5) for value in values],
    lambda values: [value.data.mul_(0.5) for value in values],
    lambda values: torch._foreach_mul_(values, 0.5),
    lambda values: torch._foreach_mul_([value.to_local() for value in values], 0.5),
    _by_numpy,
]


def taken_from(loop: Loop, params: list[Tensor], how: str) -> list[Tensor]:
    """State tensors of ``params``, in one of the ways in which users come to them."""
    if how == "state":
        found = [loop.optimizer.state[param] for param in params]
    elif how == "state_dict":
        numbers = {param: number for number, param in enumerate(loop.params)}
        states = loop.optimizer.state_dict()["state"]
        found = [states[numbers[param]] for param in params]
    else:
        by_name = get_as_torch(loop.model, loop.optimizer)["state"]
        names = {param: name for name, param in loop.model.named_parameters()}
        found = [by_name[names[param]] for param in params]
    return [value for state in found for name, value in sorted(state.items()) if value.dim()]


@OVERLAPS
@pytest.mark.parametrize("seed", range(12))
def test_a_write_counts_whenever_its_tensor_was_taken(mesh: DeviceMesh, seed: int, overlap: str) -> None:
    """As without offload, through tensors of any age, in any way, whatever lies on the device."""
    rng = random.Random(seed)
    loops = pair(mesh, policy_for(rng, overlap), make=OPTIMIZERS[seed % 4], net=partial(Net, width=16, layers=2))
    held: list[tuple[list[Tensor], list[Tensor]]] = []
    for at in range(9):
        for each in loops:
            each.train(1, first=at)
        engine_of(loops[1].optimizer).core.wait_updated(lets_go=False)  # no gather comes that would wait
        # Who looked at the state here would have it loaded again.
        assert all(
            torch.equal(*map(local_shard, params)) for params in zip(*(one.params for one in loops), strict=True)
        )
        if rng.random() < 0.5:
            chosen = rng.sample(range(len(loops[0].params)), 4)
            how = rng.choice(["state", "state_dict", "by name"])
            held.append(tuple(taken_from(each, [each.params[n] for n in chosen], how) for each in loops))
        if held and rng.random() < 0.3:
            synchronize(loops[1].optimizer)
        for plain, ours in held:
            write = rng.choice(WRITES) if rng.random() < 0.5 else None
            for values in (plain, ours) if write is not None else ():
                write(values)
        if held and rng.random() < 0.3:
            del held[rng.randrange(len(held))]
    assert same(*loops)


def _two_groups(params: Any) -> Any:
    params = list(params)
    groups = [{"params": params[:3], "momentum": 0.0}, {"params": params[3:]}]
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9)


def _with_amsgrad(loop: Loop, _: Path) -> None:
    turn_amsgrad_on(loop.optimizer, [loop.optimizer.state[param] for param in loop.params])


def _with_momentum(loop: Loop, _: Path) -> None:
    loop.optimizer.param_groups[0]["momentum"] = 0.9


def _in_files(loop: Loop, folder: Path) -> Any:
    return recoverable(loop.optimizer, folder / "run") if is_offloaded(loop.optimizer) else None


MOVES: dict[str, tuple[Callable[[Any], Any], Callable[[Loop, Path], Any]]] = {
    "amsgrad": (adamw, _with_amsgrad),
    "momentum of another group": (_two_groups, _with_momentum),
    "files": (adamw, _in_files),
}


@OVERLAPS
@pytest.mark.parametrize("how", ["state", "state_dict", "by name"])
@pytest.mark.parametrize(("make", "move"), MOVES.values(), ids=MOVES)
def test_what_is_held_stays_state_in_new_homes(
    mesh: DeviceMesh,
    make: Callable[[Any], Any],
    move: Callable[[Loop, Path], Any],
    how: str,
    overlap: str,
) -> None:
    """Check that steps change it, writes into it count, a load leaves it, and it holds up no update once let go."""
    loops = pair(mesh, OffloadPolicy(overlap=overlap, bucket_bytes=4096), make, net=partial(Net, width=16, layers=2))
    held, kept = [], []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for each in loops:
            each.train(3)
            held.append(taken_from(each, each.params[3:], how))
            kept.append(move(each, Path(folder)))
            each.train(1, first=3)
    for write in WRITES:
        for each, values in zip(loops, held, strict=True):
            write(values)
            each.train(1, first=4)
        assert same_values(*(list(map(local_shard, values)) for values in held))
    assert same(*loops)
    for each in loops:
        each.optimizer.load_state_dict(copy.deepcopy(each.optimizer.state_dict()))
        each.train(1, first=5)
    assert same_values(*(list(map(local_shard, values)) for values in held))
    assert same(*loops)
    held.clear()
    loops[1].train(2, first=6)
    assert not offload_report(loops[1].optimizer).step.held_updates


@pytest.mark.parametrize("saves", [1, 2])
def test_a_write_into_a_home_that_a_save_has_left_is_told(mesh: DeviceMesh, saves: int) -> None:
    """The save read this home, so the step went on with the other one; after a second save, it has come back."""
    loop = Loop(mesh, adamw, OffloadPolicy(bucket_bytes=4096, device_bytes=1 << 20, snapshot_bytes=1 << 22)).train(2)
    held = loop.optimizer.state[loop.params[0]]["exp_avg"]
    stager = ArenaStager(loop.optimizer)
    for at in range(2, 2 + saves):
        staged = stager.stage({"optimizer": get_optimizer_state_dict(loop.model, loop.optimizer)})
        loop.train(1, first=at)
        del staged
        stager.close()
    held.mul_(0.5)
    old = "written through a tensor that was fetched before an asynchronous save"
    with pytest.warns(UserWarning, match=old) if saves == 1 else nullcontext():
        loop.train(1, first=4)
    loop.train(1, first=5)  # told once


@OVERLAPS
def test_counters_of_the_cpu_while_a_neighbour_is_held(mesh: DeviceMesh, overlap: str) -> None:
    """Parameters in several buckets, whose updates are waited for in the order in which they began."""
    policy = OffloadPolicy(overlap=overlap, host_fraction=0.5, bucket_bytes=1024, device_bytes=12 * 1024)
    for number in range(21):
        loop = Loop(mesh, adamw, policy, net=partial(Net, width=16, layers=2)).train(1)
        held = loop.optimizer.state[loop.params[number]]["exp_avg"]
        loop.train(3, first=1)
        assert {int(loop.optimizer.state[param]["step"]) for param in loop.params} == {4}
        del held


# What others see ------------------------------------------------------------------------------------------------------


def copies_of(found: Any) -> list[Tensor]:
    """Copies of what others see when the device has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    tensors = [value for value in torch.utils._pytree.tree_leaves(found) if isinstance(value, Tensor)]
    return [leaf.cpu().clone() for value in tensors for leaf in leaves(value)]


TAKEN: dict[str, Callable[[Loop], Any]] = {
    "state_dict": lambda loop: loop.optimizer.state_dict()["state"],
    "get_optimizer_state_dict": lambda loop: get_optimizer_state_dict(loop.model, loop.optimizer)["state"],
    "torch's": lambda loop: get_as_torch(loop.model, loop.optimizer)["state"],
    "optimizer.state": lambda loop: [dict(loop.optimizer.state[param]) for param in loop.params],
    "entries": lambda loop: [loop.optimizer.state[param] for param in loop.params],
    "model.state_dict": lambda loop: loop.model.state_dict(),
    "get_model_state_dict": lambda loop: get_model_state_dict(loop.model),
    "locals of the model": lambda loop: [value.to_local() for value in loop.model.state_dict().values()],
    "views of state": lambda loop: [
        value.to_local().view(-1)
        for state in loop.optimizer.state_dict()["state"].values()
        for value in state.values()
        if value.dim()
    ],
}


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
def test_what_is_held_changes_in_step_only(mesh: DeviceMesh, take: Any, *, parameters: bool, clips: bool) -> None:
    """Updates of the backward wait while it is held, and no longer; a look that is over costs none."""
    policy = OffloadPolicy(overlap="iteration", parameters=parameters, bucket_bytes=4096, device_bytes=1 << 15)
    loop = Loop(mesh, adamw, policy, net=partial(Net, width=16, layers=2))
    engine = engine_of(loop.optimizer)
    assert engine is not None

    def step(at: int) -> None:
        if clips:
            loop.clip(NEVER)
        loop.step()

    for at in range(4):
        loop.backward(at)
        step(at)
    for at in range(4, 10, 2):
        held = take(loop)
        before = copies_of(held)
        loop.backward(at)
        assert all(torch.equal(one, other) for one, other in zip(before, copies_of(held), strict=True))
        step(at)
        report = offload_report(loop.optimizer)
        assert report.step is not None
        assert report.step.held_updates > 0
        assert "were held, taken after step" in str(report)
        del held
        copies_of(take(loop))  # a look
        loop.backward(at + 1)
        assert set(engine.core.done) == set(engine.core.buckets)
        step(at + 1)
        report = offload_report(loop.optimizer)
        assert report.step is not None
        assert not report.step.held_updates


class Late(DefaultStager):
    """torch's stager, whose thread begins late."""

    def __init__(self) -> None:
        options = {"use_pinned_memory": False, "use_shared_memory": False, "use_non_blocking_copy": False}
        super().__init__(StagingOptions(use_async_staging=True, **options))
        self.may_begin = threading.Event()

    def _stage(self, *args: Any, **kwargs: Any) -> Any:
        assert self.may_begin.wait(60)
        return super()._stage(*args, **kwargs)


@OVERLAPS
@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_a_stager_that_reads_after_its_call_has_returned(
    mesh: DeviceMesh, overlap: str, *, parameters: bool, clips: bool
) -> None:
    """As trainers use it: the state of the call is staged until ``step()``, and the state dict is gone then."""
    policy = policy_for(random.Random(3), overlap, parameters=parameters)
    plain, loop = pair(mesh, policy, net=partial(Net, width=16, layers=2))
    for at in range(7):
        stager = Late()
        if at > 3:
            state_dict: Any = {
                "model": get_model_state_dict(loop.model),
                "optimizer": get_as_torch(loop.model, loop.optimizer),
            }
            expected = copies_of(state_dict)
            staged: Any = stager.stage(state_dict)
            del state_dict
        for each in (plain, loop):
            each.backward(at)
            if clips:
                each.clip(NEVER)
        stager.may_begin.set()
        if at > 3:
            found = copies_of(staged.result())
            assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        stager.close()
        for each in (plain, loop):
            each.step()
        assert same(plain, loop)


LOADS: dict[str, Callable[[Loop], object]] = {
    "a template that nothing was loaded into": lambda loop: get_optimizer_state_dict(
        loop.model, loop.optimizer, for_load=True
    ),
    "another mapping for a while": lambda loop: _with_another_mapping(loop.optimizer),
    "a state dict that was loaded": lambda loop: loop.optimizer.load_state_dict(loop.optimizer.state_dict()),
}


def _with_another_mapping(optimizer: Any) -> None:
    before, optimizer.state = optimizer.state, {}
    optimizer.offload_report()
    optimizer.state = before


@pytest.mark.parametrize("passing", LOADS.values(), ids=LOADS)
def test_what_is_over_holds_nothing(mesh: DeviceMesh, passing: Callable[[Loop], object]) -> None:
    loop = Loop(mesh, adamw, OffloadPolicy(overlap="iteration"), net=partial(Net, width=16, layers=2)).train(4)
    passing(loop)
    copies_of(taken_from(loop, loop.params, "state"))
    loop.train(1, first=4)
    loop.backward(5)
    engine = engine_of(loop.optimizer)
    assert engine is not None
    assert set(engine.core.done) == set(engine.core.buckets)


def test_without_room_for_gradients_updates_do_not_wait(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would have to be kept until ``step()``: what is held changes in the backward, with a warning."""
    monkeypatch.setattr(Engine, "_gradients_fit", lambda _: False)
    policy = OffloadPolicy(overlap="iteration", parameters=True)
    plain, loop = pair(mesh, policy, net=partial(Net, width=16, layers=2))
    for at in range(6):
        plain.backward(at)
        held = loop.optimizer.state_dict() if at > 2 else None
        with pytest.warns(UserWarning, match="no room for the gradients") if held else nullcontext():
            loop.backward(at)
        assert at == 0 or all(map(is_spent, loop.params))
        for each in (plain, loop):
            each.step()
        assert same(plain, loop)
        assert "waited for step()" not in str(offload_report(loop.optimizer))


# Threads --------------------------------------------------------------------------------------------------------------


@contextmanager
def switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def copies_in(state: dict[str, Any]) -> dict[str, Tensor]:
    return {n: local_shard(v).cpu().clone() for n, v in state.items() if isinstance(v, Tensor) and v.dim()}


class Reader(threading.Thread):
    """Reads state, parameters and reports until it is stopped; notes what it has seen of which step."""

    def __init__(self, loop: Loop, rng: random.Random) -> None:
        super().__init__(daemon=True)
        self.loop, self.rng, self.is_over, self.reads = loop, rng, False, 0
        self.clock = 0  # odd within step()
        self.seen: list[tuple[int, int, str, Tensor]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.is_over:
                self.read()
                self.reads += 1
        except BaseException as error:  # noqa: BLE001  # the test raises it
            self.error = error

    def stop(self) -> None:
        """End it; raises what it has met. It has read at least once."""
        self.is_over = True
        self.join(60)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        assert self.reads

    def read(self) -> None:
        loop, optimizer = self.loop, self.loop.optimizer
        number = self.rng.randrange(len(loop.params))
        param, way, clock = loop.params[number], self.rng.randrange(5), self.clock
        found: dict[str, Tensor] = {}
        if way == 0:
            found = copies_in(optimizer.state[param])
        elif way == 1:
            found = {"param": param.detach().to_local().cpu().clone()}
        elif way == 2:
            found = copies_in(optimizer.state_dict()["state"].get(number, {}))
        elif way == 3:
            offload_report(optimizer)
        else:
            for _, state in list(optimizer.state.items())[:3]:
                copies_in(state)
        if clock == self.clock and clock % 2 == 0:  # no step() meanwhile: what was read is that of one
            self.seen += [(clock // 2, number, name, value) for name, value in found.items()]


def values_of(loop: Loop) -> list[dict[str, Tensor]]:
    return [
        {"param": param.detach().to_local().cpu().clone()} | copies_in(loop.optimizer.state[param])
        for param in loop.params
    ]


@OVERLAPS
@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_threads_that_read(mesh: DeviceMesh, overlap: str, *, parameters: bool, clips: bool) -> None:
    """They change nothing, and see each step whole: what it has made, and nothing of the next one."""
    rng = random.Random(f"{overlap}{parameters}{clips}")
    policy = policy_for(rng, overlap, parameters=parameters)
    plain, loop = pair(mesh, policy, net=partial(Net, width=16, layers=2))
    expected = []
    reader = Reader(loop, rng)
    # A parameter that stays on the device is new by the end of a backward under "iteration", and later than step()
    # under "forward": who reads it past model.state_dict() has to know that.
    counts = {"param"} if parameters or overlap == "step" else set()
    with switching_often():
        for at in range(8):
            for each in (plain, loop):
                each.backward(at)
                if clips:
                    each.clip(NEVER)
                if each is loop:
                    reader.clock += 1
                each.step()
                if each is loop:
                    reader.clock += 1
            expected.append(values_of(plain))
            if at == 1:
                reader.start()
        reader.stop()
    assert reader.seen
    for step, number, name, value in reader.seen:
        if name != "param" or name in counts:
            assert torch.equal(value, expected[step - 1][number][name]), (step, number, name)
    assert same(plain, loop)


def in_a_thread(call: Callable[[], Any]) -> Any:
    """The result of ``call``, made in another thread while this one waits."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001  # the test raises it
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert found, "a thread has not come to its end: it waits for a lock that this one holds"
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


@OVERLAPS
def test_hooks_run_in_threads_of_their_own(mesh: DeviceMesh, overlap: str) -> None:
    """As on a GPU, where the thread of ``backward()`` waits for autograd's; a reader is there as well."""
    plain, loop = pair(mesh, policy_for(random.Random(0), overlap), net=partial(Net, width=16, layers=2))
    reader = Reader(loop, random.Random(1))
    for at in range(8):
        plain.train(1, first=at)
        in_a_thread(partial(loop.backward, at))
        loop.step()
        if at == 2:
            reader.start()
    reader.stop()
    assert same(plain, loop)


def test_a_closure_whose_backward_runs_in_another_thread(mesh: DeviceMesh) -> None:
    """No lock is held while the closure runs, though its hooks and a reader come in."""

    def lbfgs(params: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, lr=0.1, max_iter=3, history_size=2)

    plain, loop = pair(mesh, OffloadPolicy(), make=lbfgs, net=partial(Net, width=16, layers=1))
    reader = Reader(loop, random.Random(1))

    def closure(each: Loop, at: int) -> Tensor:
        def call() -> Tensor:
            each.optimizer.zero_grad()
            each.backward(at)
            return torch.tensor(each.seen[-1])

        return in_a_thread(call)

    for at in range(5):
        for each in (plain, loop):
            each.optimizer.step(partial(closure, each, at))
        if at == 1:
            reader.start()
    reader.stop()
    assert all(torch.equal(*map(local_shard, each)) for each in zip(plain.params, loop.params, strict=True))
    assert plain.seen == loop.seen


def test_who_waits_for_a_reader_in_the_middle_of_a_step_is_told(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_loop, "STEP_SECONDS", 0.05)
    loop = Loop(mesh, adamw, OffloadPolicy(overlap="iteration"), net=partial(Net, width=16, layers=2)).train(4)
    loop.backward(4)
    for look in (
        lambda: loop.optimizer.state[loop.params[0]],
        loop.optimizer.state_dict,
        lambda: synchronize(loop.optimizer),
    ):
        with pytest.raises(RuntimeError, match=r"waited .* for the end of the step that the backward has begun"):
            in_a_thread(look)
    loop.step()
    assert in_a_thread(lambda: loop.optimizer.state[loop.params[0]])["step"] == 5


@OVERLAPS
def test_training_goes_on_in_another_thread(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, overlap: str) -> None:
    """Its forward says so: between the backward and ``step()`` it need not wait for itself."""
    monkeypatch.setattr(core_loop, "STEP_SECONDS", 0.05)
    plain, loop = pair(mesh, OffloadPolicy(overlap=overlap), net=partial(Net, width=16, layers=2))
    loop.train(4)
    in_a_thread(lambda: (loop.backward(4), synchronize(loop.optimizer), loop.step()))
    assert same(plain.train(6), loop.train(1, first=5))


def test_the_writer_of_a_save_may_not_look(mesh: DeviceMesh) -> None:
    """A look, or a step, may wait for its end."""
    loop = Loop(mesh, adamw, OffloadPolicy(bucket_bytes=4096, device_bytes=1 << 15)).train(2)
    stager = ArenaStager(loop.optimizer)
    staged = stager.stage({"optimizer": get_optimizer_state_dict(loop.model, loop.optimizer)})

    def write() -> object:
        _ = staged.items()
        return loop.optimizer.state[loop.params[0]]

    with pytest.raises(RuntimeError, match="the thread that writes an asynchronous save looks at the optimizer"):
        in_a_thread(write)


def test_a_reader_of_a_step_that_waits_for_it_gets_the_new_state(mesh: DeviceMesh) -> None:
    """And nothing is taken back for it."""
    plain, loop = pair(mesh, OffloadPolicy(overlap="iteration"), net=partial(Net, width=16, layers=2))
    for each in (plain, loop):
        for at in range(5):
            each.backward(at)
            each.clip(NEVER)
            if at < 4:
                each.step()
    engine = engine_of(loop.optimizer)
    assert engine is not None
    assert engine.speculation.made
    found: list[Tensor] = []
    reader = threading.Thread(
        target=lambda: found.append(loop.optimizer.state[loop.params[0]]["exp_avg"].to_local().clone()), daemon=True
    )
    reader.start()
    for each in (plain, loop):
        each.step()
    reader.join(60)
    assert torch.equal(found[0], plain.optimizer.state[plain.params[0]]["exp_avg"].to_local().cpu())
    assert not engine.speculation.rolled_back
    assert same(plain, loop)
