"""The commands as people use them: from a shell, with errors in one line, and nothing left behind."""

import io
import json
import os
import shlex
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checkpoint_tools import preset, split_state_dict
from checkpoint_tools.core.errors import NEED_EXTRA, CheckpointError
from checkpoint_tools.fuse.rules import preset_names
from checkpoint_tools.rewrite import rewrite
from checkpoint_tools.rewrite.save import held
from checkpoint_tools.stored.reading import open_checkpoint
from tests.checkpoint_tools.checkpoints import (
    ROOT,
    STATE,
    Opaque,
    Trap,
    assert_one_line,
    changed,
    contents,
    python,
    run_here,
    run_tool,
    save,
    save_on_two_ranks,
)
from tests.checkpoint_tools.offline import DOWN, FUSED, GATE, RULES, UP, assert_same, converted, rewritten, rule
from tests.checkpoint_tools.offline import STATE as FUSED_STATE


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved") / "checkpoint", STATE)


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    (tmp_path / "rules.toml").write_text(RULES)
    return save(tmp_path / "fused", FUSED_STATE)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def shown(*command: object, code: int = 0) -> str:
    run = run_here(*command)
    assert (run.returncode, run.stderr) == (code, "")
    return run.stdout


# inspect, verify, diff -----------------------------------------------------------------------------------------------


def test_inspect(saved: Path) -> None:
    everything, groups = shown("inspect", saved, "--files"), shown("inspect", saved, "--groups")
    some = shown("inspect", f"file://{saved}", "model.*")
    assert "model.layers.10.weight" in everything
    assert "__0_0.distcp" in everything
    assert "7 tensors, 2 objects in 1 file" in everything
    assert "4 × 5" in everything
    assert "optim exp_avg" in groups
    assert "layers.10" not in groups
    assert "model.layers.10.weight" in some
    assert "optim" not in some
    assert len(json.loads(shown("inspect", saved, "--json"))["keys"]) == 9


@pytest.mark.distributed
def test_tiling_and_diff_on_two_ranks(tmp_path: Path) -> None:
    rows, columns = save_on_two_ranks(tmp_path)
    picture = shown("inspect", rows, "--tiling", "model.fused")
    as_json = json.loads(shown("inspect", columns, "--tiling", "model.fused", "--json"))
    assert "model.fused: 7 × 6 of float32 in 2 chunks" in picture
    assert "4, 0     3 × 6  __1_0.distcp" in picture
    assert [chunk["offsets"] for chunk in as_json["chunks"]] == [[0, 0], [0, 3]]
    assert shown("diff", rows, columns) == "the same: 3 keys, bit by bit\n"
    assert_one_line(run_here("inspect", rows, "--tiling", "model.nothing"), "model.nothing is not in the checkpoint")
    shown("verify", rows, "--finite", "--threads", 1)


def test_verify(saved: Path, tmp_path: Path) -> None:
    whole = run_tool("verify", saved, "--finite")
    assert (whole.returncode, whole.stderr) == (0, "")
    assert "whole (7 tensors, 2 objects, " in whole.stdout
    assert "checked: structure, files, finite values" in whole.stdout
    bad = save(tmp_path / "bad", {"x": torch.tensor([torch.nan]), "y": torch.zeros(3)})
    finite = shown("verify", bad, "--finite", code=1)
    assert "x: 1 of 1 values are not finite" in finite
    assert "1 problem (" in finite
    save_file({"a.weight": torch.tensor([1.0, torch.nan])}, tmp_path / "model.safetensors")
    assert "a.weight  2" in shown("inspect", tmp_path / "model.safetensors")
    tiling = json.loads(shown("inspect", tmp_path / "model.safetensors", "--tiling", "a.weight", "--json"))
    assert tiling["chunks"][0]["bare_dtype"] == "float32"
    checked = shown("verify", tmp_path / "model.safetensors", "--finite", code=1)
    assert "a.weight: 1 of 2 values are not finite" in checked
    cut = shutil.copytree(saved, tmp_path / "cut")
    os.truncate(cut / "__0_0.distcp", 100)
    assert "__0_0.distcp: has 100 bytes of" in shown("verify", cut, code=1)
    found = json.loads(shown("verify", cut, "--json", code=1))
    assert (found["whole"], found["problems"][0]["where"]) == (False, "__0_0.distcp")


