"""Size is a property that is tested: all lines of each folder's Python, docstrings and comments included.

A limit that rises is a line in a diff: write the reason beside it. Lower a limit in the change that makes it possible.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LIMITS = {
    "fsdp_offload": 25_700,  # on its way to 12,000; of it 3,150 are the new core, beside the old one until it does all
    "fsdp_offload/api": 1_750,  # a step that is the class's own, and an argument that says it may be divided
    "fsdp_offload/checkpoint": 3_400,
    "fsdp_offload/core": 3_200,  # of it 460 for classes that nobody may divide, in the place of 900 that tried them
    "fsdp_offload/cpu_update": 1_300,
    "fsdp_offload/device": 1_300,
    "fsdp_offload/engine": 5_050,  # one more wait: gathers of what comes back
    "fsdp_offload/integrations": 400,
    "fsdp_offload/model": 1_750,
    "fsdp_offload/optimizers": 2_200,
    "fsdp_offload/plan": 1_470,  # on its way to 1,400
    "fsdp_offload/planning": 1_200,
    "fsdp_offload/state": 600,
    "fsdp_offload/torch_compat": 1_800,  # hooks without their optimizer, for both engines; plain steps without hooks
    "checkpoint_tools": 9_500,  # on its way to 5,500
    "examples/benchmarks": 2_000,
    "tests": 53_800,  # on its way to 22,000; 300 are the tracer, which the package had, 500 what moves as a whole
}
FEWER = 0.9
"""A limit that is this far above what it limits is lowered."""


def lines_of(folder: str) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", LIMITS)
def test_a_folder_keeps_to_its_size(folder: str) -> None:
    lines = lines_of(folder)
    assert lines <= LIMITS[folder], f"{folder} has {lines} lines: delete, or raise its limit here with the reason"
    if folder != "fsdp_offload/core":  # is still being built
        assert lines >= FEWER * LIMITS[folder], f"{folder} has {lines} lines: lower its limit"


def test_every_folder_of_the_package_has_a_limit() -> None:
    folders = {
        f"fsdp_offload/{path.name}" for path in (ROOT / "fsdp_offload").iterdir() if (path / "__init__.py").exists()
    }
    assert folders <= LIMITS.keys()
