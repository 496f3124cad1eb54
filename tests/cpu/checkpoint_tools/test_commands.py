"""The commands as people use them: from a shell, with errors in one line, and nothing left behind."""

import json
import os
import shlex
import shutil
import weakref
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import pytest
import rich.console
import rich.progress
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checkpoint_tools import preset_names, rewrite
from checkpoint_tools.core.text import NEED_EXTRA, CheckpointError
from checkpoint_tools.rewrite import held
from checkpoint_tools.stored.items import ItemReader
from tests.checkpoint_tools import saves, tool
from tests.checkpoint_tools.saves import DOWN, FUSED, GATE, PLAIN, RULES, UP, WITH_FUSED, entry_of, rule, save


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved") / "checkpoint", PLAIN)


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    (tmp_path / "rules.toml").write_text(RULES)
    return save(tmp_path / "fused", WITH_FUSED)


# What is printed -----------------------------------------------------------------------------------------------------


def test_what_commands_print(saved: Path, tmp_path: Path) -> None:
    save_file({"a.weight": torch.tensor([1.0, torch.nan])}, file := tmp_path / "model.safetensors")
    a = save(tmp_path / "a", {"x": torch.zeros(4), "y": torch.ones(2), "lr": 0.1})
    b = save(tmp_path / "b", {"x": torch.tensor([0.0, 0.25, 0, 0]), "y": torch.ones(2), "z": torch.ones(1), "lr": 0.1})
    whole = "whole (7 tensors, 2 objects, ", "checked: structure, files, finite values"
    planned, made = "to be written: 7 tensors as safetensors", f"{tmp_path}/made: 7 tensors as safetensors, "
    for command, code, texts in (
        (("inspect", saved), 0, ("layers.10.weight", "4 × 5", "optim exp_avg", "7 tensors, 2 objects in 1 file")),
        (("inspect", file), 0, ("a.weight  2",)),
        (("verify", saved, "--finite"), 0, whole),
        (("verify", file, "--finite"), 1, ("a.weight: 1 of 2 values are not finite", "1 problem (")),
        (("diff", a, b), 1, ("1 of 4 differ", "0.25", "only in B", "different: 2 of 4 keys\n")),
        (("diff", a, b, "y", "lr"), 0, ("the same: 2 keys, bit by bit\n",)),
        (("diff", a, b, "x", "--atol", 0.25), 0, ("the same: 1 key, within the tolerance\n",)),
        (("convert", saved, tmp_path / "new", "--dry-run"), 0, ("model-00001-of-00001.safetensors", planned)),
        (("convert", saved, tmp_path / "made", "--shard-size", 100, "--threads", 1), 0, (made,)),
        (("convert", tmp_path / "made", tmp_path / "back", "--to", "dcp"), 0, (f"{tmp_path}/back: 7 tensors",)),
    ):
        printed = tool.shown(*command, code=code)
        assert all(text in printed for text in texts), (command, printed)
    assert tool.names(tmp_path) == ["a", "b", "back", "made", "model.safetensors"]
    tool.assert_same(tmp_path / "back", saved)
    tiling = json.loads(tool.shown("inspect", file, "--tiling", "a.weight", "--json"))
    assert tiling["chunks"][0]["bare_dtype"] == "float32"
    assert "optim" not in tool.shown("inspect", saved, "model.*")


def test_split_and_merge(fused: Path, tmp_path: Path) -> None:
    before = saves.contents(fused)
    (fused / "README").write_text("ours")
    command = ("split", fused, tmp_path / "split", "--rules", tmp_path / "rules.toml", "--dry-run")
    planned = tool.shown(*command)
    assert f"model.{UP}" in planned
    assert "to be written: 1 tensor and 1 state tensor split, 192 bytes of " in planned
    assert "note: copied: README" in planned
    assert tool.names(tmp_path) == ["fused", "rules.toml"]
    split = tool.from_shell("split", "fused", "split", "--rules", "rules.toml", "--threads", 1, cwd=tmp_path)
    assert (split.returncode, split.stderr) == (0, "")
    assert split.stdout.splitlines()[-1].startswith("split: 1 tensor and 1 state tensor split, 192 bytes of ")
    tool.shown("merge", "split", "merged", "--rules", "rules.toml", cwd=tmp_path)
    tool.assert_same(tmp_path / "merged", fused)
    assert all(len(chunks) == 1 for chunks in tool.chunks_of(tmp_path / "merged").values())  # of adjacent parts
    assert saves.contents(fused).items() >= before.items()
    assert tool.names(tmp_path) == ["fused", "merged", "rules.toml", "split"]
    dcp_to_torch_save(tmp_path / "split", tmp_path / "split.pt")
    nested = torch.load(tmp_path / "split.pt")
    assert nested["optim"]["param_groups"] == [{"lr": 0.5, "params": [GATE, UP, DOWN]}]
    assert torch.equal(nested["optim"]["state"][UP]["exp_avg"], WITH_FUSED["optim"]["state"][FUSED]["exp_avg"][4:])


