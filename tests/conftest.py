"""For all tests."""

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_offload import OffloadedOptimizer
from tests.async_writers import Waits
from tests.process_groups import process_group

# How long an example takes says nothing on a busy machine.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Give each process of ``-n`` whole files, in their order."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    options = config.option
    if options.numprocesses and options.dist == "no":
        options.dist = "loadfile"  # fixtures of a module are made once, and so is the process its ranks come from
        options.loadscopereorder = False  # the order is quickest first


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is long, and the zoo (an hour, and libraries of its own), unless asked for by name."""
    unwanted = [name for name in ("long", "zoo") if name not in config.option.markexpr]
    left_out = [item for item in items if any(map(item.get_closest_marker, unwanted))]
    if left_out:
        items[:] = [item for item in items if not any(map(item.get_closest_marker, unwanted))]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One CPU, in a process group of one rank."""
    with process_group():
        yield init_device_mesh("cpu", (1,))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    """Writers of asynchronous saves that are held until somebody waits for them, and whether somebody did."""
    found = Waits(monkeypatch)
    yield found
    found.let_go()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Everything that is called, in order: optimizers that reload, and what callbacks and tests note."""
    noted: list[object] = []
    reload = OffloadedOptimizer.reload_states

    def noting(self: OffloadedOptimizer) -> None:
        noted.append(self)
        reload(self)

    monkeypatch.setattr(OffloadedOptimizer, "reload_states", noting)
    return noted


@pytest.fixture
def eager() -> Iterator[None]:
    """Some optimizers compile their step, which takes long; what is compiled also runs without."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Without it, only an object that nobody keeps, in no cycle, is gone."""
    torch.optim.AdamW([torch.ones(1)])  # the first one imports modules whose frames keep it in a cycle
    gc.collect()
    gc.disable()
    yield
    gc.enable()
