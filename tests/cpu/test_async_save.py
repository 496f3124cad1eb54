"""Asynchronous saves with ArenaStager: a file holds the state of its call, whatever training does while it is written.

Real ``dcp.async_save`` and real files. Writers are held until the library waits for them (see ``async_writers``), so
that each save overlaps with as much training as it ever can, and a home that is written too early is in the file.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy, remove_offload
from fsdp_offload.checkpoint import (
    ArenaStager,
    SavePlanner,
    chunks_of,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from fsdp_offload.engine.engine import engine_of
from tests.async_writers import HeldWriter, Waits, copied, loaded, not_the_same, runs_within
from tests.cpu.test_lifetime import mappings
from tests.loading import memory_of, ragged
from tests.parity import Run, Zoo, attach, differences, fail_in_bucket, turn_amsgrad_on
from tests.policies import with_share

ALL = 1 << 30
POLICY = OffloadPolicy(bucket_bytes=2048, snapshot_bytes=ALL)
NO_SPARE = OffloadPolicy(bucket_bytes=2048)


pytestmark = pytest.mark.usefixtures("mesh")


LATE_STEP = 5


class Net(Zoo):
    """And a buffer, several in one bucket of which not all have a gradient, a frozen one, and one that thaws."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.small = nn.ParameterList(torch.randn(20) for _ in range(6))
        self.frozen, self.late = (nn.Parameter(torch.randn(30), requires_grad=False) for _ in range(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


def has_gradient(name: str, step: int) -> bool:
    if name.startswith("small"):
        return (int(name[-1]) + step) % 3 != 0
    return name != "frozen" and (name != "late" or step >= LATE_STEP)


def set_gradients(net: nn.Module, step: int) -> None:
    for number, (name, param) in enumerate(net.named_parameters()):
        if name == "late":
            param.requires_grad_(step >= LATE_STEP)
        param.grad = None
        if has_gradient(name, step):
            generator = torch.Generator().manual_seed(1000 * step + number)
            param.grad = 0.1 * param.detach() + torch.randn(param.shape, generator=generator)


def adamw(net: Net) -> Optimizer:
    """Two groups that take turns in the model's order; one has its learning rate in a tensor."""
    params = list(net.parameters())
    groups = [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2], "lr": torch.tensor(2e-2)}]
    return optim.AdamW(groups, lr=1e-2, foreach=False)


class Training:
    """A model and its optimizer; ``step`` is the next one."""

    def __init__(self, policy: OffloadPolicy | None) -> None:
        self.net = Net()
        self.optimizer = adamw(self.net)
        self.step = 0
        if policy is not None:
            attach(self.optimizer, model=self.net, policy=policy)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            set_gradients(self.net, self.step)
            rate = 0.02 * 0.9**self.step
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
            self.optimizer.step()
            self.net.seen += 1
            self.step += 1

    def state(self) -> dict[str, Any]:
        """What is saved: nothing in it is a copy."""
        optimizer = get_optimizer_state_dict(self.net, self.optimizer)
        return {"model": self.net.state_dict(), "optimizer": optimizer, "step": self.step}

    def load(self, path: Path) -> None:
        state = {
            "model": self.net.state_dict(),
            "optimizer": get_optimizer_state_dict(self.net, self.optimizer, for_load=True),
            "step": 0,
        }
        dcp.load(state, checkpoint_id=path)
        set_optimizer_state_dict(self.net, self.optimizer, state["optimizer"])
        self.step = state["step"]


def assert_exact_after(offloaded: Training) -> None:
    """All that training has left behind is what it would have been without offload and without saves."""
    plain = Training(None)
    plain.train(offloaded.step)
    sides = (Run(one.net, one.optimizer, torch.device("cpu"), torch.float32) for one in (plain, offloaded))
    found = list(differences(*sides))
    assert not found, f"after {plain.step} steps: " + "; ".join(found[:5])


def save(training: Training, stager: ArenaStager, writer: HeldWriter) -> Future[Any]:
    future = dcp.async_save(training.state(), storage_writer=writer, async_stager=stager)
    assert isinstance(future, Future)
    writer.in_use = True
    return future