def test_diff(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {"x": torch.zeros(4), "y": torch.ones(2), "lr": 0.1})
    b = save(tmp_path / "b", {"x": torch.tensor([0.0, 0.25, 0, 0]), "y": torch.ones(2), "z": torch.ones(1), "lr": 0.1})
    different = shown("diff", a, b, code=1)
    assert all(text in different for text in ("1 of 4 differ", "0.25", "only in B"))
    assert different.endswith("different: 2 of 4 keys\n")
    assert shown("diff", a, b, "y", "lr") == "the same: 2 keys, bit by bit\n"
    assert shown("diff", a, b, "x", "--atol", 0.25) == "the same: 1 key, within the tolerance\n"
    assert [found["key"] for found in json.loads(shown("diff", a, b, "--json", code=1))["differences"]] == ["x", "z"]


# split, merge, convert -----------------------------------------------------------------------------------------------


def test_split_and_merge(fused: Path, tmp_path: Path) -> None:
    before = contents(fused)
    (fused / "README").write_text("ours")
    command = ("split", fused, tmp_path / "split", "--rules", tmp_path / "rules.toml", "--dry-run")
    planned, found = shown(*command), json.loads(shown(*command, "--json"))
    assert f"model.{UP}" in planned
    assert "to be written: 1 tensor and 1 state tensor split, 192 bytes of " in planned
    assert "note: copied as it is: README" in planned
    assert found["fusions"][0]["parts"][0] == {"key": f"model.{GATE}", "shape": [4, 3], "chunks": 1}
    assert names(tmp_path) == ["fused", "rules.toml"]
    split = run_tool("split", "fused", "split", "--rules", "rules.toml", "--threads", 1, cwd=tmp_path)
    assert (split.returncode, split.stderr) == (0, "")
    assert split.stdout.splitlines()[-1].startswith("split: 1 tensor and 1 state tensor split, 192 bytes of ")
    assert run_here("merge", "split", "merged", "--rules", "rules.toml", cwd=tmp_path).returncode == 0
    merged = open_checkpoint(tmp_path / "merged")
    assert_same(merged, open_checkpoint(fused))
    assert all(len(tensor.chunks) == 1 for tensor in merged.tensors.values())  # of parts beside each other
    assert contents(fused).items() >= before.items()
    assert names(tmp_path) == ["fused", "merged", "rules.toml", "split"]
    dcp_to_torch_save(tmp_path / "split", tmp_path / "split.pt")
    nested = torch.load(tmp_path / "split.pt")
    assert nested["optim"]["param_groups"] == [{"lr": 0.5, "params": [GATE, UP, DOWN]}]
    assert torch.equal(nested["optim"]["state"][UP]["exp_avg"], FUSED_STATE["optim"]["state"][FUSED]["exp_avg"][4:])


def test_presets_values_and_exclusions(tmp_path: Path) -> None:
    fused, down = "layers.0.mlp.linear_fc1.weight", "layers.0.mlp.linear_fc2.weight"
    model = {fused: torch.ones(8, 3), down: torch.ones(3, 4), f"vision.{fused}": torch.ones(3, 3)}
    source = save(tmp_path / "source", {"model": model})
    command = ("split", source, tmp_path / "made", "--preset", "megatron-swiglu")
    shown(*command, "--value", "tp_size=2", "--exclude", "*vision*")
    keys = set(open_checkpoint(tmp_path / "made").tensors)
    assert keys == {f"model.{fused}_w", f"model.{fused}_v", f"model.{down}", f"model.vision.{fused}"}
    shutil.rmtree(tmp_path / "made")
    assert_one_line(run_here(*command, "--value", "tp_size=2"), f"model.vision.{fused}")


