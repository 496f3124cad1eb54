"""Waits of the window left out, each of which a test has to notice."""

from typing import Any

import pytest

from fsdp_offload.device.lanes import Lane, Mark
from fsdp_offload.engine.executor import Pipeline
from fsdp_offload.engine.window import Window


class Deaf:
    """A lane that others made of it waits for nothing."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def wait(self, mark: Mark) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)


def gather_before_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    lend = Window.lend

    def deaf(self: Window, *args: Any, **options: Any) -> None:
        lanes, self._lanes = self._lanes, {**self._lanes, "C": Deaf(self._lanes["C"])}  # type: ignore[dict-item]
        lend(self, *args, **options)
        self._lanes = lanes

    monkeypatch.setattr(Window, "lend", deaf)


def load_before_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what has been updated since."""
    stored = Pipeline.stored_mark

    def nothing(self: Window, *args: Any, **options: Any) -> Any:
        monkeypatch.setattr(Pipeline, "stored_mark", lambda self, number: None)
        try:
            return load(self, *args, **options)
        finally:
            monkeypatch.setattr(Pipeline, "stored_mark", stored)

    load = Window._load
    monkeypatch.setattr(Window, "_load", nothing)