class Saving:
    """A save whose writer stands still until it ends, and what its file then has to hold."""

    def __init__(self, training: Training, path: Path, stager: Any = None, waits: Waits | None = None) -> None:
        self.path, self.state = path, copied(training.state())
        self.stager = stager or ArenaStager(training.optimizer)
        self.writer = HeldWriter(path) if waits is None else waits.hold(path)
        self.future = save(training, self.stager, self.writer)
        assert self.writer.arrived.wait(60)

    def end(self) -> None:
        self.writer.let_go()
        self.future.result()
        assert_holds(self.path, self.state)


def assert_saves(training: Training, path: Path, stager: ArenaStager) -> None:
    """Save at once, with a writer of torch's own."""
    state = copied(training.state())
    dcp.async_save(training.state(), checkpoint_id=path, async_stager=stager).result()
    assert_holds(path, state)


def assert_holds(path: Path, state: Any) -> None:
    found = list(not_the_same(state, loaded(path, state)))
    assert not found, found[:5]


def trained(chosen: OffloadPolicy, steps: int = 2) -> Training:
    training = Training(chosen)
    training.train(steps)
    return training


def policy(**options: Any) -> OffloadPolicy:
    return with_share(bucket_bytes=2048, **options)


# Overlap -------------------------------------------------------------------------------------------------------------


def test_a_step_that_touches_nothing_of_what_is_read_waits_for_nothing(tmp_path: Path, waits: Waits) -> None:
    training = trained(NO_SPARE)
    saving = Saving(training, tmp_path, waits=waits)
    for param in training.net.parameters():
        param.grad = None
    training.net.late.grad = torch.ones(30)  # its first: this state is in no file yet
    training.optimizer.step()
    assert waits.count == 0
    saving.end()


def test_two_stagers_at_a_time(tmp_path: Path) -> None:
    """As when two loops save to two places: both homes of a shard may be read, and then a step has to wait."""
    training = trained(POLICY)
    first = Saving(training, tmp_path / "0")
    assert runs_within(60, training.train)
    second = Saving(training, tmp_path / "1")
    blocked = not runs_within(0.3, training.train)
    for writer in (first.writer, second.writer):
        writer.let_go()
    for saving in (first, second):
        saving.end()
    assert blocked


def test_a_save_whose_future_is_done_is_not_running(tmp_path: Path) -> None:
    """What a loop relies on that waits for the future, and saves again."""
    training, go_on = trained(POLICY), threading.Event()
    saving = Saving(training, tmp_path)
    saving.future.add_done_callback(lambda _: go_on.wait(60))  # in the writing thread, which so ends late
    saving.end()
    try:
        assert runs_within(10, lambda: saving.stager.stage(training.state()))
    finally:
        go_on.set()


def test_what_a_stager_is_made_of_is_checked() -> None:
    with pytest.raises(TypeError, match=r"ArenaStager: expected a torch\.optim\.Optimizer, .* got Net"):
        ArenaStager(Net())  # type: ignore[arg-type]


def test_state_of_a_plain_optimizer_is_copied(tmp_path: Path) -> None:
    """And lent once it is offloaded, with the stager that there is."""
    training = trained(POLICY)
    stager = ArenaStager(remove_offload(training.optimizer))
    for attaches in (False, True, False):
        if attaches:
            attach(training.optimizer, policy=POLICY)
        saving = Saving(training, tmp_path / f"{training.step}", stager)
        engine = engine_of(training.optimizer)
        assert (engine is not None and bool(engine.lending.readers)) == attaches
        training.train()
        saving.end()
        if attaches:
            remove_offload(training.optimizer)
    stager.close()
    assert_exact_after(training)


# Writers that fail ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_memory_to_load_into_is_not_staged(is_offloaded: bool) -> None:
    model = nn.Linear(4, 4)
    optimizer = optim.AdamW(model.parameters())
    if is_offloaded:
        attach(optimizer, policy=policy())
    template = {"optimizer": get_optimizer_state_dict(model, optimizer, for_load=True)}
    with pytest.raises(ValueError, match=r"for_load=True made this state dict.*Save what"):
        ArenaStager(optimizer).stage(template)


