"""Command line of the benchmarks."""

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

try:
    import typer
except ImportError:
    sys.exit("The benchmarks need typer, and matplotlib for pictures: pip install typer matplotlib")


class _Nothing(type):
    """Class of a class that stands for every name of a package: a base, an annotation, a decorator."""

    def __getattr__(cls, name: str) -> Any:
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else cls


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets modules import torch and the package without waiting for them: ``--help`` reads their options alone."""

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        is_absent = name.partition(".")[0] in ("torch", "fsdp_offload")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = lambda name: _Nothing("Nothing", (), {})  # type: ignore[method-assign]


IS_FOR_HELP = __name__ == "__main__" and ("--help" in sys.argv or len(sys.argv) == 1)  # never where it is imported

if IS_FOR_HELP:
    sys.meta_path.insert(0, _Absent())

from . import checkpoint, figures, front, link, sleep, step, train  # noqa: E402, after the line above
from .record import print_machine  # noqa: E402

app = typer.Typer(help="Measure offloading on this machine. Results are JSON lines.", no_args_is_help=True)


@app.callback()
def _machine() -> None:
    if os.environ.get("RANK", "0") == "0" and not IS_FOR_HELP:
        print_machine()


app.command("checkpoint")(checkpoint.measure)
app.command("figures")(figures.measure)
app.command("front")(front.measure)
app.command("link")(link.measure)
app.command("sleep")(sleep.measure)
app.command("step")(step.measure)
app.command("train")(train.measure)

if __name__ == "__main__":
    app(prog_name="python -m examples.benchmarks")