def test_convert_there_and_back(saved: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(saved, tmp_path / "source"))
    (source / "README").write_text("ours")
    before = contents(source)
    planned = shown("convert", source, tmp_path / "made", "--dry-run")
    found = json.loads(shown("convert", source, tmp_path / "made", "--dry-run", "--json", "--what", "model"))
    assert "model-00001-of-00001.safetensors" in planned
    assert "note: copied as it is: README" in planned
    assert "to be written: 7 tensors as safetensors" in planned
    assert (list(found["files"]), found["key_prefix"]) == (["model-00001-of-00001.safetensors"], "model.")
    assert "7 keys not of the model, left out" in found["notes"]
    assert names(tmp_path) == ["source"]
    made = run_here("convert", "source", "made", "--shard-size", "100", "--threads", 1, cwd=tmp_path)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.splitlines()[-1].startswith("made: 7 tensors as safetensors, ")
    assert run_here("convert", "made", "back", "--to", "dcp", cwd=tmp_path).returncode == 0
    assert_same(open_checkpoint(tmp_path / "back"), open_checkpoint(source))
    assert contents(source) == before
    assert (tmp_path / "back" / "README").read_text() == "ours"
    for command in ("diff source made", "diff made back", "verify made --finite"):
        same = run_here(*command.split(), cwd=tmp_path)
        assert same.returncode == 0, same.stdout + same.stderr
        assert "note" not in same.stdout
    assert names(tmp_path) == ["back", "made", "source"]


# Errors --------------------------------------------------------------------------------------------------------------

ERRORS = """
inspect @nowhere                              | is not a folder
verify @empty                                 | has no .metadata
diff @cut @saved                              | cannot be read as the metadata of a checkpoint
inspect @hostile                              | asks for posix.system
verify @hostile                               | asks for posix.system
diff @saved @hostile                          | asks for posix.system
diff @saved @gone                             | __0_0.distcp cannot be read
inspect @saved no.such.*                      | no key of
diff @saved @saved no.such.*                  | no key of either
inspect @saved model.* no.such.*              | is like no.such.*;
diff @saved @saved model.* no.such.*          | is like no.such.*;
verify @saved --max-memory 127                | --max-memory is at least 128 bytes for 4 threads, not 127
diff @saved @saved --max-memory 511           | --max-memory is at least 512 bytes for 2 threads, not 511
diff @saved @saved --key-prefix x.            | no key of one side is that and a key of the other
diff @saved @saved --key-prefix model.        | no key of one side is that and a key of the other
inspect unheard-of://x                        | cannot be opened
split @nowhere @new --rules @rules            | is not a folder
split @empty @new --rules @rules              | has no .metadata
split @short @new --rules @rules              | short is not whole: __0_0.distcp: has 100 bytes of
split @gone @new --rules @rules               | is not whole: __0_0.distcp: is not there
split @hostile @new --rules @rules            | asks for posix.system
split @newer @new --rules @rules              | has version 2.0
split @integers @new --rules @rules           | is stored as torch.float32
split @fused @empty --rules @rules            | empty exists; give a name that is not taken
split @fused @fused --rules @rules            | fused exists
split @fused @fused/new --rules @rules        | lies inside of
split @fused @link/new --rules @rules         | lies inside of
split @fused @no/new --rules @rules           | is not a folder; make it first
split @fused file://@fused/new --rules @rules | lie inside of each other
split @fused unheard-of://x --rules @rules    | cannot be opened
split @fused '' --rules @rules                | DST is empty; give the name of a new folder
split @fused @new                             | no rules; give --preset
split @fused @new --preset nothing            | no preset 'nothing'; there are
split @fused @new --rules @none               | none: No such file
split @fused @new --rules @bad                | bad
split @fused @new --rules @qkv                | rules that match nothing: {p}qkv.weight
split @fused @new --rules @uneven             | its parts have sizes [5, 4], 9 together
split @fused @new --rules @empty              | empty is a folder; --rules takes a TOML or JSON file
split @fused @new --rules @rules --rules @rules           | is matched by several rules
split @fused @new --rules @rules --exclude *              | rules that match nothing
split @fused @new --rules @rules --exclude x* --exclude *down* | --exclude that matches nothing: x*.
split @fused @new --rules @rules --value tp=2             | --value that no rule uses: tp. The rules name none
split @fused @new --rules @valued --value n=4 --value m=1 | no rule uses: m. The rules name n
split @fused @new --rules @valued                         | give it with --value n=NUMBER
split @fused @new --rules @rules --max-memory 255         | --max-memory is at least 256 bytes for 4 threads, not 255
merge @fused @new --rules @rules                          | rules that match nothing
convert @nowhere @new                         | is not a folder
convert @nowhere.safetensors @new             | nowhere.safetensors cannot be read
convert @uncovered @new                       | model.layers.2.weight: 1 of 4 elements are in no chunk
convert @hostile @new                         | asks for posix.system
convert @extra @new --what model              | model.a._extra_state is an object of the model
convert @complex @new                         | model.a is complex128, which safetensors do not have; leave it out
convert @named @new                           | would be named '__metadata__'
convert @only @new --what model               | has no tensor of a model
convert @saved @new --key-prefix net.         | has no tensor of a model whose key begins with 'net.'
convert @saved @new --to dcp                  | is a checkpoint of DCP already
convert @made @new --to safetensors           | is safetensors already
convert @saved @new --to gguf                 | --to is safetensors or dcp
convert @saved @new --exclude *               | has nothing that would be converted
convert @made @new --exclude *                | has nothing that would be converted
convert @saved @new --exclude *.weight --exclude x        | --exclude that matches nothing: x.
convert @made @new --exclude x                | --exclude that matches nothing: x.
convert @saved @new --max-memory 1            | --max-memory is at least 256 bytes for 4 threads
convert @saved @new --shard-size large        | 'large' is not a size
convert @saved @made                          | made exists; give a name that is not taken
convert @made @made/new                       | lies inside of
convert @made file://@made/new                | lie inside of each other
convert @trap.pt @new                         | has more than tensors and plain values, and is not loaded
convert @list.pt @new                         | has a list, and no state dict
convert @damaged.pt @new                      | is not what torch.save writes
convert @nowhere.pt @new                      | nowhere.pt is not there
convert @list.pt @new --dtype bf16            | between torch.save and DCP all is taken as it is
convert @saved @new.pt --to torch --max-memory 256        | do not fit into --max-memory
convert @object @new.pt --to torch            | consists of more than tensors and plain values
convert @saved file:///tmp/x.pt --to torch    | on this machine alone
"""
"""A command, in which ``@`` is a folder of the test's own, and what it says."""


