"""A folder of transformers' Trainer, whose optimizer.pt knows parameters by number: a checkpoint with state by name."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from tests.checkpoint_tools.formats import SMALL_CONFIG
from tests.checkpoint_tools.saves import Trap, edit_file, same_bits
from tests.checkpoint_tools.tool import assert_one_line, made, names, run, shown, values_of, with_names

SMALL: dict[str, Any] = SMALL_CONFIG | {"tie_word_embeddings": True}


class Run:
    """Two steps of the real Trainer; ``frozen``: parameters whose names begin so are not trained."""

    def __init__(self, folder: Path, frozen: str = "nothing") -> None:
        torch.manual_seed(0)
        self.model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**SMALL))
        for name, param in self.model.named_parameters():
            param.requires_grad_(not name.startswith(frozen))
        tokens = torch.arange(8) % 5
        data: Any = [{"input_ids": tokens, "labels": tokens}] * 4
        told = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
        args = hf.TrainingArguments(folder, max_steps=2, save_steps=2, weight_decay=0.1, learning_rate=0.125, **told)
        self.trainer = hf.Trainer(self.model, args, train_dataset=data)
        self.trainer.train()
        self.folder = folder / "checkpoint-2"
        self.names = [name for name, _ in self.model.named_parameters()]

    def groups(self) -> list[list[str]]:
        """The names of each param group, by the parameters themselves."""
        names = {param: name for name, param in self.model.named_parameters()}
        return [[names[param] for param in group["params"]] for group in self.trainer.optimizer.param_groups]

    def assert_is(self, folder: Path) -> None:
        """Plain DCP reads every tensor, counter and option of the files, under these names."""
        wanted: dict[str, Any] = {f"model.{k}": v for k, v in load_file(self.folder / "model.safetensors").items()}
        saved = torch.load(self.folder / "optimizer.pt")
        for number, name in enumerate(name for group in self.groups() for name in group):
            wanted.update({f"optimizer.state.{name}.{key}": value for key, value in saved["state"][number].items()})
        for number, (group, own) in enumerate(zip(saved["param_groups"], self.groups(), strict=True)):
            wanted.update({f"optimizer.param_groups.{number}.{k}": v for k, v in (group | {"params": own}).items()})
        found = values_of(folder)
        assert found.keys() == wanted.keys()
        assert [key for key, value in wanted.items() if not same_bits(value, found[key])] == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("trained"))


def test_every_number_gets_its_name(trained: Run, tmp_path: Path) -> None:
    """Weights that decay and others are two groups, and the tied head is no parameter: there is one way."""
    assert [len(group) for group in trained.groups()] == [15, 11]
    new = made("convert", trained.folder, tmp_path / "flat", *with_names(tmp_path, trained.names))
    trained.assert_is(new)
    assert (new / "trainer_state.json").exists()
    trained.assert_is(made("convert", trained.folder, tmp_path / "groups", *with_names(tmp_path, trained.groups())))
    made("convert", new, tmp_path / "safetensors")
    assert "the same: " in shown("diff", new, made("convert", tmp_path / "safetensors", tmp_path / "back"))


def test_a_frozen_layer_fits_twice_and_is_asked_for(tmp_path: Path) -> None:
    run_ = Run(tmp_path / "run", frozen="model.layers.0")
    refused = run("convert", run_.folder, tmp_path / "new", *with_names(tmp_path, run_.names))
    assert_one_line(refused, "14 of them in groups of [8, 6], and several ways to name them fit (")
    for number, given in enumerate((run_.groups(), [name for name in run_.names if "layers.0" not in name])):
        run_.assert_is(made("convert", run_.folder, tmp_path / f"{number}", *with_names(tmp_path, given)))


def _edit(edit: Callable[[Any], object]) -> Callable[[Path], None]:
    return lambda folder: edit_file(folder / "optimizer.pt", edit)


OTHER_SHAPE = {"exp_avg": torch.zeros(3, 5), "exp_avg_sq": torch.zeros(3, 5)}


def _with_a_trap(folder: Path) -> None:
    torch.save({"state": {}, "param_groups": Trap(folder / "ran")}, folder / "optimizer.pt")


def _swapped(names: list[str]) -> list[str]:
    return [names[1], names[0], *names[2:]]


REFUSED: dict[str, tuple[Callable[[Path], object], Callable[[list[str]], Any], str]] = {
    "state in no group": (
        _edit(lambda state: state["param_groups"].pop(1)),
        list,
        "a parameter with state is in no param group",
    ),
    "another shape": (
        _edit(lambda state: state["state"][3].update(OTHER_SHAPE)),
        list,
        "the model's names and shapes do not fit",
    ),
    "another order": (lambda _: None, _swapped, "the model's names and shapes do not fit"),
    "a name too few": (lambda _: None, lambda names: names[1:], "the model's names and shapes do not fit"),
    "a name of no weight": (lambda _: None, lambda names: [*names, "x"], "--names has x, and"),
    "one group's names": (lambda _: None, lambda names: [names], "the model's names and shapes do not fit"),
    "something to run": (_with_a_trap, list, "optimizer.pt cannot be understood (it asks for posix.system"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str, trained: Run, tmp_path: Path) -> None:
    spoil, given, said = REFUSED[case]
    folder = Path(shutil.copytree(trained.folder, tmp_path / "source"))
    spoil(folder)
    assert_one_line(run("convert", folder, tmp_path / "new", *with_names(tmp_path, given(trained.names))), said)
    assert names(tmp_path) == ["names.json", "source"]
    assert not (folder / "ran").exists()


def test_without_names_it_says_what_to_give(trained: Run, tmp_path: Path) -> None:
    told = "optimizer.pt has the optimizer's state, which would be left behind", "--names FILE one of both", "--exclude"
    assert_one_line(run("convert", trained.folder, tmp_path / "new"), *told)
    weights = made("convert", trained.folder, tmp_path / "weights", "--exclude", "optimizer.pt")
    idle = run("convert", weights, tmp_path / "new", *with_names(tmp_path, trained.names))
    assert_one_line(idle, "--names is for files of ranks, or safetensors with one optimizer.pt; leave it out")
