"""The files of the presets: their names, and what each says of itself. Nothing of torch, so that help can list them."""

import functools
import re
import textwrap
from importlib import resources

_SUBJECT_LETTERS = 96


@functools.cache
def preset_names() -> tuple[str, ...]:
    """Names of the presets."""
    files = (resources.files(__package__) / "presets").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def preset_text(name: str) -> str:
    """Read a preset's TOML."""
    return (resources.files(__package__) / "presets" / f"{name}.toml").read_text(encoding="utf-8")


def preset_subject(name: str) -> str:
    """Return the first sentence of a preset's comment: which fused tensors it is about."""
    comment = preset_text(name).partition("\n[[rule]]")[0]
    words = " ".join(line.removeprefix("#").strip() for line in comment.splitlines())
    return textwrap.shorten(re.split(r"\.(?:\s|$)", words)[0], _SUBJECT_LETTERS, placeholder=" …")