def test_diff_says_which_side_is_split(fused: Path, tmp_path: Path) -> None:
    split = tool.made("split", fused, tmp_path / "split", "--rules", tmp_path / "rules.toml")
    assert "note: B is split, and A is not: 1 fused tensor" in tool.run("diff", fused, split).stdout
    assert f"checkpoint-tools merge {split} MERGED" in tool.as_json("diff", split, fused, code=1)["notes"][0]
    assert "split_record.json" not in tool.shown("merge", split, tmp_path / "merged")
    assert "note" not in tool.shown("diff", fused, tmp_path / "merged")


def test_a_terminal_is_told_what_goes_on_before_there_is_a_bar(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(rich.console.Console, "is_terminal", True)
    monkeypatch.setattr(rich.console.Console, "status", lambda _, what: nullcontext(said.append(what)))
    for command in (("inspect", saved), ("verify", saved), ("convert", saved, tmp_path / "new")):
        assert tool.run(*command).returncode == 0
    assert said == ["reading the metadata", "checking structure and files", "reading and planning"]


def test_progress_ends_where_it_said(fused: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    totals, done = {}, Counter[str]()

    def add_task(_: object, what: str, total: int) -> str:
        totals[what] = total
        return what

    monkeypatch.setattr(rich.progress.Progress, "add_task", add_task)
    monkeypatch.setattr(rich.progress.Progress, "advance", lambda _, what, nbytes: done.update({what: nbytes}))
    tool.shown("verify", fused, "--finite", "--data")
    tool.shown("split", fused, tmp_path / "split", "--rules", tmp_path / "rules.toml")
    tool.shown("convert", tmp_path / "split", tmp_path / "made")
    tool.shown("diff", tmp_path / "split", tmp_path / "made")
    (tmp_path / "own.toml").write_text("[source]\nhf = ''\na = ''\n[[name]]\na = '{name}'\nhf = 'new.{name}'\n")
    tool.shown("rename", fused, tmp_path / "named", "--family", tmp_path / "own.toml", "--from", "a", "--to", "hf")
    assert totals.keys() == {"data", "split", "values", "convert", "rename, 1 of 1"}
    assert all(0 < done[what] <= total for what, total in totals.items())  # what is around elements is not told of
    assert all(done[what] == totals[what] for what in ("data", "values"))


# Errors --------------------------------------------------------------------------------------------------------------

ERRORS = r"""
inspect @nowhere                              | is not a folder
inspect file://@nowhere                       | is not a folder
verify @rules                                 | is not a folder
verify @empty                                 | has no .metadata. DCP writes it last: this is no checkpoint, or its save
diff @cut @saved                              | cannot be read as the metadata of a checkpoint
diff @saved @hostile                          | asks for posix.system
diff @saved @gone                             | __0_0.distcp cannot be read
inspect @saved no.such.*                      | PATTERN that matches nothing: no.such.*.
diff @saved @saved no.such.*                  | PATTERN that matches nothing: no.such.*.
diff @saved @saved model.* no.such.*          | nothing: no.such.*. Look at the keys
diff @saved @saved --key-prefix model.        | no key of one side is that and a key of the other
inspect unheard-of://x                        | cannot be opened
split @nowhere @new --rules @rules            | is not a folder
split @short @new --rules @rules              | short is not whole: __0_0.distcp: has 100 bytes of
split @gone @new --rules @rules               | is not whole: __0_0.distcp: is not there
split @hostile @new --rules @rules            | asks for posix.system
split @newer @new --rules @rules              | has version 2.0 of the checkpoint format, and these tools know 1.x; use
split @integers @new --rules @rules           | is stored as torch.float32
split @fused @empty --rules @rules            | empty exists; give a name that is not taken
split @fused @fused --rules @rules            | fused exists
split @fused @fused/new --rules @rules        | lies inside of
split @fused @link/new --rules @rules         | lies inside of
split @fused @no/new --rules @rules           | is not a folder; make it first
split @fused file://@fused/new --rules @rules | lies inside of
split @fused unheard-of://x --rules @rules    | cannot be opened
split '' @new --rules @rules                  | SRC is empty; give the folder of a checkpoint
split @fused '' --rules @rules                | DST is empty; give the name of a new folder
split @fused @new                             | no rules; give --preset NAME or --rules FILE: no preset matches its keys
split @towers @new | presets that match its keys: gpt-oss, hf-experts-transposed, hf-gate-up, megatron-swiglu
merge @towers @new                            | has no split_record.json; give --preset NAME or --rules FILE: pre
merge @towers @new                            | presets that match its keys: hf-qkv, hf-query-key-value
split @apart @new --preset megatron-swiglu    | , but their parts: they are split already. Look at the keys
split @saved @new --preset megatron-swiglu    | take out what is not there; no preset matches its keys (gpt-oss
split @fused @new --preset nothing            | no preset 'nothing'; there are
split @fused @new --rules @none               | none: No such file
split @fused @new --rules @bad                | bad
split @fused @new --rules @qkv                | rules that match nothing: {p}qkv.weight
split @fused @new --rules @uneven             | its parts have sizes [5, 4], 9 together
split @fused @new --rules @empty              | empty: Is a directory
split @fused @new --rules @rules --rules @rules           | is matched by several rules
split @fused @new --rules @rules --exclude *              | rules that match nothing
split @fused @new --rules @rules --exclude x* --exclude *down* | --exclude that matches nothing: x*.
split @fused @new --rules @rules --value tp=2             | --value that no rule uses: tp. The rules name none
split @fused @new --rules @valued --value n=4 --value m=1 | no rule uses: m. The rules name n
split @fused @new --rules @valued                         | give it with --value n=NUMBER
split @fused @new --rules @valued --value n=MANY          | the size 'n' cannot be evaluated: int too large
split @fused @new --rules @deep.toml                      | is no TOML: maximum recursion depth exceeded
merge @fused @new --rules @rules                          | rules that match nothing
split @experts @new                                       | presets that match its keys: hf-experts
split @experts @new --preset hf-experts | needs the config value 'num_experts'; give it with --value num_experts=NUMBER
split @experts @new --preset hf-experts --value num_experts=4     | its dimension 0 has 3
split @experts @new --preset hf-experts --value num_experts=1e9   | a tensor has at most 65,536 parts
merge @single @new                                        | presets that match its keys: hf-experts
merge @single @new --preset hf-experts --value num_experts=3      | pass --yes
merge @less @new --preset hf-experts --value num_experts=3 --yes  | proj cannot be merged: ['mlp.experts.1.
rename @a.steps/0 @a --family llama --from hf --to megatron             | lies inside of
rename @made @new --family llama --from hf --to megatron  | has safetensors: checkpoint-tools convert
split @made @new --preset megatron-swiglu                 | DST makes a checkpoint of DCP of it
rename @fused @new --family gemma --from hf --to hf | no family 'gemma'; there are llama, mixtral, qwen3, qwen3-moe
rename @only @new --family qwen3 --from hf --to nemo | no framework 'nemo' in the family qwen3; there are hf, torchtitan
rename @fused @new --family qwen3 --from hf --to hf       | --from and --to are both hf
rename @fused @new --family @deep.toml --from hf --to a   | is no TOML
rename @fused @new --family @one.toml --from hf --to a    | not as docs/checkpoints.md describes it
rename @fused @new --family @odd.toml --from hf --to a    | not as docs/checkpoints.md describes it (KeyError: 'm')
rename @fused @new --family @each.toml --from hf --to a --value n=inf   | the size 'n' is inf, not a whole number
convert @nowhere @new                         | is not a folder
convert @nowhere.safetensors @new             | nowhere.safetensors: No such file
convert @uncovered @new                       | model.layers.2.weight: 1 of 4 elements are in no chunk
convert @hostile @new                         | asks for posix.system
convert @complex @new                         | model.a is complex128, which safetensors do not have; leave it out
convert @named @new                           | would be named '__metadata__'
convert @halves @new                          | would be named 'a\udc80b', which safetensors do not allow
convert @only @new --key-prefix model.        | has no tensor of a model
convert @saved @new --key-prefix net.         | has no tensor of a model whose key begins with 'net.'
convert @saved @new --to dcp                  | is a checkpoint of DCP already
convert @made @new --to safetensors           | is safetensors already
convert @saved @new --to gguf                 | --to is safetensors, dcp, torch or fsdp_dtensor
convert @saved @new --exclude *               | has nothing that would be converted
convert @objects @new                         | has nothing that would be converted: no tensors
convert @made @new --exclude *                | has nothing that would be converted
convert @saved @new --exclude *.weight --exclude x        | --exclude that matches nothing: x.
convert @made @new --exclude x                | --exclude that matches nothing: x.
convert @saved @new --shard-size large        | 'large' is not a size
convert @saved @new --shard-size 5            | 5 is 5 bytes; write 5MiB or 5GiB, or 5bytes if you mean that
convert @saved @new --max-memory 1            | 1 is 1 bytes; write 1MiB or 1GiB
convert @saved @made                          | made exists; give a name that is not taken
convert @made @made/new                       | lies inside of
convert @made file://@made/new                | lies inside of
convert @trap.pt @new                         | has more than tensors and plain values, and is not loaded
convert @list.pt @new                         | has a list, and no state dict
convert @damaged.pt @new                      | is not what torch.save writes
convert @nowhere.pt @new                      | nowhere.pt: No such file
convert @list.pt @new --dtype bf16            | all is taken: leave out --dtype, and convert the result
convert @list.pt @new --shard-size 1GB        | all is taken: leave out --shard-size, and convert the result
convert @saved @new.pt --to torch --shard-size 1GB --dry-run        | leave out --shard-size, --dry-run, and convert
convert @saved @new.pt                        | new.pt is a file's name: give --to torch
convert @saved @new.pt --to torch --max-memory 256bytes     | do not fit into --max-memory
convert @object @new.pt --to torch            | has more than tensors and plain values
convert @saved @own.pt --to torch             | own.pt.partial: File exists
convert @saved file:///tmp/x.pt --to torch    | on this machine alone
"""
"""A command, in which ``@`` is a folder of the test's own, and what it says."""


def test_errors_are_one_line_and_leave_nothing_behind(tmp_path: Path) -> None:
    saved, fused = save(tmp_path / "saved", PLAIN), save(tmp_path / "fused", WITH_FUSED)
    tool.made("convert", saved, tmp_path / "made")
    trap, one = saves.Trap(tmp_path / "sprung"), torch.ones(2)
    states: dict[str, dict[str, Any]] = {
        "complex": {"model": {"a": torch.ones(2, dtype=torch.complex128)}},
        "object": {"model": {"a": one}, "thing": saves.Opaque(), "trap": trap},
        "named": {"model": {"__metadata__": one}},
        "objects": {"a": "text"},
        "halves": {"model": {"a\udc80b": one}},
        "only": {"optim": {"state": {"a": {"exp_avg": one}}}},
        "towers": {
            "model": {"2.mlp.experts.gate_up_proj": torch.ones(1, 2, 2), "up.linear_fc1.weight": torch.ones(2, 2)},
            "optim": {"state": {f"2.mlp.{name}_proj.weight": {"exp_avg": one} for name in ("gate", *"qkv")}},
        },
        "experts": {"mlp.experts.gate_proj": torch.ones(3, 2, 4), "mlp.experts.down_proj": torch.ones(3, 4, 2)},
        "single": {f"mlp.experts.{n}.{name}_proj.weight": one for n in range(3) for name in ("gate", "down")},
        "less": {f"mlp.experts.{n}.{name}_proj.weight": one for n in (0, 2) for name in ("gate", "down")},
        "apart": {"model": {"up.linear_fc1.weight_w": one, "up.linear_fc1.weight_v": one}},
    }
    for name, state in states.items():
        save(tmp_path / name, state)
    uncovered = "model.layers.2.weight"
    for name, source, edit in (
        ("hostile", saved, lambda found: setattr(found, "planner_data", trap)),
        ("newer", fused, lambda found: setattr(found, "version", "2.0")),
        ("integers", fused, lambda found: setattr(entry_of(found, f"model.{FUSED}").properties, "dtype", torch.int32)),
        ("uncovered", saved, lambda found: setattr(entry_of(found, uncovered), "size", torch.Size([4]))),
    ):
        saves.changed(source, name, edit)
    for name in ("empty", "cut", "a.steps"):
        (tmp_path / name).mkdir()
    (tmp_path / "a.steps" / ".being-written").touch()
    shutil.copytree(fused, tmp_path / "a.steps" / "0")
    (tmp_path / "cut" / ".metadata").write_bytes((saved / ".metadata").read_bytes()[:-50])
    (shutil.copytree(fused, tmp_path / "gone") / "__0_0.distcp").unlink()
    os.truncate(shutil.copytree(fused, tmp_path / "short") / "__0_0.distcp", 100)
    (tmp_path / "link").symlink_to(fused)
    for name, text in {
        "rules": RULES,
        "bad": "[[rule]]\nfused = 'x'\n",
        "qkv": RULES.replace("gate_up", "qkv"),
        "valued": RULES + "sizes = ['n', 'rest']\n",
        "deep.toml": "a = " + "[" * 10_000,
        "one.toml": "name = 1",
        "odd.toml": "[source]\nhf = ''\na = ''\n[[name]]\nhf = '{n}'\na = '{m}'\n",
        "each.toml": "name = []\n[source]\nhf = ''\na = ''\n[[rule]]\n"
        "of = 'a'\nfused = 'x'\nparts = ['{each}']\neach = 'n'\n",
        "own.pt.partial": "somebody's",
        "uneven": RULES + "sizes = [5, 4]\n",
    }.items():
        (tmp_path / name).write_text(text)
    torch.save({"a": trap}, tmp_path / "trap.pt")
    torch.save([one], tmp_path / "list.pt")
    (tmp_path / "damaged.pt").write_bytes(b"PK\3\4 nothing")
    before = {path: saves.contents(path) if path.is_dir() else path.read_bytes() for path in tmp_path.iterdir()}
    for line in ERRORS.strip().splitlines():
        command, _, message = line.partition(" | ")
        command = command.replace("@", f"{tmp_path}/").replace("MANY", "9" * 400)
        tool.assert_one_line(tool.run(*shlex.split(command)), message)
    assert {path: saves.contents(path) if path.is_dir() else path.read_bytes() for path in tmp_path.iterdir()} == before


def test_two_at_the_same_place_and_a_folder_of_somebody_else(fused: Path, tmp_path: Path) -> None:
    command = ("split", fused, tmp_path / "new", "--rules", tmp_path / "rules.toml")
    partial = tmp_path / "new.partial"
    with held(partial):
        tool.assert_one_line(tool.from_shell(*command), "another process is writing to")
    shutil.rmtree(partial)
    partial.mkdir()
    (partial / "thesis.tex").write_text("")
    tool.assert_one_line(tool.run(*command), "exists, and was not made by this program")
    assert tool.names(partial) == ["thesis.tex"]
    (partial / "thesis.tex").unlink()
    tool.shown(*command)


def test_a_source_that_is_written_to_meanwhile(fused: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "seal", lambda *args, **options: os.utime(fused / "__0_0.distcp", ns=(1, 1)))
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        tool.made("split", fused, tmp_path / "new", rule())
    assert tool.names(tmp_path) == ["fused", "rules.toml"]


def test_what_is_written_does_not_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(tmp_path / "source", {f"{n}.gate_up.weight": torch.ones(8, 2) for n in range(9)})
    pieces: list[weakref.ref[torch.Tensor]] = []
    kept, read, write = [], ItemReader.bits, torch.save

    def reads(*args: Any) -> torch.Tensor:
        kept.append(sum(piece() is not None for piece in pieces))
        return read(*args)

    def writes(piece: torch.Tensor, stream: Any) -> None:
        pieces.append(weakref.ref(piece))
        write(piece, stream)

    monkeypatch.setattr(ItemReader, "bits", reads)
    monkeypatch.setattr(torch, "save", writes)
    tool.made("split", source, tmp_path / "new", rule(), threads=1)
    assert (kept, len(pieces)) == ([0] * 18, 18)


def test_a_rank_with_much_has_several_files(fused: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "_FILE_BYTES", 100)
    new = tool.made("split", fused, tmp_path / "new", rule())
    assert len(list(new.glob("__0_*.distcp"))) == 5
    tool.assert_same(tool.made("merge", new, tmp_path / "back", rule()), fused)


# Other places --------------------------------------------------------------------------------------------------------


def test_an_item_of_another_order_that_does_not_fit_into_memory(tmp_path: Path) -> None:
    source = save(tmp_path / "source", {"model": {FUSED: torch.randn(300, 400).t()}})
    for new in (tmp_path / "new", "memory://nothing"):
        with pytest.raises(CheckpointError, match="can only be read as a whole"):
            tool.made("split", source, new, rule(), "--max-memory", 100_000)
        assert tool.names(tmp_path) == ["source"]
    assert not fsspec.filesystem("memory").exists("/nothing")
    split = tool.made("split", source, "memory://nothing", rule(), "--max-memory", 8_000_000)
    assert tool.shapes_of(split)[f"model.{GATE}"] == [200, 300]
    tool.assert_same(tool.made("merge", split, tmp_path / "merged", rule(), "--max-memory", 8_000_000), source)


def test_behind_a_url(fused: Path, saved: Path, tmp_path: Path) -> None:
    command = ("split", f"file://{fused}", f"file://{tmp_path}/split", "--rules", tmp_path / "rules.toml")
    tool.shown(*command)
    tool.assert_same(tmp_path / "split", tool.made("split", fused, tmp_path / "local", rule()))
    tool.assert_one_line(tool.run(*command), "exists; give a name that is not taken")
    tool.assert_same(tool.made("merge", tmp_path / "split", "memory://merged", rule()), fused)
    loaded: dict[str, Any] = {"model": {FUSED: torch.zeros(8, 3)}}
    tool.load(loaded, "memory://merged")
    assert torch.equal(loaded["model"][FUSED], WITH_FUSED["model"][FUSED])
    there = tool.made("convert", f"file://{saved}", "memory://converted")
    tool.assert_same(tool.made("convert", there, tmp_path / "back"), saved)
    tool.assert_one_line(tool.run("convert", saved, there), "exists")
    tool.shown("diff", there, saved)
    one = tool.made("convert", f"{there}/model-00001-of-00001.safetensors", tmp_path / "one")
    assert set(tool.values_of(one)) == {"model.layers.2.weight", "model.layers.10.weight"}


# Help ----------------------------------------------------------------------------------------------------------------


def test_help_names_the_presets() -> None:
    for command in ("split", "merge"):
        lines = [line.split() for line in tool.shown(command, "--help").splitlines()]
        named = {words[0]: " ".join(words[1:]) for words in lines if words and words[0] in preset_names()}
        assert tuple(named) == preset_names()
        assert all(len(text) > 20 and text[-1] == "." for text in named.values()), named
        assert "gate and up of linear_fc1" in named["megatron-swiglu"]


HELP = """
--help                                     | 0 | Usage
--version                                  | 0 | checkpoint-tools 0.1
split --help                               | 0 | run the same command again after a kill
verify                                     | 2 | Missing argument
verify x --no-such-option                  | 2 | No such option
diff x y --max-memory much                 | 2 | error: 'much' is not a size
split x y --value tp_size=two              | 2 | --value is NAME=NUMBER
convert x y --dtype int4                   | 2 | --dtype is fp32, bf16, fp16, fp64, not int4
convert x.pt y --exclude *                 | 2 | --exclude is not for files of torch.save
rename x y                                 | 2 | Missing option
"""


def test_help_and_wrong_options() -> None:
    for line in HELP.strip().splitlines():
        command, code, text = map(str.strip, line.split(" | "))
        ran = tool.run(*command.split())
        assert ran.returncode == int(code), ran
        assert text in " ".join((ran.stdout + ran.stderr).split()), ran


@pytest.mark.parametrize("package", ["typer", "safetensors"])
def test_the_extra_is_not_installed(package: str) -> None:
    code = f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv = ['x', 'inspect', 'nowhere.safetensors']; "
    ran = tool.python("-c", code + "runpy.run_module('checkpoint_tools', None, '__main__')")
    assert (ran.returncode, ran.stderr.removeprefix("error: ")) == (2, f"{NEED_EXTRA}\n")


def test_what_should_not_happen_is_a_line_too(saved: Path) -> None:
    code = "import sys, checkpoint_tools.look.inspect as o; o.summary = None; import runpy; sys.argv[0] = 'x'"
    command = ("-c", f"{code}; runpy.run_module('checkpoint_tools', None, '__main__')", "inspect", saved)
    tool.assert_one_line(tool.python(*command), "error: unexpected TypeError")
    assert "Traceback" in tool.python(*command, CHECKPOINT_TOOLS_TRACEBACK="1").stderr
