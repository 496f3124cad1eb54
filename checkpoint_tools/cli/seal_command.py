"""The command seal."""

import time

from .command_options import Folder, Threads
from .output import say_written


def seal_checkpoint(path: Folder, threads: Threads = 4) -> None:
    """Write the checksums of a finished checkpoint of DCP beside it, into the file .checksums.

    verify --data then finds every bit that has changed. Only what is around the data is read, whose checksums the save
    has taken from memory. Exit code: 0 sealed, 2 it is not whole, or sealed already.
    """
    from ..write.seal import seal  # torch takes longer than all that help and wrong options need

    begin_s = time.monotonic()
    notes = seal(path, threads=threads)
    say_written(path, "sealed", notes, begin_s)
