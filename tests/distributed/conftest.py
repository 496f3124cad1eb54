"""On GPUs, what cannot run there is skipped: what needs ranks on the CPU, and files that import what is not installed.

A machine with GPUs has torch, pytest and hypothesis, and perhaps no framework. On the CPU, where everything in the dev
extra is installed, an import that fails is an error.
"""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.distributed.launch import DEVICE_TYPE

# The tools read and write files on the CPU, whichever device their tensors were on.
TOOLS = Path(__file__).parent / "checkpoint_tools"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE_TYPE == "cpu":
        return
    for item in items:
        if item.get_closest_marker("gloo") or TOOLS in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs ranks on the CPU, with gloo"))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if DEVICE_TYPE == "cpu" or report.passed or report.skipped:
        return report
    cause = report.call.excinfo.value.__cause__  # type: ignore[attr-defined]  # of the CollectError
    if isinstance(cause, ModuleNotFoundError) and cause.name.partition(".")[0] not in ("fsdp_offload", "tests"):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 1, f"Skipped: {cause}")
    return report
