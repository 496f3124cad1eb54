"""Command line: ``fsdp-offload bench NAME``, the same as ``python -m fsdp_offload.bench NAME``."""

import sys


def main() -> None:
    """Entry point of the console script."""
    from .bench.__main__ import app  # its packages are an extra, and this is imported by nobody else

    if sys.argv[1:2] == ["bench"]:
        app(sys.argv[2:], prog_name="fsdp-offload bench")
    sys.exit("usage: fsdp-offload bench NAME [OPTIONS]; fsdp-offload bench --help lists the names")


if __name__ == "__main__":
    main()
