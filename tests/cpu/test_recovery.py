"""Recoverable optimizers: what is refused, what a leftover is taken for, and what ends a commit."""

import gc
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fsdp_offload import OffloadPolicy, is_offloaded, offload_optimizer, remove_offload
from fsdp_offload.device import arena
from fsdp_offload.listeners import Recoverable, newest_commit, recover, recoverable
from fsdp_offload.listeners import folder as folders
from tests.forks import in_forked_child
from tests.parity import leaves, same_values

pytestmark = [pytest.mark.usefixtures("mesh"), pytest.mark.filterwarnings("ignore:offload_optimizer. ")]


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path / "run"
    for _ in range(9):  # the thread of a commit may still be making a file
        shutil.rmtree(path, ignore_errors=True)
    assert not path.exists()


class Script:
    """Trains a small model."""

    def __init__(
        self, mesh: DeviceMesh, *, width: int = 6, lr: float = 0.1, attach: bool = True, **fields: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
        self.model.register_buffer("scale", torch.ones(2))
        for block in self.model[:2]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.width = width
        if attach:
            offload_optimizer(self.optimizer, model=self.model, policy=OffloadPolicy(**fields))

    def backward(self, step: int) -> None:
        data = torch.randn(2, self.width, generator=torch.Generator().manual_seed(step))
        (self.model(data).square().mean() * self.model.scale.sum()).backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        states = [self.optimizer.state[param] for param in self.model.parameters()]
        found = [*(one.to_local() for one in self.model.parameters()), self.model.scale]
        found += [leaf for state in states for name in sorted(state) for leaf in leaves(state[name])]
        return [one.detach().clone() for one in found]


def let_go(run: Recoverable) -> None:
    """Do what the kernel does when the process is killed."""
    run.close(deletes=False)


def assert_recovered(mesh: DeviceMesh, memory: Path, extra: object, kept: list[Tensor], **fields: Any) -> None:
    """Recover as another process does, and compare with what was ``kept``."""
    other = Script(mesh, **fields)
    assert recover(other.optimizer, memory).extra == extra
    assert same_values(other.values(), kept)


def begun(mesh: DeviceMesh, memory: Path, **fields: Any) -> tuple[Script, Recoverable]:
    script = Script(mesh, **fields)
    return script, recoverable(script.optimizer, memory)


def committed(mesh: DeviceMesh, memory: Path, steps: int = 3, **fields: Any) -> list[Tensor]:
    """Leave a folder with ``steps`` commits; returns what the run had at the last one."""
    script, run = begun(mesh, memory, **fields)
    for step in range(steps):
        script.step(step)
        run.commit(step)
    values = script.values()
    let_go(run)
    return values


MODES: dict[str, dict[str, Any]] = {
    "step": {},
    "iteration": {"overlap": "iteration"},
    "parameters": {"overlap": "iteration", "parameters": True},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("steps", "attached"), [(1, True), (2, True), (3, False)])
def test_a_recovery_has_what_the_last_commit_had(
    mesh: DeviceMesh, memory: Path, mode: str, steps: int, attached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take no memory but the files for a plain optimizer: a second process fits next to two sets of homes."""
    kept = committed(mesh, memory, steps, **MODES[mode])
    taken, clear = [0], arena._clear

    def counted(address: int, nbytes: int) -> None:
        taken[0] += nbytes
        clear(address, nbytes)

    other = Script(mesh, lr=0.5, attach=attached, **MODES[mode])
    with torch.no_grad():
        other.model.scale.zero_()
    monkeypatch.setattr(arena, "_clear", counted)
    policy = OffloadPolicy(host_limit_bytes=None if attached else 1, **MODES[mode])
    run = recover(other.optimizer, memory, **({} if attached else {"model": other.model, "policy": policy}))
    assert (run.commits, run.extra, other.optimizer.param_groups[0]["lr"]) == (steps, steps - 1, 0.1)
    assert same_values(other.values(), kept)
    plain = Script(mesh, attach=False)
    for step in range(steps + 2):
        plain.step(step)
        if step >= steps:
            other.step(step)
            run.commit()
    assert same_values(other.values(), plain.values())
    assert attached or taken == [0]
    run.close()
    assert newest_commit(memory) is None
    assert not list(memory.iterdir())
    other.step(9)  # training goes on in files that have no name


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_what_raises_leaves_an_optimizer_as_it_was(mesh: DeviceMesh, memory: Path, mode: str, attach: bool) -> None:
    committed(mesh, memory, **MODES[mode])
    other, policy = Script(mesh, attach=attach, **MODES[mode]), OffloadPolicy(**MODES[mode])
    with pytest.raises(RuntimeError, match="has commit 3 of a run that has ended"):
        recoverable(other.optimizer, memory, model=other.model, policy=policy)
    with pytest.raises(ValueError, match="has no commit 9"):
        recover(other.optimizer, memory, model=other.model, policy=policy, commit=9)
    assert is_offloaded(other.optimizer) is attach
    plain = Script(mesh, attach=False)
    for step in range(3):
        plain.step(step)
        other.step(step)
    assert same_values(other.values(), plain.values())


def test_a_start_that_finds_no_room_leaves_a_plain_optimizer(mesh: DeviceMesh, memory: Path) -> None:
    script = Script(mesh, attach=False)
    with pytest.raises(MemoryError, match="a second set of homes"):
        recoverable(script.optimizer, memory, model=script.model, policy=OffloadPolicy(host_limit_bytes=1000))
    assert not is_offloaded(script.optimizer)
    policy = OffloadPolicy(overlap="iteration", parameters=True)
    run = recoverable(script.optimizer, memory, model=script.model, policy=policy)
    script.step(0)
    run.commit(0)
    kept = script.values()
    let_go(run)
    assert_recovered(mesh, memory, 0, kept, overlap="iteration", parameters=True)


def test_a_commit_keeps_its_values_while_later_steps_are_not_committed(mesh: DeviceMesh, memory: Path) -> None:
    script, run = begun(mesh, memory, overlap="iteration", parameters=True)
    for step in range(7):
        script.step(step)
        if step in (0, 3):
            run.commit(step)
            kept = script.values()
    let_go(run)
    assert_recovered(mesh, memory, 3, kept, overlap="iteration", parameters=True)


def test_a_commit_stays_until_the_device_has_reduced_with_all_ranks(mesh: DeviceMesh, memory: Path) -> None:
    script, run = begun(mesh, memory)
    for step in range(3):
        script.step(step)
        if step < 2:
            run.commit()
            run._wait_written()
    # The host has issued the third step: a GPU, and another rank, may still be at the second one.
    assert run.folder.commits() == [1, 2]
    run.commit()
    run._wait_written()
    assert run.folder.commits() == [2, 3]
    run.commit()
    run._wait_written()
    assert run.folder.commits() == [2, 4], "another rank may still be at 2"
    run.close()


def test_homes_are_in_two_files_and_nowhere_else(mesh: DeviceMesh, memory: Path, caplog: Any) -> None:
    _script, run = begun(mesh, memory, parameters=True)
    regions = [one.nbytes for one in run._engine().plan.regions]  # type: ignore[union-attr]
    files = [path.stat().st_size for path in (memory / "rank-00000").glob("homes-*")]
    assert sorted(regions) == sorted(files)
    assert run.needed_bytes == sum(files)
    assert "takes" in caplog.text
    assert "GB in" in caplog.text


def with_rates(mesh: DeviceMesh) -> tuple[Script, Tensor]:
    """A script whose two groups have one tensor as their learning rate, which the loop holds."""
    script, rate = Script(mesh, attach=False), torch.tensor(0.1)
    params = list(script.model.parameters())
    script.optimizer = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}], lr=rate, foreach=False)
    return script, rate


@pytest.mark.parametrize("apart", [False, True])
def test_a_recovery_writes_tensors_that_a_loop_holds_and_those_of_two_groups_stay_one(
    mesh: DeviceMesh, memory: Path, apart: bool
) -> None:
    script, rate = with_rates(mesh)
    run = recoverable(script.optimizer, memory, model=script.model)
    script.step(0)
    rate.fill_(0.2)
    if apart:
        script.optimizer.param_groups[1]["lr"] = torch.tensor(0.3)
    first, second, *_ = (script.optimizer.state[param] for param in script.model.parameters())
    second["step"] = first["step"]
    run.commit()
    let_go(run)
    other, rate = with_rates(mesh)
    run = recover(other.optimizer, memory, model=other.model)
    rates = [group["lr"] for group in other.optimizer.param_groups]
    assert torch.equal(torch.stack(rates), torch.tensor([0.2, 0.3 if apart else 0.2]))
    assert [one is rate for one in rates] == [True, not apart]
    first, second, *_ = (other.optimizer.state[param] for param in other.model.parameters())
    assert second["step"] is first["step"]
    run.close()


def test_buffers_that_were_exchanged_come_back_as_they_were(mesh: DeviceMesh, memory: Path) -> None:
    def made() -> Script:
        script = Script(mesh, attach=False)
        for name, value in (("late", None), ("gone", torch.ones(3)), ("wide", torch.ones(1).expand(3))):
            script.model.register_buffer(name, value)
        script.model.register_buffer("count", torch.tensor(0))
        script.model[0].register_buffer("same", script.model.scale)
        return script

    script = made()
    run = recoverable(script.optimizer, memory, model=script.model)
    script.step(0)
    script.model.late, script.model.gone = torch.arange(2), None
    script.model.count, script.model.wide = script.model.count + 0.5, torch.full((1,), 2.0).expand(3)
    script.model.scale.add_(1)
    run.commit()
    let_go(run)
    other = made()
    scale = other.model.scale
    recover(other.optimizer, memory, model=other.model).close()
    names = [name for name, _ in script.model.named_buffers()]
    assert names == [name for name, _ in other.model.named_buffers()]
    for one, its in zip(script.model.buffers(), other.model.buffers(), strict=True):
        assert one.dtype == its.dtype
        assert torch.equal(one, its)
    assert other.model.gone is None
    assert other.model.scale is scale is other.model[0].same


def test_entries_of_the_loop_in_the_state_are_committed(mesh: DeviceMesh, memory: Path) -> None:
    script, run = begun(mesh, memory)
    script.step(0)
    first = next(script.model.parameters())
    mean, flag = torch.full_like(first, 0.5).detach(), torch.tensor(True)
    script.optimizer.state[first].update(mean=mean, flag=flag, nothing=None)
    script.optimizer.state["seen"] = {"batches": torch.tensor([7])}  # type: ignore[index]
    run.commit()
    let_go(run)
    other = Script(mesh)
    recover(other.optimizer, memory).close()
    entry = other.optimizer.state[next(other.model.parameters())]
    assert torch.equal(entry["mean"].full_tensor(), mean.full_tensor())  # type: ignore[attr-defined]
    assert entry["flag"].dtype == torch.bool
    assert entry["nothing"] is None
    assert other.optimizer.state["seen"]["batches"].item() == 7  # type: ignore[index]


def test_an_optimizer_commits_to_one_folder_with_one_policy(mesh: DeviceMesh, memory: Path) -> None:
    script = Script(mesh)
    with pytest.raises(RuntimeError, match="is offloaded already"):
        recoverable(script.optimizer, memory, policy=OffloadPolicy(overlap="iteration"))
    run = recoverable(script.optimizer, memory)
    script.step(0)
    run.commit(0)
    with pytest.raises(RuntimeError, match=r"commits to .*rank-00000 already"):
        recoverable(script.optimizer, memory.parent / "other")
    script.step(1)
    run.commit(1)
    kept = script.values()
    let_go(run)
    with pytest.raises(RuntimeError, match="has left the homes to a recovery"):
        script.step(2)
    script.optimizer.zero_grad()
    assert_recovered(mesh, memory, 1, kept)
    remove_offload(script.optimizer)
    script.step(2)


# A leftover ----------------------------------------------------------------------------------------------------------


def test_a_leftover_is_not_begun_upon_and_not_recovered_by_another_training(mesh: DeviceMesh, memory: Path) -> None:
    kept = committed(mesh, memory)
    script = Script(mesh)
    with pytest.raises(RuntimeError, match="has commit 3 of a run that has ended"):
        recoverable(script.optimizer, memory)
    for wrong, words in (
        (Script(mesh, width=7), r"\d.weight: \[\[6, 6\].* there, \[\[7, 7\].* here"),
        (Script(mesh, parameters=True), "on the device"),
    ):
        with pytest.raises(ValueError, match=f"is of another training: {words}"):
            recover(wrong.optimizer, memory)
        wrong.step(0)
    layout = memory / "rank-00000" / "layout.json"
    text = json.loads(layout.read_text())
    for name, value in {"version": [1, "0.9"], "rank": [0, 2], "optimizer": "torch.optim.adam.Adam"}.items():
        layout.write_text(json.dumps(text | {name: value}))
        with pytest.raises(ValueError, match=f"another training: {name}"):
            recover(script.optimizer, memory)
    layout.write_text(json.dumps(text))
    run = recover(script.optimizer, memory)
    assert same_values(script.values(), kept)
    let_go(run)


def test_a_folder_without_a_commit_is_begun_anew(mesh: DeviceMesh, memory: Path) -> None:
    script = Script(mesh)
    let_go(recoverable(script.optimizer, memory))
    assert newest_commit(memory) is None
    with pytest.raises(ValueError, match="has no commit that all ranks have"):
        recover(Script(mesh).optimizer, memory)
    again = Script(mesh)
    run = recoverable(again.optimizer, memory)
    again.step(0)
    run.commit()
    run.close()


def test_only_a_commit_of_all_ranks_counts(mesh: DeviceMesh, memory: Path) -> None:
    committed(mesh, memory)
    layout = memory / "rank-00000" / "layout.json"
    layout.write_text(json.dumps(json.loads(layout.read_text()) | {"ranks_here": 2}))
    with pytest.raises(RuntimeError, match="of a run with 2 ranks on this host, and folders of 1"):
        newest_commit(memory)  # None would have the script begin anew
    shutil.copytree(memory / "rank-00000", memory / "rank-00001")
    assert newest_commit(memory) == 3
    (memory / "rank-00001" / "commit-00000003").unlink()
    assert newest_commit(memory) == 2
    (memory / "rank-00001" / "commit-00000002").unlink()
    assert newest_commit(memory) is None


def test_a_file_that_is_gone_or_cut_is_not_made_anew(mesh: DeviceMesh, memory: Path) -> None:
    committed(mesh, memory)
    os.truncate(memory / "rank-00000" / "homes-0-0", 100)
    with pytest.raises(ValueError, match="homes-0-0 has 100 bytes, not"):
        recover(Script(mesh).optimizer, memory)
    committed(mesh, memory.parent / "other", **MODES["parameters"])
    (memory.parent / "other" / "rank-00000" / "homes-1-1").unlink()
    script = Script(mesh, **MODES["parameters"])
    with pytest.raises(FileNotFoundError):
        recover(script.optimizer, memory.parent / "other")
    with pytest.raises(RuntimeError, match=r"moving its homes .* did not come to its end"):
        script.step(0)  # weights and state are partly those of the commit


def test_two_runs_do_not_share_a_folder(mesh: DeviceMesh, memory: Path) -> None:
    script, other = Script(mesh), Script(mesh)
    run = recoverable(script.optimizer, memory)
    with pytest.raises(RuntimeError, match="is in use: another run trains in it, or another optimizer"):
        recoverable(other.optimizer, memory)
    script.step(0)
    run.commit()  # the lock is still held

    def is_refused() -> bool:
        folders._held.clear()  # of the parent
        with pytest.raises(RuntimeError, match="is in use"):
            folders.RankFolder(memory / "rank-00000").hold(1)
        return True

    assert in_forked_child(is_refused) == 0
    run.close()


def test_a_folder_of_more_ranks_is_refused(mesh: DeviceMesh, memory: Path) -> None:
    script = Script(mesh)
    (memory / "rank-00001").mkdir(parents=True)
    with pytest.raises(RuntimeError, match="has rank-00001 of a run with more ranks than 1"):
        recoverable(script.optimizer, memory)


def test_a_write_to_a_frozen_parameter_that_no_commit_has_is_refused(mesh: DeviceMesh, memory: Path) -> None:
    for number, fields in enumerate(MODES.values()):
        script = Script(mesh, attach=False)
        teacher = script.model[1].requires_grad_(False)
        trained = [one for one in script.model.parameters() if one.requires_grad]
        script.optimizer = torch.optim.AdamW(trained, lr=0.1)
        offload_optimizer(script.optimizer, model=script.model, policy=OffloadPolicy(**fields))
        run = recoverable(script.optimizer, memory / str(number))
        for step in range(3):
            script.step(step)
            run.commit()
        with torch.no_grad():
            teacher.weight.mul_(2)
        script.optimizer.zero_grad()
        if "parameters" in fields:  # it has a home
            run.commit()
        else:
            with pytest.raises(RuntimeError, match=r"1.weight was written, and is not in the optimizer"):
                run.commit()
        run.close()


# Refusals ------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_recovered_is_refused_before_anything_changes(
    mesh: DeviceMesh, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Script(mesh, attach=False)
    with pytest.raises(RuntimeError, match=r"is not offloaded\. Give model=model"):
        recoverable(plain.optimizer, memory)
    one, other = Script(mesh), Script(mesh)
    with pytest.raises(RuntimeError, match="holds 2 optimizers; give one"):
        recoverable([one.optimizer, other.optimizer], memory)  # type: ignore[arg-type]
    offload_optimizer(plain.optimizer)
    with pytest.raises(ValueError, match="names are those of the model, and it is not known"):
        recoverable(plain.optimizer, memory)
    shared = Script(mesh, host_fraction=0.5)
    with pytest.raises(ValueError, match="the CPU updates a part of the state"):
        recoverable(shared.optimizer, memory)
    half = Script(mesh, attach=False)
    half.optimizer = torch.optim.AdamW(list(half.model.parameters())[:2])
    offload_optimizer(half.optimizer, model=half.model)
    with pytest.raises(ValueError, match="are trained by another optimizer"):
        recoverable(half.optimizer, memory)
    whole = Script(mesh, attach=False)
    whole.optimizer = torch.optim.LBFGS(whole.model.parameters())  # type: ignore[assignment]
    offload_optimizer(whole.optimizer, model=whole.model)
    with pytest.raises(ValueError, match="moves as a whole"):
        recoverable(whole.optimizer, memory)
    assert not memory.exists()
    with pytest.raises(ValueError, match="homes have to lie in memory"):
        recoverable(one.optimizer, tmp_path)
    monkeypatch.setattr("fsdp_offload.listeners.recovery.free_bytes_at", lambda _: 100)
    with pytest.raises(MemoryError, match=r"needs \d+ bytes for this rank, and 100 are free"):
        recoverable(one.optimizer, memory)
    one.step(0)


def test_a_commit_at_a_wrong_time_is_refused(mesh: DeviceMesh, memory: Path) -> None:
    script, run = begun(mesh, memory, overlap="iteration")
    with pytest.raises(RuntimeError, match="before the first step"):
        run.commit()
    for step in range(5):
        script.step(step)
        run.commit()
    script.backward(5)
    with pytest.raises(RuntimeError, match="between a backward and step"):
        run.commit()
    script.optimizer.step()
    with pytest.raises(Exception, match="pickle"):
        run.commit(lambda: 0)
    assert newest_commit(memory) == 5
    run.commit("after all")
    kept = script.values()
    let_go(run)
    with pytest.raises(RuntimeError, match=r"close\(\) was called"):
        run.commit()
    assert_recovered(mesh, memory, "after all", kept, overlap="iteration")


def test_a_commit_without_its_model_is_refused(mesh: DeviceMesh, memory: Path) -> None:
    script = Script(mesh, attach=False)
    wrapper = nn.Sequential(script.model)
    run = recoverable(script.optimizer, memory, model=wrapper)
    script.step(0)
    run.commit()
    del wrapper
    gc.collect()
    script.step(1)
    with pytest.raises(RuntimeError, match="the model that was given is gone"):
        run.commit()
    run.close()


def test_a_write_behind_a_commit_is_refused_until_it_is_committed(mesh: DeviceMesh, memory: Path) -> None:
    for number, fields in enumerate(MODES.values()):
        script, run = begun(mesh, memory / str(number), **fields)
        script.step(0)
        run.commit(0)
        with torch.no_grad():
            next(script.model.parameters()).mul_(2)
        with pytest.raises(RuntimeError, match="were written between commit"):
            script.step(1)
        script.optimizer.zero_grad()
        run.commit("again")
        kept = script.values()
        script.step(1)
        let_go(run)
        assert_recovered(mesh, memory / str(number), "again", kept, **fields)


def test_tensors_that_were_put_into_the_state_are_committed(mesh: DeviceMesh, memory: Path) -> None:
    script, run = begun(mesh, memory, overlap="iteration")
    for step in range(2):
        script.step(step)
        run.commit()
    for param in script.model.parameters():
        script.optimizer.state[param]["exp_avg"] = torch.full_like(param, 0.5).detach()
    run.commit()
    kept = script.values()
    let_go(run)
    assert_recovered(mesh, memory, None, kept, overlap="iteration")
    assert kept[7].unique().item() == 0.5


def test_a_commit_that_cannot_be_written_stops_training_until_another_is(
    mesh: DeviceMesh, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, run = begun(mesh, memory, overlap="iteration")
    script.step(0)
    run.commit(0)
    script.step(1)
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(torch, "save", full)
        run.commit(1)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                script.step(2)
            script.optimizer.zero_grad()
    assert newest_commit(memory) == 1
    run.commit(1)
    kept = script.values()
    script.step(2)
    let_go(run)
    assert_recovered(mesh, memory, 1, kept, overlap="iteration")


def test_a_write_to_what_had_no_gradient_ends_the_commit_before(
    mesh: DeviceMesh, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, run = begun(mesh, memory, width=24, bucket_bytes=1024, device_bytes=8192)  # state of weights is cut
    script.step(0)
    run.commit(0)
    script.backward(1)
    first = next(script.model.parameters())
    first.grad = None
    script.optimizer.step()  # the state of this parameter is where it was for the commit
    script.optimizer.zero_grad()
    script.optimizer.state[first]["exp_avg"].mul_(2)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", partial(raised, iter([OSError(28, "killed before it is written")])))
        run.commit(1)
        with pytest.raises(OSError, match="killed"):
            script.step(2)
    assert newest_commit(memory) is None
    run.close()


def test_memory_that_does_not_suffice_leaves_the_optimizer_as_it_was(
    mesh: DeviceMesh, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, script = Script(mesh, attach=False), Script(mesh, parameters=True)
    for taken in range(3):
        full = iter([None] * taken + [OSError(28, "No space left on device")])
        with monkeypatch.context() as patch:
            patch.setattr(arena, "_populate", partial(raised, full))
            with pytest.raises(MemoryError, match="no room for"):
                recoverable(script.optimizer, memory)
        plain.step(taken)
        script.step(taken)
    assert same_values(script.values(), plain.values())
    run = recoverable(script.optimizer, memory)
    script.step(3)
    run.commit()
    run.close()


def raised(errors: Iterator[OSError | None], *_: object) -> None:
    if (error := next(errors)) is not None:
        raise error


def write_unseen(script: Script) -> None:
    params = list(script.model.parameters())
    for param in params[::2]:
        param.data.mul_(0.5)
    with torch.no_grad():
        torch._foreach_mul_(params[1::2], 0.5)


@pytest.mark.parametrize("mode", MODES)
def test_a_commit_has_writes_that_no_version_tells(mesh: DeviceMesh, memory: Path, mode: str) -> None:
    script, run = begun(mesh, memory, **MODES[mode])
    for step in range(2):
        script.step(step)
        write_unseen(script)
        run.commit(step)
    kept = script.values()
    let_go(run)
    assert_recovered(mesh, memory, 1, kept, **MODES[mode])


@pytest.mark.parametrize("mode", MODES)
def test_a_recovered_process_changes_nothing_before_its_first_step(mesh: DeviceMesh, memory: Path, mode: str) -> None:
    kept = committed(mesh, memory, **MODES[mode])
    script = Script(mesh, **MODES[mode])
    run = recover(script.optimizer, memory)
    with pytest.raises(RuntimeError, match="before the first step"):  # another rank may still have a newer commit
        run.commit()
    with torch.no_grad():
        next(script.model.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match=r"were written between recover\(\) and the backward"):
        script.backward(3)
    let_go(run)
    if mode != "parameters":
        assert_recovered(mesh, memory, 2, kept, **MODES[mode])


def test_a_step_may_be_skipped_before_any_was_made(mesh: DeviceMesh, memory: Path) -> None:
    script, run = begun(mesh, memory)
    script.backward(0)  # a GradScaler finds an inf
    script.optimizer.zero_grad()
    run.commit("skipped")
    let_go(run)
    other = Script(mesh, lr=0.5)
    again = recover(other.optimizer, memory)
    assert again.extra == "skipped"
    assert same_values([*other.values()], script.values())
    other.step(1)
    again.commit()
    again.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_load_ends_all_commits_until_the_next(mesh: DeviceMesh, memory: Path, mode: str) -> None:
    script, run = begun(mesh, memory, **MODES[mode])
    script.step(0)
    saved = script.optimizer.state_dict()
    saved["state"] = {at: {k: v.clone() for k, v in one.items()} for at, one in saved["state"].items()}
    script.step(1)
    run.commit()
    script.optimizer.load_state_dict(saved)
    assert newest_commit(memory) is None
    script.step(2)
    run.commit()
    kept = script.values()
    let_go(run)
    assert newest_commit(memory) == 2
    assert_recovered(mesh, memory, None, kept, **MODES[mode])


def test_other_homes_or_no_offload_end_it(mesh: DeviceMesh, memory: Path) -> None:
    script, run = begun(mesh, memory)
    script.step(0)
    run.commit()
    more = nn.Parameter(torch.ones(3))
    script.optimizer.add_param_group({"params": [more]})
    more.grad = torch.ones(3)
    script.step(1)
    with pytest.raises(RuntimeError, match="has got state for other parameters or options since"):
        run.commit()
    remove_offload(script.optimizer)
    with pytest.raises(RuntimeError, match="not offloaded any more"):
        run.commit()
    run.close()
