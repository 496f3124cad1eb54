"""The examples, run as a reader would run them, with small sizes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from examples import (
    async_checkpoint,
    bf16_master_weights,
    demo_resume,
    megatron_slices,
    megatron_style_loop,
    resume_other_world_size,
    rl_sleep,
    train_gpt,
)

TRAIN_GPT = Path(train_gpt.__file__)
SMALL = ("--device", "cpu", "--layers", "2", "--width", "32", "--heads", "2", "--seq-len", "32", "--data-mib", "1")


@pytest.fixture(autouse=True)
def find_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the processes that a test starts, also where the package is not installed; gloo's threads end before them."""
    root = TRAIN_GPT.parents[1]
    paths = [str(root), str(root / "tests" / "quiet_exit"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.fixture
def torch_settings() -> Iterator[None]:
    """For a training in this process: its seed and its deterministic algorithms are not for the tests after it."""
    environment, rng_state = dict(os.environ), torch.get_rng_state()
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.set_rng_state(rng_state)
    os.environ.clear()
    os.environ.update(environment)


def run_alone(*flags: str) -> str:
    """`python train_gpt.py`, without torchrun; what it printed."""
    command = [sys.executable, str(TRAIN_GPT), *SMALL, *flags]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


# As scripts, whose folder is the first place that imports look in: what they are called must not hide a package.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "async_checkpoint": ("--folder", "{folder}", "--steps", "4"),
    "benchmark_frameworks": ("--help",),  # trained with below
    "bf16_master_weights": ("--steps", "3"),
    "demo_resume": ("--steps", "4", "--layers", "2"),
    "megatron_slices": ("--ranks", "2", "--resume-ranks", "1"),
    "megatron_style_loop": ("--compare", "--steps", "3", "--width", "32", "--layers", "2"),
    "resume_other_world_size": ("--ranks", "2", "--resume-ranks", "1"),
    "rl_sleep": ("--width", "32", "--layers", "2"),
    "te_fused_adam": ("--help",),  # the others are for GPUs
    "train_bigger_than_the_gpu": ("--help",),
    "train_gpt": (*SMALL, "--steps", "2"),
    "with_accelerate": ("--help",),  # trained with below
    "with_lightning": ("--help",),
    "with_megatron_fsdp": ("--help",),
    "with_torchtitan": ("--help",),
    "with_trainer": ("--help",),
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


def test_every_example_is_run_as_a_script() -> None:
    assert SCRIPTS.keys() == {path.stem for path in TRAIN_GPT.parent.glob("*.py") if path.stem != "__init__"}


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    flags = [flag.format(folder=tmp_path) for flag in SCRIPTS[name]]
    command = [sys.executable, str(TRAIN_GPT.with_name(f"{name}.py")), *flags]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def losses(metrics: Path) -> list[float]:
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def error_of(capsys: pytest.CaptureFixture[str], flags: Sequence[str]) -> str:
    """The message with which a training with these flags is refused."""
    with pytest.raises(SystemExit) as refusal:
        train_gpt.main([*SMALL, "--no-offload", *flags])
    code = refusal.value.code
    return code if isinstance(code, str) else capsys.readouterr().err.splitlines()[-1]


@pytest.mark.long
@pytest.mark.distributed
def test_offloaded_and_resumed_training_has_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--seq-len", "32", "--data-mib", "1", "--accumulate", "2"]  # the model's own size: several buckets
    assert demo_resume.main(["--ranks", "2", "--steps", "6", *flags]) == 0
    assert "PASS" in capsys.readouterr().out


def test_the_demo_names_the_first_difference() -> None:
    training = [{"loss_hex": "0x1.8p+2"}, {"loss_hex": "0x1.4p+2"}, {"validation_loss_hex": "0x1.6p+2"}]
    assert demo_resume.first_difference(training, list(training)) == ""
    other = [training[0], {"loss_hex": "0x1.4000000000001p+2"}, training[2]]
    assert "line 2: loss_hex" in demo_resume.first_difference(training, other)
    assert "2 lines instead of 3" in demo_resume.first_difference(training, training[:2])


def test_one_process_learns_and_shows_where_its_state_is(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    output = run_alone("--steps", "40", "--metrics", str(metrics))
    measured = losses(metrics)
    assert len(measured) == 40
    assert measured[0] == pytest.approx(5.55, abs=0.1)  # ln 256: nothing is known about a byte
    assert measured[-1] < 4.0
    assert "MiB on host" in output
    assert "validation loss" in output


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.usefixtures("torch_settings")
@pytest.mark.filterwarnings("ignore:.*The parameters are on the CPU:UserWarning")
def test_a_checkpoint_of_two_ranks_goes_on_with_one(tmp_path: Path) -> None:
    """The same batches in the same order; only the order in which gradients are added differs."""
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    train_gpt.main([*SMALL, "--steps", "6", "--metrics", str(whole)])
    saving = [*SMALL, "--steps", "6", "--save-dir", str(tmp_path / "checkpoints"), "--metrics", str(resumed)]
    demo_resume.train(2, [*saving, "--stop-at", "3"])
    train_gpt.main([*saving, "--resume"])
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "no-such-text"], "--data no-such-text: no such file or folder"),
        (["--data", "{empty}"], "no text in"),
        (["--data", "{short}"], "the text is too short"),
        (["--heads", "3"], "--width 32 does not divide by --heads 3"),
        (["--batch-size", "6", "--accumulate", "4"], "--batch-size 6 does not divide by --accumulate 4 x 1 ranks"),
        (["--steps", "0"], "expected at least 1, got 0"),
        (["--resume"], "--resume needs --save-dir"),
        (["--resume", "--save-dir", "{empty}"], "no checkpoint in"),
        (["--resume", "--save-dir", "no-such-folder"], "no checkpoint in no-such-folder"),
    ],
)
@pytest.mark.usefixtures("torch_settings")
def test_what_cannot_be_trained_is_one_line(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short").write_text("too short for one sequence")
    paths = {"empty": tmp_path / "empty", "short": tmp_path / "short"}
    error = error_of(capsys, [flag.format(**paths) for flag in flags])
    assert message in error
    assert "\n" not in error


@pytest.mark.long
@pytest.mark.usefixtures("torch_settings")
def test_only_the_same_run_continues_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saving = ["--steps", "2", "--save-dir", str(tmp_path)]
    train_gpt.main([*SMALL, "--no-offload", *saving])
    assert "add --resume to continue it" in error_of(capsys, saving)
    assert "already at step 2" in error_of(capsys, [*saving, "--resume"])
    assert "--seed 0, this run has --seed 1" in error_of(capsys, [*saving, "--resume", "--seed", "1"])
    assert "--width 32, this run has --width 64" in error_of(capsys, [*saving, "--resume", "--width", "64"])
    other_text = ["--data", str(TRAIN_GPT)]
    assert "another text" in error_of(capsys, [*saving, "--resume", *other_text])


@pytest.mark.usefixtures("torch_settings")
def test_an_interrupted_save_is_not_a_checkpoint(tmp_path: Path) -> None:
    """It is passed over when a run resumes, and out of the way when the run saves the same step again."""
    interrupted = tmp_path / "step-00000002.unfinished"
    interrupted.mkdir()
    (interrupted / "__0_0.distcp").write_text("half a file")
    assert train_gpt.latest_checkpoint(tmp_path) is None
    train_gpt.main([*SMALL, "--no-offload", "--steps", "2", "--save-dir", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    assert train_gpt.latest_checkpoint(tmp_path) == tmp_path / "step-00000002"


@pytest.mark.usefixtures("torch_settings")
def test_metrics_of_repeated_steps_are_replaced(tmp_path: Path) -> None:
    """A run that went on after its last checkpoint, and then stopped, is resumed: each step is in the file once."""
    metrics, save_dir = tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    training = [*SMALL, "--no-offload", "--steps", "4", "--save-dir", str(save_dir), "--metrics", str(metrics)]
    train_gpt.main([*training, "--save-every", "2"])
    straight = metrics.read_text()
    (save_dir / "step-00000004").rename(tmp_path / "lost")
    train_gpt.main([*training, "--resume"])
    assert metrics.read_text() == straight


# Checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:.*The parameters are on the CPU:UserWarning")
@pytest.mark.long
def test_a_checkpoint_is_the_same_on_another_number_of_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert resume_other_world_size.main(["--ranks", "2", "--resume-ranks", "1"]) == 0
    output = capfd.readouterr().out.splitlines()
    assert output == ["saved by 2 ranks: 24 tensors", "resumed by 1 ranks: every bit is the same", "PASS"]


@pytest.mark.distributed
@pytest.mark.long
def test_a_model_on_the_host_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Its losses are those of a run that never stopped; on other ranks sums of gradients round otherwise, so on one."""
    script = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(train_gpt.__file__).parent / "train_bigger_than_the_gpu.py"),
        "--width",
        "32",
    ]

    def losses(*flags: str, ranks: int = 0) -> list[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
        command = [script[0], *launcher, *script[3:], *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        return next(line for line in done.stdout.splitlines() if line.startswith("losses")).split()[1:]

    whole = losses("--steps", "4")
    assert losses("--steps", "2", "--save", "one") == whole[:2]
    assert losses("--steps", "2", "--resume", "one") == whole[2:]
    assert len(losses("--steps", "2", "--resume", "one", ranks=2)) == 2


def test_the_comparison_of_ranks_finds_what_differs() -> None:
    saved = {
        "model": {"a": torch.ones(2), "b": torch.zeros(1)},
        "optimizer": {"state": {"a": {"step": torch.ones(())}}},
    }
    assert list(resume_other_world_size.tensors_of(saved)) == ["model.a", "model.b", "optimizer.state.a.step"]
    assert resume_other_world_size.compare(saved, saved) == []
    other = {"model": {"a": torch.tensor([1.0, 1.1])}, "optimizer": saved["optimizer"]}
    assert resume_other_world_size.compare(saved, other) == ["model.a", "model.b"]


@pytest.fixture
def train_and_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], torch_settings: None
) -> Callable[..., list[str]]:
    """`async_checkpoint.py` on one rank, in this process; what it printed."""

    def run(folder: str, *flags: str) -> list[str]:
        async_checkpoint.main(["--folder", str(tmp_path / folder), "--width", "16", "--save-every", "3", *flags])
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.filterwarnings("ignore:.*The parameters are on the CPU:UserWarning")
def test_training_with_asynchronous_checkpoints_goes_on_where_it_was(
    tmp_path: Path, train_and_checkpoint: Callable[..., list[str]]
) -> None:
    straight = train_and_checkpoint("straight", "--steps", "11")
    interrupted = tmp_path / "parts" / "step-00000005"
    interrupted.mkdir(parents=True)
    assert train_and_checkpoint("parts", "--steps", "7")[0] == "starting from nothing"
    assert not interrupted.exists()
    resumed = train_and_checkpoint("parts", "--steps", "11")
    assert resumed == ["resumed after step 7", straight[-1]]
    assert straight[-1].startswith("step 11, checksum ")
    # Two stay: the last of every three steps, and the last of all.
    for folder in (tmp_path / "straight", tmp_path / "parts"):
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000009", "step-00000011"]
        assert (folder / "latest").read_text() == "step-00000011"


@pytest.mark.filterwarnings("ignore:.*The parameters are on the CPU:UserWarning")
def test_a_checkpoint_that_cannot_be_written_costs_itself_only(
    tmp_path: Path, train_and_checkpoint: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = FileSystemWriter.write_data, []

    def fail_once(self: FileSystemWriter, *args: Any) -> Any:
        calls.append(self)
        if len(calls) == 2:
            raise OSError("no space left on device")
        return write(self, *args)

    straight = train_and_checkpoint("straight", "--steps", "9")
    monkeypatch.setattr(FileSystemWriter, "write_data", fail_once)
    output = train_and_checkpoint("folder", "--steps", "9")
    assert output[1].startswith("checkpoint step-00000006 failed: ")
    assert output[-1] == straight[-1]
    names = sorted(path.name for path in (tmp_path / "folder").iterdir())
    assert names == ["latest", "step-00000003", "step-00000009"]


# Masters -------------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.long
def test_masters_are_the_weights_of_an_fp32_model(capfd: pytest.CaptureFixture[str]) -> None:
    assert bf16_master_weights.main(["--steps", "20"]) == 0
    lines = capfd.readouterr().out.splitlines()
    columns = [line.split() for line in lines[1:4]]
    state, comparisons = (line[line.index("bytes/parameter") - 1] for line in columns), [line[30:] for line in lines]
    assert list(state) == ["4", "12", "10"]
    assert [text.endswith("the same bits in every step") for text in comparisons[1:4]] == [False, True, True]
    assert lines[4:] == ["PASS"]
    losses = [float(line[line.index("bytes/parameter") - 2]) for line in columns]
    assert losses[0] > losses[1] == losses[2]  # without masters updates are rounded off


def test_the_example_would_find_a_wrong_master() -> None:
    """The formula of the lower bits, with a rounded tie, and one bit more."""
    param, kept = torch.tensor([1.0, 1.0078125]).bfloat16(), torch.tensor([3, -32768], dtype=torch.int16)
    master = bf16_master_weights.master_of(param, kept)
    assert master.view(torch.int32).tolist() == [0x3F800003, 0x3F808000]
    assert bf16_master_weights.master_of(param, master) is master


# Sleep ---------------------------------------------------------------------------------------------------------------

RL_SMALL = ["--rounds", "2", "--width", "32", "--layers", "2"]


def test_a_round_of_reinforcement_learning_leaves_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert rl_sleep.main(RL_SMALL) == 0
    *phases, verdict = capsys.readouterr().out.splitlines()
    assert verdict == "PASS: the same losses as without sleeping"
    names = [line.split(": ")[1].split()[0].strip(",") for line in phases]
    assert names == ["generated", "asleep", "awake", "trained"] * 2
    mebibytes = [float(line.split(" MiB of parameters")[0].split()[-1]) for line in phases]
    assert [size > 0 for size in mebibytes] == [True, False, True, True] * 2


def test_the_example_would_find_a_model_that_wakes_as_another(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wake = rl_sleep.wake

    def wake_wrongly(model: torch.nn.Module, optimizer: Any) -> None:
        wake(model, optimizer)
        with torch.no_grad():
            next(model.parameters()).add_(1)

    monkeypatch.setattr(rl_sleep, "wake", wake_wrongly)
    assert rl_sleep.main(RL_SMALL) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAIL: other losses"


# Phases by hand ------------------------------------------------------------------------------------------------------

MEGATRON_SMALL = [
    *("--steps", "4", "--width", "48", "--layers", "2"),
    *("--passing-kib", "64", "--staying-kib", "128", "--compare"),
]


def test_a_loop_of_megatrons_shape_says_where_its_state_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert megatron_style_loop.main(MEGATRON_SMALL) == 0
    *phases, losses, verdict = capsys.readouterr().out.splitlines()
    assert verdict == "PASS: the same bits as without offload"
    first, last = (float(word) for word in losses.split() if "." in word)
    assert last < first == pytest.approx(4.1, abs=0.5)  # ln 61: nothing is known about a token
    sizes = [[int(word) for word in line.split(":")[1].split() if word.isdigit()] for line in phases]
    assert [line.split(", ")[1].split(":")[0] for line in phases] == ["released", "gradients finished", "stepped"]
    away, *others = sizes
    assert away[:2] == [0, 0]
    assert all(0 < kept <= 128 and kept < device <= 192 for kept, device, _ in others)
    assert all(host == away[2] for *_, host in others)


def test_the_example_would_find_a_hook_that_is_not_called(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wraps a hook has to call what was bound before."""
    reload_before = megatron_style_loop.reload_before
    monkeypatch.setattr(megatron_style_loop, "reload_before", lambda _, optimizer: forgetful(optimizer))

    def forgetful(optimizer: Any) -> Callable[..., Any]:
        return reload_before(None, optimizer)

    assert megatron_style_loop.main(MEGATRON_SMALL) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAIL: other bits"


# Frameworks ----------------------------------------------------------------------------------------------------------


def run_with_framework(name: str, *flags: str, ranks: int = 0) -> str:
    """In a process of its own: frameworks change settings of the one they run in."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, str(TRAIN_GPT.with_name(f"{name}.py")), *flags]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.long
def test_accelerate(tmp_path: Path) -> None:
    flags = ("--steps", "4", "--layers", "2", "--width", "64", "--folder", str(tmp_path))
    assert "state on the host" in run_with_framework("with_accelerate", *flags)


@pytest.mark.long
def test_trainer(tmp_path: Path) -> None:
    output = run_with_framework("with_trainer", "--steps", "4", "--layers", "2", "--folder", str(tmp_path))
    assert "resumed: the same" in output
    assert "offload/host_bytes" in output


@pytest.mark.long
def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    output = run_with_framework("with_lightning", "--steps", "4", "--layers", "2", "--folder", str(tmp_path))
    assert "resumed: the same" in output


@pytest.mark.long
@pytest.mark.distributed
def test_torchtitan(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan.components.optimizer")
    flags = ("--steps", "4", "--layers", "2", "--width", "64", "--folder", str(tmp_path))
    assert run_with_framework("with_torchtitan", *flags, ranks=2).count("resumed: the same") == 2


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
    run_with_framework("benchmark_frameworks", framework, *common, "--records", str(records), ranks=2)
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    verdicts = [value for line in lines for name, value in line.items() if name.startswith("same")]
    assert verdicts == [True] * 4
    table = run_with_framework("benchmark_frameworks", "table", "--records", str(records))
    assert f"| 2 | {framework} | overlapped | " in table


# Megatron-FSDP -------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.long
def test_slices_of_megatron_go_on_at_another_size(capfd: pytest.CaptureFixture[str]) -> None:
    assert megatron_slices.main(["--ranks", "2", "--resume-ranks", "3"]) == 0
    saved, *verdicts = capfd.readouterr().out.splitlines()
    assert saved.startswith("saved by 2 ranks: module.decoder.layers.0.mlp.linear_fc1.weight_w, ")
    assert verdicts == [
        "after 5 steps on 2 ranks: every bit is the same",
        "after 5 steps on 3 ranks: every bit is the same",
        "after 10 steps on 3 ranks: every bit is the same",
        "PASS",
    ]


def test_the_example_would_find_a_slice_that_was_loaded_wrongly(mesh: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = megatron_slices.start(mesh, megatron_slices.whole_values())
    megatron_slices.train(model, optimizer, mesh, first=0)
    assert megatron_slices.compare(model, optimizer, mesh, megatron_slices.STEPS)
    bias = model.get_parameter("module.decoder.layers.0.mlp.linear_fc1.bias")
    optimizer.state[bias]["exp_avg"].to_local()[-1] += 1e-6
    assert not megatron_slices.compare(model, optimizer, mesh, megatron_slices.STEPS)
    assert capsys.readouterr().out.splitlines()[-1] == "after 5 steps on 1 ranks: DIFFERENT"