def test_errors_are_one_line_and_leave_nothing_behind(tmp_path: Path) -> None:
    saved, fused = save(tmp_path / "saved", STATE), save(tmp_path / "fused", FUSED_STATE)
    converted(saved, tmp_path / "made")
    trap, one = Trap(tmp_path / "sprung"), torch.ones(2)
    moment = {"optim": {"state": {"a": {"exp_avg": torch.ones(6)}}}}
    states: dict[str, dict[str, Any]] = {
        "complex": {"model": {"a": torch.ones(2, dtype=torch.complex128)}},
        "extra": {"model": {"a": one, "a._extra_state": io.BytesIO(b"x")}},
        "object": {"model": {"a": one}, "thing": Opaque(), "trap": trap},
        "named": {"model": {"__metadata__": one}},
        "only": moment,
    }
    for name, state in states.items():
        save(tmp_path / name, state)

    def metadata_with(name: str, source: Path, place: Any, attribute: str, value: Any) -> None:
        changed(source, name, lambda metadata: setattr(place(metadata), attribute, value))

    metadata_with("hostile", saved, lambda metadata: metadata, "planner_data", trap)
    metadata_with("newer", fused, lambda metadata: metadata, "version", "2.0")
    entries = (lambda metadata: metadata.state_dict_metadata[f"model.{FUSED}"].properties, "dtype", torch.int32)
    metadata_with("integers", fused, *entries)
    key = "model.layers.2.weight"
    metadata_with("uncovered", saved, lambda metadata: metadata.state_dict_metadata[key], "size", torch.Size([4]))
    for name in ("empty", "cut"):
        (tmp_path / name).mkdir()
    (tmp_path / "cut" / ".metadata").write_bytes((saved / ".metadata").read_bytes()[:-50])
    (shutil.copytree(fused, tmp_path / "gone") / "__0_0.distcp").unlink()
    os.truncate(shutil.copytree(fused, tmp_path / "short") / "__0_0.distcp", 100)
    (tmp_path / "link").symlink_to(fused)
    for name, text in {
        "rules": RULES,
        "bad": "[[rule]]\nfused = 'x'\n",
        "qkv": RULES.replace("gate_up", "qkv"),
        "valued": RULES + "sizes = ['n', 'rest']\n",
        "uneven": RULES + "sizes = [5, 4]\n",
    }.items():
        (tmp_path / f"{name}").write_text(text)
    torch.save({"a": trap}, tmp_path / "trap.pt")
    torch.save([one], tmp_path / "list.pt")
    (tmp_path / "damaged.pt").write_bytes(b"PK\3\4 nothing")
    before = {path: contents(path) if path.is_dir() else path.read_bytes() for path in tmp_path.iterdir()}
    for line in ERRORS.strip().splitlines():
        command, _, message = line.partition(" | ")
        assert_one_line(run_here(*shlex.split(command.replace("@", f"{tmp_path}/"))), message)
    assert {path: contents(path) if path.is_dir() else path.read_bytes() for path in tmp_path.iterdir()} == before
    shown("convert", tmp_path / "extra", tmp_path / "new", "--exclude", "*_extra_state")