def test_a_save_that_fails_before_it_looks_at_anything_ends(tmp_path: Path) -> None:
    """As where no writer is found for the path: a disk that is read-only, a scheme that nobody knows."""
    training = trained(NO_SPARE)
    stager = ArenaStager(training.optimizer)
    future = dcp.async_save(training.state(), checkpoint_id="unknown://nowhere", async_stager=stager)
    assert future.exception() is not None
    stopped = not runs_within(2, training.train)
    del future  # and with its traceback all that the writer was given
    assert not stopped


def test_a_state_dict_that_cannot_be_staged_costs_nothing(tmp_path: Path) -> None:
    """No home is lent to a writer that there never is."""
    training = trained(NO_SPARE)
    stager = ArenaStager(training.optimizer)
    with pytest.raises(TypeError, match="cannot pickle"):
        dcp.async_save(training.state() | {"lock": threading.Lock()}, checkpoint_id=tmp_path, async_stager=stager)
    assert runs_within(10, training.train)
    assert_saves(training, tmp_path / "next", stager)
    assert_exact_after(training)


# What happens meanwhile ----------------------------------------------------------------------------------------------


def test_a_state_dict_from_before_a_step_that_moved_state_is_refused(tmp_path: Path) -> None:
    training = trained(POLICY)
    old, saving = training.state(), Saving(training, tmp_path)
    training.train()
    saving.end()
    with pytest.raises(RuntimeError, match=r"made before the last step.*get_optimizer_state_dict\(\) right before"):
        dcp.async_save(old, checkpoint_id=tmp_path / "old", async_stager=saving.stager)
    assert_saves(training, tmp_path / "new", saving.stager)


Change = Callable[[Training], object]


