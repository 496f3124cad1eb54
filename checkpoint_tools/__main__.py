"""Entry point of the command line ``checkpoint-tools``, which needs the extra ``[tools]``."""

import sys

from .core.text import NEED_EXTRA

try:
    from .cli import app
except ImportError as error:
    if (error.name or "").partition(".")[0] == __package__:
        raise
    sys.stderr.write(f"{NEED_EXTRA}\n")
    sys.exit(2)


def main() -> None:
    """Run the console script."""
    app(prog_name="checkpoint-tools")


if __name__ == "__main__":
    app(prog_name="python -m checkpoint_tools")