def test_two_at_the_same_place_and_a_folder_of_somebody_else(fused: Path, tmp_path: Path) -> None:
    command = ("split", fused, tmp_path / "new", "--rules", tmp_path / "rules.toml")
    partial = tmp_path / "new.partial"
    with held(partial):
        assert_one_line(run_tool(*command), "another process is writing to")
    shutil.rmtree(partial)
    partial.mkdir()
    (partial / "thesis.tex").write_text("")
    assert_one_line(run_here(*command), "is there, and not of these tools")
    assert (partial / "thesis.tex").exists()
    (partial / "thesis.tex").unlink()
    shown(*command)


def test_a_source_that_is_written_to_meanwhile(fused: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "seal", lambda *args, **options: os.utime(fused / "__0_0.distcp", ns=(1, 1)))
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        rewritten("split", fused, tmp_path / "new", rule())
    assert names(tmp_path) == ["fused", "rules.toml"]


def test_an_item_of_another_order_that_does_not_fit_into_memory(tmp_path: Path) -> None:
    source = save(tmp_path / "source", {"model": {FUSED: torch.randn(300, 400).t()}})
    for new in (tmp_path / "new", "memory://nothing"):
        with pytest.raises(CheckpointError, match="can only be read as a whole"):
            rewritten("split", source, new, rule(), max_memory_bytes=100_000)
        assert names(tmp_path) == ["source"]
    assert not fsspec.filesystem("memory").exists("/nothing")
    split = rewritten("split", source, "memory://nothing", rule(), max_memory_bytes=8_000_000)
    assert split.tensors[f"model.{GATE}"].shape == (200, 300)
    assert_same(rewritten("merge", "memory://nothing", tmp_path / "merged", rule()), open_checkpoint(source))


# Other places --------------------------------------------------------------------------------------------------------


def test_behind_a_url(fused: Path, saved: Path, tmp_path: Path) -> None:
    command = ("split", f"file://{fused}", f"file://{tmp_path}/split", "--rules", tmp_path / "rules.toml")
    shown(*command)
    assert_same(open_checkpoint(tmp_path / "split"), rewritten("split", fused, tmp_path / "local", rule()))
    assert_one_line(run_here(*command), "exists; give a name that is not taken")
    assert_same(rewritten("merge", tmp_path / "split", "memory://merged", rule()), open_checkpoint(fused))
    loaded: dict[str, Any] = {"model": {FUSED: torch.zeros(8, 3)}}
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.load(loaded, checkpoint_id="memory://merged", no_dist=True)
    assert torch.equal(loaded["model"][FUSED], FUSED_STATE["model"][FUSED])
    shown("convert", f"file://{saved}", "memory://converted")
    shown("convert", "memory://converted", tmp_path / "back")
    assert_same(open_checkpoint(tmp_path / "back"), open_checkpoint(saved))
    assert_one_line(run_here("convert", saved, "memory://converted"), "exists")
    shown("diff", "memory://converted", saved)
    shown("convert", "memory://converted/model-00001-of-00001.safetensors", tmp_path / "one")
    assert set(open_checkpoint(tmp_path / "one").tensors) == {"model.layers.2.weight", "model.layers.10.weight"}


# Help, before torch is there -----------------------------------------------------------------------------------------


