"""torchtitan's own command line trains its debug model: plain, offloaded and resumed either way, with the same bits."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.same_files import digests, metadata_differences
from tests.proofs import OTHER_RANKS, RESUMES, TRAINS, proves

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.gloo,
    pytest.mark.skipif(not hasattr(dist, "set_timeout"), reason="torchtitan 0.3's trainer needs torch >= 2.14"),
]

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY, SAVED_AT, STEPS = 2048, 3, 6
OPTIONS = {
    "training.steps": STEPS,
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,  # two micro-batches on two ranks
    "checkpoint.interval": SAVED_AT,
    "debug.seed": 1,
}
FLAGS = [
    "--training.disable_cuda_graphs",
    "--checkpoint.enable",
    "--debug.deterministic",
    "--metrics.enable_tensorboard",
]
OFFLOADED = ["--optimizer.offload.device-bytes", "4000000", "--optimizer.offload.bucket-bytes", "1000000"]
IN_BACKWARD = [*OFFLOADED, "--optimizer.offload.overlap", "iteration"]
WHOLE = [*IN_BACKWARD, "--optimizer.offload.parameters"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random words, and a tokenizer that knows them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder, random_words = tmp_path_factory.mktemp("texts"), random.Random(0)
    tokenizer = Tokenizer(models.WordLevel({str(word): word for word in range(VOCABULARY)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    lines = [" ".join(str(random_words.randrange(VOCABULARY)) for _ in range(50)) for _ in range(200)]
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return folder


def train(
    texts: Path,
    folder: Path,
    offload: Iterable[str] | None,
    *,
    resume: Path | None = None,
    ranks: int = 2,
    more: Iterable[str] = (),
) -> str:
    """Run the command line in ``folder``, and return what it printed."""
    if resume is not None:
        shutil.copytree(resume / "checkpoint" / f"step-{SAVED_AT}", folder / "checkpoint" / f"step-{SAVED_AT}")
    config = "debugmodel" if offload is None else "offloaded_debugmodel"
    places = {"hf_assets_path": texts / "tokenizer", "dataloader.dataset_path": texts / "data", "dump_folder": folder}
    options = {"module": "tests.distributed.titan_on_cpu", "config": config, **OPTIONS, **places}
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    quiet = str(ROOT / "tests" / "quiet_exit")
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.distributed.titan_on_cpu", *given, *FLAGS, *(offload or ()), *more],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{quiet}", "HF_HUB_OFFLINE": "1", "HF_HOME": str(texts)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert ("state on the host" in done.stdout) == (offload is not None), done.stdout
    return done.stdout


def logged(folder: Path) -> dict[str, list[float]]:
    """Losses, norms and learning rates of each step, in all their bits."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = folder.glob("tb/*/events.*")
    accumulator = EventAccumulator(str(events)).Reload()
    names = [name for name in accumulator.Tags()["scalars"] if name.startswith(("loss_metrics", "grad_norm", "lr"))]
    assert len(names) == 4, names
    seen = [(one.step, name, one.value) for name in names for one in accumulator.Scalars(name)]
    return {str(step): [value for at, _, value in sorted(seen) if at == step] for step, _, _ in seen}


def assert_same(wanted: Path, found: Path) -> None:
    """``found`` logged what ``wanted`` did, and its last checkpoint has the same bytes."""
    one, other = logged(wanted), logged(found)
    assert {str(STEPS), str(STEPS - 1)} <= other.keys() <= one.keys()
    assert other == {step: one[step] for step in other}
    saved = [folder / "checkpoint" / f"step-{STEPS}" for folder in (wanted, found)]
    assert not list(metadata_differences(*saved))
    assert digests(saved[0]) == digests(saved[1])


@proves("torchtitan's command line", "torchtitan", TRAINS, RESUMES, OTHER_RANKS)
def test_plain_offloaded_and_resumed_either_way(texts: Path, tmp_path: Path) -> None:
    plain, offloaded = tmp_path / "plain", tmp_path / "offloaded"
    train(texts, plain, None)
    assert "the loop clips" in train(texts, offloaded, IN_BACKWARD)
    assert_same(plain, offloaded)
    for name, policy, resume in (
        ("plain from offloaded", None, offloaded),
        ("offloaded from plain", OFFLOADED, plain),
        ("whole model from plain", WHOLE, plain),
    ):
        train(texts, tmp_path / name, policy, resume=resume)
        assert_same(plain, tmp_path / name)
    alone: dict[str, Any] = {"resume": plain, "ranks": 1, "more": ["--checkpoint.exclude_from_loading", "dataloader"]}
    train(texts, tmp_path / "plain alone", None, **alone)
    train(texts, tmp_path / "offloaded alone", OFFLOADED, **alone)
    assert_same(tmp_path / "plain alone", tmp_path / "offloaded alone")
