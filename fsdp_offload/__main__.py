"""Command line: ``fsdp-offload bench NAME`` and ``fsdp-offload plan MODEL``; also as ``python -m fsdp_offload``."""

import sys


def main() -> None:
    """Entry point of the console script."""
    # What these import is an extra, and is imported by nobody else.
    if sys.argv[1:2] == ["bench"]:
        from .bench.__main__ import app

        app(sys.argv[2:], prog_name="fsdp-offload bench")
    if sys.argv[1:2] == ["plan"]:
        from .plan.command import app as plan

        plan(sys.argv[2:], prog_name="fsdp-offload plan")
    sys.exit("usage: fsdp-offload bench NAME or plan MODEL; with --help each tells more")


if __name__ == "__main__":
    main()
