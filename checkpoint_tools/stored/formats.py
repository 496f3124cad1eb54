"""Names of file formats and dtypes on the command line, free of torch so that wrong options fail at once."""

from pathlib import Path

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""Suffixes of files that ``torch.save`` writes."""

CASTABLE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
"""Dtypes that a model can be cast to, by the names of the command line: what torch calls them."""


def is_torch_file(path: str) -> bool:
    """Tell whether a path names one file of ``torch.save``."""
    return path.endswith(TORCH_SUFFIXES) and not Path(path).is_dir()
