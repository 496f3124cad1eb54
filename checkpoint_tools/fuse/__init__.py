"""Fused tensors: the rules by which they are made of parts, in files and in state dicts in memory.

The presets' files are listed here, without torch, so that help can list them.
"""

import functools
from importlib import resources


@functools.cache
def preset_names() -> tuple[str, ...]:
    """Names of the presets."""
    files = (resources.files(__package__) / "presets").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def preset_text(name: str) -> str:
    """Read a preset's TOML."""
    return (resources.files(__package__) / "presets" / f"{name}.toml").read_text(encoding="utf-8")
