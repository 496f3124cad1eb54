"""Report every error as one line on standard error, with an exit code that no answer has."""

import functools
import os
from collections.abc import Callable
from typing import NoReturn, ParamSpec

import typer

from ..core.errors import NEED_EXTRA, CheckpointError
from .output import say

TROUBLE = 2
"""Exit code where a question has no answer: also that of wrong options, and as diff(1) has it.

It is not 1, which says that something is different, or not whole.
"""

INTERRUPTED = 130

Options = ParamSpec("Options")


def with_error_lines(run: Callable[Options, None]) -> Callable[Options, None]:
    """Wrap a command so that its errors are one line each and no traceback.

    CHECKPOINT_TOOLS_TRACEBACK in the environment lets unexpected ones through.
    """

    @functools.wraps(run)
    def guarded(*args: Options.args, **kwargs: Options.kwargs) -> None:
        try:
            run(*args, **kwargs)
        except CheckpointError as error:
            _fail(str(error))
        except (BrokenPipeError, typer.Exit):
            raise  # the reader of our output has left, or the command is done: typer knows what to do
        except OSError as error:
            _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except MemoryError:
            _fail("there is not enough memory; see --max-memory")
        except Exception as error:
            if os.environ.get("CHECKPOINT_TOOLS_TRACEBACK"):
                raise
            if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "rich":
                _fail(NEED_EXTRA)
            _fail(
                f"unexpected {type(error).__name__}: {error}. This should not happen: please report it, with what "
                "CHECKPOINT_TOOLS_TRACEBACK=1 in the environment shows"
            )

    return guarded


def _fail(message: str) -> NoReturn:
    say(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(TROUBLE)
