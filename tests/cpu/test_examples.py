"""The examples, run as a reader would run them, with small sizes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from examples import demo_resume, megatron_style_loop, rl_sleep, train_gpt

TRAIN_GPT = Path(train_gpt.__file__)
SMALL = ("--device", "cpu", "--layers", "2", "--width", "32", "--heads", "2", "--seq-len", "32", "--data-mib", "1")


@pytest.fixture(autouse=True)
def find_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the processes that a test starts, also where the package is not installed; gloo's threads end before them."""
    root = TRAIN_GPT.parents[1]
    paths = [str(root), str(root / "tests" / "quiet_exit"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def run(name: str, *flags: str, ranks: int = 0, folder: Path | None = None) -> str:
    """What an example printed, in a process of its own: frameworks change settings of the one they run in."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, str(TRAIN_GPT.with_name(f"{name}.py")), *flags]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


FEW = ("--steps", "4", "--layers", "2", "--folder", "{folder}")
# As scripts, whose folder is the first place that imports look in: what they are called must not hide a package.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "async_checkpoint": ("--folder", "{folder}", "--steps", "4"),
    "benchmark_frameworks": ("--help",),  # trained with below
    "bf16_master_weights": ("--steps", "3"),
    "demo_resume": ("--steps", "4", "--layers", "2"),
    "megatron_slices": ("--ranks", "2", "--resume-ranks", "1"),
    "megatron_style_loop": ("--compare", "--steps", "3", "--width", "32", "--layers", "2"),
    "recover_after_kill": ("--steps", "4", "--width", "16"),
    "resume_other_world_size": ("--ranks", "2", "--resume-ranks", "1"),
    "rl_sleep": ("--width", "32", "--layers", "2"),
    "send_deltas": ("--steps", "3", "--width", "32", "--layers", "2"),
    "te_fused_adam": ("--help",),  # is for GPUs
    "train_bigger_than_the_gpu": ("--width", "32", "--steps", "2"),
    "train_gpt": (*SMALL, "--steps", "2"),
    "weights_while_training": ("--steps", "5", "--width", "32"),
    "with_accelerate": (*FEW, "--width", "64"),
    "with_lightning": FEW,
    "with_megatron_fsdp": ("--help",),
    "with_torchtitan": (*FEW, "--width", "64"),
    "with_trainer": FEW,
    "with_verl": (),
    "worked_cases": ("--models", "Llama-3.1-8B"),
}
NEEDS = {
    "with_accelerate": "accelerate",
    "with_lightning": "lightning",
    "with_megatron_fsdp": "megatron_fsdp",
    "with_torchtitan": "torchtitan.components.optimizer",
    "with_trainer": "transformers",
    "with_verl": "verl.workers.engine",
    "te_fused_adam": "transformer_engine.pytorch",
}
SAID = {
    "with_accelerate": ["state on the host"],
    "with_trainer": ["offload/memory/host_bytes", "resumed: the same"],
    "with_lightning": ["resumed: the same"],
    "with_torchtitan": ["resumed: the same"],
}
"""By scripts that train with a framework."""


def test_every_example_is_run_as_a_script() -> None:
    assert SCRIPTS.keys() == {path.stem for path in TRAIN_GPT.parent.glob("*.py") if path.stem != "__init__"}


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    ranks = 2 if name == "with_torchtitan" else 0
    output = run(name, *(flag.format(folder=tmp_path) for flag in SCRIPTS[name]), ranks=ranks, folder=tmp_path)
    assert all(output.count(said) >= max(1, ranks) for said in SAID.get(name, ()))


@pytest.mark.parametrize("name", ["send_deltas", "weights_while_training"])
def test_weights_are_sent(name: str) -> None:
    output = run(name, *SCRIPTS[name])
    assert "the engine has the trainer's weights" in output or "; 0 of them are those of no step" in output


@pytest.mark.long
@pytest.mark.distributed
def test_offloaded_and_resumed_training_has_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--seq-len", "32", "--data-mib", "1", "--accumulate", "2"]  # the model's own size: several buckets
    assert demo_resume.main(["--ranks", "2", "--steps", "6", *flags]) == 0
    assert "PASS" in capsys.readouterr().out


def test_the_notebook_says_the_same_again() -> None:
    cells = json.loads((TRAIN_GPT.parent / "offload.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    shown = [line for cell in cells for output in cell.get("outputs", ()) for line in output.get("text", ())]
    claims = [line for line in shown if "same" in line]
    assert len(claims) == 4
    assert all(line.endswith(": True\n") and line in done.stdout for line in claims)


def test_one_process_learns_and_shows_where_its_state_is(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    output = run("train_gpt", *SMALL, "--steps", "40", "--metrics", str(metrics))
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    measured = [record["loss"] for record in records if "loss" in record]
    assert len(measured) == 40
    assert measured[0] == pytest.approx(5.55, abs=0.1)  # ln 256: nothing is known about a byte
    assert measured[-1] < 4.0
    assert "MB on host" in output
    assert "validation loss" in output


def test_training_with_asynchronous_checkpoints_goes_on_where_it_was(tmp_path: Path) -> None:
    """On one rank: from begin to end, and with a stop, behind which a save was left that never ended."""
    (tmp_path / "parts/step-00000005").mkdir(parents=True)
    parts = (("straight", 11), ("parts", 7), ("parts", 11))
    runs = [f"--width 16 --save-every 3 --folder {tmp_path / name} --steps {steps}".split() for name, steps in parts]
    code = f"from examples.async_checkpoint import main\nfor flags in {runs}:\n    main(flags)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    *before, resumed, last = done.stdout.splitlines()
    assert before.count("starting from nothing") == 2
    assert (resumed, last) == ("resumed after step 7", before[1])
    assert last.startswith("step 11, checksum ")
    # Two stay: the last of every three steps, and the last of all.
    for folder in (tmp_path / "straight", tmp_path / "parts"):
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000009", "step-00000011"]
        assert (folder / "latest").read_text() == "step-00000011"


SMALL_LOOPS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "rl_sleep": (rl_sleep.main, "--rounds 2 --width 32 --layers 2"),
    "megatron_style_loop": (
        megatron_style_loop.main,
        "--steps 4 --width 48 --layers 2 --passing-kib 64 --staying-kib 128 --compare",
    ),
}


@pytest.mark.parametrize(("main", "flags"), SMALL_LOOPS.values(), ids=SMALL_LOOPS)
def test_loops_whose_state_leaves_train_the_same(
    main: Callable[[list[str]], int], flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags.split()) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("PASS: the same ")


def test_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its registry gives our engine to the actor; what runs in it is tests/distributed/test_integration_verl.py's."""
    pytest.importorskip("verl.workers.engine")
    from examples import with_verl

    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    assert with_verl.EngineRegistry.get_engine_cls("language_model", "fsdp2") is with_verl.OffloadEngine
    assert not issubclass(with_verl.EngineRegistry.get_engine_cls("value_model", "fsdp2"), with_verl.OffloadEngine)


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("framework", ["trainer", "accelerate"])
def test_the_bench_of_frameworks(tmp_path: Path, framework: str) -> None:
    records = tmp_path / "records.jsonl"
    common = ("--size", "tiny", "--steps", "6", "--policy", '{"bucket_bytes": 16384}', "--folder", str(tmp_path))
    run("benchmark_frameworks", framework, *common, "--records", str(records), ranks=2)
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    verdicts = [value for line in lines for name, value in line.items() if name.startswith("same")]
    assert verdicts == [True] * 4
    table = run("benchmark_frameworks", "table", "--records", str(records))
    assert f"| 2 | {framework} | overlapped | " in table
