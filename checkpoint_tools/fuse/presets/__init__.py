"""Presets: named rules for frameworks, one TOML file each; a file's first line says what its rules are for."""

from importlib import resources

_FILES = resources.files(__package__)


def preset_names() -> tuple[str, ...]:
    """Return the names of the presets."""
    return tuple(sorted(file.name.removesuffix(".toml") for file in _FILES.iterdir() if file.name.endswith(".toml")))


def preset_text(name: str) -> str:
    """Read the file of a preset."""
    return (_FILES / f"{name}.toml").read_text(encoding="utf-8")
