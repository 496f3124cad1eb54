"""Every recorded mistake is found: each of tests/mutants.toml, in a copy of the package, turns a test red."""

import multiprocessing
import os
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MUTANTS = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["mutant"]


def changed(mutant: dict[str, Any], root: Path) -> str:
    """The text of the file with the mistake in it."""
    text = (root / mutant["file"]).read_text()
    assert text.count(mutant["line"]) == 1, f"{mutant['file']} has not once: {mutant['line']}"
    return text.replace(mutant["line"], mutant["replacement"])


def test_every_mutant_is_a_change_of_todays_code() -> None:
    for mutant in MUTANTS:
        compile(changed(mutant, ROOT), mutant["file"], "exec")


def run_tests(folder: Path, arguments: list[str]) -> None:
    """In a process that has imported torch, and of the package only this copy."""
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("fsdp_offload", "tests", "checkpoint_tools")
    ]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    with (folder / "output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        os._exit(
            pytest.main(
                ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments]
            )
        )


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["note"].strip(".").replace(" ", "-"))
def test_a_mistake_is_found(mutant: dict[str, Any], tmp_path: Path) -> None:
    for name in ("fsdp_offload", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / mutant["file"]).write_text(changed(mutant, ROOT))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint"])
    process = context.Process(target=run_tests, args=(tmp_path, mutant["tests"]))
    process.start()
    process.join()
    output = (tmp_path / "output").read_text()
    assert process.exitcode == pytest.ExitCode.TESTS_FAILED, output[-3000:]
    assert "\nFAILED " in output, output[-3000:]  # a test, and not the start of pytest