def test_help_is_for_people(tmp_path: Path) -> None:
    above = shown("--help")
    for command, expected in {
        "inspect": "--tiling KEY",
        "verify": "Exit code: 0 whole, 1",
        "diff": "Exit code: 0 the same",
        "split": "run the same command again after a kill",
        "merge": "the inverse of split",
        "convert": "Make safetensors of a checkpoint of DCP, or a checkpoint of safetensors, bit by bit.",
        "rename": "Of models: llama, qwen3, qwen3-moe",
    }.items():
        assert command in above
        text = shown(command, "--help")
        assert expected in " ".join(text.split())
        if command in ("split", "merge"):
            names = [line.strip().partition(": ")[0] for line in text.splitlines() if ": " in line]
            assert [name for name in names if name in preset_names()] == list(preset_names())
    none = run_here()
    assert "Usage" in none.stdout + none.stderr
    state = {"mlp.linear_fc1.weight": torch.ones(8, 4), "mlp.linear_fc2.weight": torch.ones(4, 4)}
    source, hint = save(tmp_path / "source", state), "presets that match some of them: megatron-swiglu"
    assert_one_line(run_here("split", source, tmp_path / "new", "--preset", "hf-gate-up"), hint)
    with pytest.raises(ValueError, match=f"{hint}$"):
        split_state_dict(state, None, preset("hf-gate-up"))


WITHOUT_TORCH = """
--help                                     | 0 | Usage
split --help                               | 0 | Usage
--version                                  | 0 | checkpoint_tools of fsdp-offload
verify                                     | 2 | Missing argument
verify x --no-such-option                  | 2 | No such option
verify x --max-memory much                 | 2 | error: 'much' is not a size
split x y --value tp_size=two              | 2 | --value is NAME=NUMBER
convert x y --what else                    | 2 | --what is model, optimizer or all
convert x y --dtype int4                   | 2 | --dtype is fp32, bf16, fp16, fp64, not int4
convert x y.pt --to torch --what model     | 2 | all is taken as it is
convert x.pt y --exclude *                 | 2 | --exclude is not for files of torch.save
merge x y --yes --json                     | 2 | --json is for --dry-run
rename x y                                 | 2 | Missing option
"""


def test_help_and_wrong_options_do_not_wait_for_torch(tmp_path: Path) -> None:
    """With a torch that cannot be imported."""
    (tmp_path / "torch.py").write_text("raise AssertionError('torch is imported')")
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text("raise AssertionError('rich is imported')")
    for line in WITHOUT_TORCH.strip().splitlines():
        command, code, text = map(str.strip, line.split(" | "))
        run = python("-m", "checkpoint_tools", *command.split(), PYTHONPATH=f"{tmp_path}:{ROOT}")
        assert run.returncode == int(code), run
        assert text in " ".join((run.stdout + run.stderr).split()), run


@pytest.mark.parametrize("package", ["typer", "rich", "safetensors"])
def test_the_extra_is_not_installed(package: str) -> None:
    code = f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv = ['x', 'inspect', 'nowhere']; "
    run = python("-c", code + "runpy.run_module('checkpoint_tools', None, '__main__')")
    assert run.returncode == 2
    assert run.stderr.removeprefix("error: ") == f"{NEED_EXTRA}\n"


@pytest.mark.usefixtures("interrupts_reach_children")
@pytest.mark.parametrize("module", ["torch", "typer"])
def test_ctrl_c_while_modules_are_imported(saved: Path, tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)\nwhile True: pass")
    run = python("-m", "checkpoint_tools", "verify", saved, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (run.returncode, run.stdout, run.stderr) == (128 + signal.SIGINT, "", "")


def test_what_should_not_happen_is_a_line_too(saved: Path) -> None:
    code = "import sys, checkpoint_tools.stored.reading as o; o.open_checkpoint = None; import runpy; sys.argv[0] = 'x'"
    command = ("-c", f"{code}; runpy.run_module('checkpoint_tools', None, '__main__')", "inspect", saved)
    assert_one_line(python(*command), "error: unexpected TypeError")
    assert "Traceback" in python(*command, CHECKPOINT_TOOLS_TRACEBACK="1").stderr


def test_an_output_of_ascii_and_completion(saved: Path) -> None:
    """As the shell asks for it; --show-completion looks at which shell has started it, and a test's is no shell."""
    run = python("-m", "checkpoint_tools", "inspect", saved, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (run.returncode, run.stderr) == (0, "")
    assert "4 x 5" in run.stdout
    main = "from checkpoint_tools.__main__ import main; main()"
    assert "_checkpoint_tools_completion()" in python("-c", main, _CHECKPOINT_TOOLS_COMPLETE="source_bash").stdout
