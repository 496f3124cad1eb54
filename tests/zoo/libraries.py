"""Which libraries there are, and which optimizer classes each of them defines."""

import importlib
import importlib.metadata as metadata
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from torch.optim import Optimizer

REQUIREMENTS = Path(__file__).with_name("requirements.txt")

# Libraries of which only a part is about optimizers; importing the rest takes long, or needs what is not installed.
ROOTS = {
    "bitsandbytes": ["bitsandbytes.optim"],
    "fairscale": ["fairscale.optim"],
    "geoopt": ["geoopt.optim"],
    "timm": ["timm.optim"],
    "torch": ["torch.optim"],
    "torchao": ["torchao.optim"],
    "transformers": ["transformers.optimization"],
}

# Packages whose own ``__init__`` needs much that the part above does not: it is not run.
WITHOUT_INIT = ("timm", "timm.optim")

# In the dev extra already.
INSTALLED = ("torch", "schedulefree", "torchao", "transformers")


@dataclass(frozen=True)
class Found:
    """What a library holds: its classes as ``module:name``, and the modules that could not be imported, with why."""

    library: str
    version: str
    classes: tuple[str, ...]
    problems: tuple[str, ...]


def known_libraries() -> list[str]:
    """Every library of the zoo, whether it is installed or not."""
    pinned = REQUIREMENTS.read_text().split("# No optimizers")[0].splitlines()
    return [*INSTALLED, *(line.split("==")[0] for line in pinned if "==" in line)]


def find(library: str) -> Found:
    """Import what ``library`` has, and list the optimizers that are defined there."""
    try:
        distribution = metadata.distribution(library)
    except metadata.PackageNotFoundError:
        return Found(library, "", (), ("not installed",))
    roots = ROOTS.get(library) or _top_levels(distribution)
    problems: list[str] = []
    classes = {_key(cls) for module in _modules(roots, problems) for cls in _optimizers_of(module, roots)}
    return Found(library, distribution.version, tuple(sorted(classes)), tuple(problems))


def load(key: str) -> type[Optimizer]:
    """The class of that name."""
    module, name = key.split(":")
    cls = getattr(_import(module), name)
    assert issubclass(cls, Optimizer)
    return cls


def _import(name: str) -> ModuleType:
    for package in WITHOUT_INIT:
        if f"{name}.".startswith(f"{package}.") and package not in sys.modules:
            spec = importlib.util.find_spec(package)
            if spec is not None:
                sys.modules[package] = importlib.util.module_from_spec(spec)  # and its code is not run
    return importlib.import_module(name)


def _top_levels(distribution: metadata.Distribution) -> list[str]:
    files = [file for file in distribution.files or () if file.suffix == ".py"]
    return sorted(
        {file.parts[0].removesuffix(".py") for file in files if file.parts[0].removesuffix(".py").isidentifier()}
    )


def _modules(roots: list[str], problems: list[str]) -> Iterator[ModuleType]:
    def note(name: str, error: BaseException) -> None:
        problems.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0][:200])

    for root in roots:
        try:
            package = _import(root)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a library that cannot be imported is a row
            note(root, error)
            continue
        yield package
        for info in pkgutil.iter_modules(getattr(package, "__path__", ())):
            if info.name != "__main__" and not info.name.startswith("test"):
                yield from _modules([f"{root}.{info.name}"], problems)


def _optimizers_of(module: ModuleType, roots: list[str]) -> Iterator[type[Optimizer]]:
    for cls in list(vars(module).values()):
        if not (isinstance(cls, type) and issubclass(cls, Optimizer)) or inspect.isabstract(cls):
            continue
        at_home = any(cls.__module__ == root or cls.__module__.startswith(root + ".") for root in roots)
        reachable = getattr(inspect.getmodule(cls), cls.__name__, None) is cls
        if at_home and reachable and cls.step is not Optimizer.step:
            yield cls


def _key(cls: type[Optimizer]) -> str:
    return f"{cls.__module__}:{cls.__name__}"