def load_own(training: Training) -> None:
    """Other values than those that are being written."""
    saved = copied(training.optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg"] += 1
    training.optimizer.load_state_dict(saved)


def set_by_name(training: Training) -> None:
    saved = copied(get_optimizer_state_dict(training.net, training.optimizer))
    for state in saved["state"].values():
        state["exp_avg_sq"] *= 3
    set_optimizer_state_dict(training.net, training.optimizer, saved)


def load_in_place(training: Training) -> None:
    template = get_optimizer_state_dict(training.net, training.optimizer, for_load=True)
    for state in template["state"].values():
        for value in state.values():
            value.fill_(7)
    set_optimizer_state_dict(training.net, training.optimizer, template)


def exchange(training: Training) -> None:
    """The user's own tensors in place of homes."""
    for param in (training.net.weight, training.net.long):
        state = training.optimizer.state[param]
        state["exp_avg"] = state["exp_avg"] * 2


def ask_for_more(training: Training) -> None:
    """State whose layout changes gets other homes in the next step."""
    turn_amsgrad_on(training.optimizer, training.optimizer.state.values())


def remove(training: Training) -> None:
    remove_offload(training.optimizer)


def attach_again(training: Training) -> None:
    attach(training.optimizer, model=training.net, policy=NO_SPARE)


CHANGES: dict[str, tuple[Change, ...]] = {
    "load_state_dict": (load_own,),
    "set_optimizer_state_dict": (set_by_name,),
    "for_load": (load_in_place,),
    "exchanged tensors": (exchange, Training.train),
    "exchanged tensors, removed": (exchange, remove),
    "amsgrad": (ask_for_more, Training.train),
    "remove_offload": (remove, Training.train),
    "remove_offload, attached again": (remove, attach_again, Training.train),
}


@pytest.mark.parametrize("moved", [False, True], ids=["at home", "after a step"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_state_during_a_save_does_not_spoil_it(
    name: str, moved: bool, tmp_path: Path, waits: Waits
) -> None:
    training = trained(POLICY)
    saving = Saving(training, tmp_path, waits=waits)
    training.train(3 if moved else 0)
    for change in CHANGES[name]:
        change(training)
    saving.end()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("during", [True, False], ids=["dropped during the save", "dropped behind it"])
def test_memory_goes_with_the_last_who_needs_it(tmp_path: Path, during: bool) -> None:
    """The writer is one of them; a future or stager that is kept is none."""
    training = trained(POLICY)
    saving, memory = Saving(training, tmp_path), mappings(training.optimizer)
    assert len(memory) == 2
    if not during:
        saving.end()
        assert runs_within(60, saving.stager._loan.wait)
    engine = weakref.ref(engine_of(training.optimizer))
    del training
    assert engine() is None
    if during:
        assert [reference() is None for reference in memory] == [False, True]  # nobody reads the spare homes
        saving.end()
        saving.stager.close()
    assert all(reference() is None for reference in memory)


def test_a_save_that_plans_late_has_the_state_of_its_call(tmp_path: Path) -> None:
    """Steps have taken the spare homes by then, and the writing thread asks nothing of the optimizer."""
    may_plan = threading.Event()

    class LatePlanner(SavePlanner):
        def create_local_plan(self) -> Any:
            may_plan.wait()
            return super().create_local_plan()

    training = Training(POLICY)
    training.train(2)
    expected = copied(state := training.state())
    stager = ArenaStager(training.optimizer)
    future = dcp.async_save(state, checkpoint_id=tmp_path, planner=LatePlanner(), async_stager=stager)
    training.train(1)
    may_plan.set()
    future.result()  # type: ignore[union-attr]
    stager.close()
    assert not [*not_the_same(expected, loaded(tmp_path, expected))]


@pytest.mark.parametrize("fails_at", [0, 3, 5])
@pytest.mark.parametrize("chosen", [POLICY, policy(snapshot_bytes=12 << 10), NO_SPARE], ids=["all", "half", "none"])
def test_a_step_that_fails_during_a_save(chosen: OffloadPolicy, fails_at: int, tmp_path: Path, waits: Waits) -> None:
    """The file has what there was before, and heals the step."""
    training = trained(chosen)
    saving = Saving(training, tmp_path, waits=waits)
    set_gradients(training.net, 2)
    fail_in_bucket(fails_at, training.optimizer.step)
    for refused in (training.optimizer.state_dict, training.state):
        with pytest.raises(RuntimeError, match=r"state_dict\(\) refused.*ArithmeticError.*Load a checkpoint"):
            refused()
    with pytest.raises(RuntimeError, match=r"dcp.async_save\(\) refused"):
        ArenaStager(training.optimizer).stage({"model": training.net.state_dict()})
    saving.end()
    training.load(tmp_path)
    training.train(3)
    assert_exact_after(training)
    saving.end()


# What is staged, and into which memory -------------------------------------------------------------------------------


class Pair(NamedTuple):
    one: int
    other: str


def test_values_of_every_kind_are_those_of_the_call(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {
        "scalar": torch.tensor(2.5),
        "integer": torch.tensor(7),
        "boolean": torch.tensor([True, False]),
        "bfloat16": torch.randn(5).bfloat16(),
        "complex": torch.randn(3, dtype=torch.complex64),
        "empty": torch.empty(0, 3),
        "column": torch.arange(12.0).view(3, 4)[:, 1],
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "expanded": torch.ones(1).expand(4),
        "part": torch.arange(10)[3:6],
    }
    others: dict[str, Any] = {"text": "abc", "nothing": None, "flag": True, "bytes": b"\x00\xff", "complex": 1 + 2j}
    others |= {
        "tuple": (1, "two", None, (3.5,)),
        "named": Pair(1, "x"),
        "dtype": torch.bfloat16,
        "dict": {},
        "list": [],
    }
    written: dict[str, Any] = {"steps": [1, 2], "names": {"a": "x"}, "nested": {"deep": [[3, 4]]}, "set": {1, 2}}
    state = {"tensors": {**tensors, "in a list": [torch.ones(2), 5]}, "others": others, "written": written}
    expected, writer = copied(state), HeldWriter(tmp_path)
    future = dcp.async_save(state, storage_writer=writer, async_stager=ArenaStager())
    assert writer.arrived.wait(60)
    written["steps"].append(3)
    written["names"]["a"] = "y"
    written["nested"]["deep"][0].clear()
    written["set"].add(9)
    for name, tensor in tensors.items():
        if name != "expanded":
            tensor.zero_() if name != "boolean" else tensor.logical_not_()
    writer.let_go()
    future.result()
    assert_holds(tmp_path, expected)


def test_tied_weights_are_staged_once() -> None:
    weight = nn.Parameter(torch.randn(50, 3))
    staged = ArenaStager().stage({"embed": weight, "head": weight, "other": weight.detach().clone()})
    assert staged["embed"].data_ptr() == staged["head"].data_ptr() != staged["other"].data_ptr()
    assert torch.equal(staged["head"], weight)


def test_views_of_a_home_are_what_they_show() -> None:
    """Also those that begin where it begins."""
    training = trained(POLICY)
    home = training.optimizer.state[training.net.weight]["exp_avg"]
    views = [home, home.t(), home.view(-1), home[0], home[:, 0], home[::2], home[1:3], home.view(torch.uint8)]
    staged = ArenaStager(training.optimizer).stage({str(number): view for number, view in enumerate(views)})
    assert all(torch.equal(staged[str(number)], view) for number, view in enumerate(views))


def test_ragged_shards_are_staged_with_their_chunks(tmp_path: Path, mesh: DeviceMesh) -> None:
    whole = torch.arange(30.0).view(5, 3, 2)
    saved, writer = ragged(whole, mesh, 7, 13), HeldWriter(tmp_path)
    future = dcp.async_save({"ragged": saved}, storage_writer=writer, async_stager=ArenaStager())
    memory_of(saved).zero_()
    writer.let_go()
    future.result()
    found = {"ragged": torch.zeros(5, 3, 2)}
    dcp.load(found, checkpoint_id=tmp_path)
    assert torch.equal(found["ragged"], whole)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert len(metadata["ragged"].chunks) == len(chunks_of(saved).chunks) == 8


def test_neither_arena_nor_buffer_grows(tmp_path: Path) -> None:
    training = Training(POLICY)
    training.train(LATE_STEP + 1)  # from now on the same state exists
    stager, host_bytes, buffers = ArenaStager(training.optimizer), set(), set()
    for number in range(10):
        staged = stager.stage(training.state())
        buffers.add((staged["model"]["weight"].data_ptr(), stager._buffer.nbytes))
        del staged  # nobody writes it: that ends the loan
        future = dcp.async_save(training.state(), checkpoint_id=tmp_path / str(number), async_stager=stager)
        training.train()
        future.result()
        host_bytes.add(training.optimizer.offload_report().memory.host_bytes)
    assert len(buffers) == 1
    assert len(host_bytes) == 1
    report = training.optimizer.offload_report()
    assert report.memory.host_bytes == pytest.approx(
        2 * report.memory.host_state_bytes, rel=0.2
    )  # both homes, with their padding
    assert report.memory.spare_home_bytes == report.memory.host_bytes // 2


def write_in_place(training: Training) -> None:
    training.optimizer.state[training.net.weight]["exp_avg"].mul_(2)


@pytest.mark.parametrize("options", [{"snapshot_bytes": 1 << 20}, {}])
def test_state_that_is_written_in_place_during_a_save_is_told_of(
    tmp_path: Path, waits: Waits, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The file has some old values and some new ones: whoever goes on to train, to save or to close hears of it."""
    training = Training(policy(**options))
    training.train(2)
    stager = ArenaStager(training.optimizer)
    for number, goes_on in enumerate([training.train, lambda: stager.stage(training.state()), stager.close]):
        write_in_place(training)  # between saves it may be
        writer = waits.hold(tmp_path / str(number))
        future = save(training, stager, writer)
        assert writer.arrived.wait(60)
        write_in_place(training)
        writer.let_go()
        future.result()
        assert stager._loan is not None
        stager._loan.wait()
        with pytest.raises(RuntimeError, match=r"written in place while an asynchronous save.*save again"):
            goes_on()
        assert "Do not use it" in caplog.text
        caplog.clear()
        training.train()  # once is enough
