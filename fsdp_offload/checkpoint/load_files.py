"""The files of a checkpoint, looked at before anything is read from them.

DCP notices a file that is gone or cut short when it comes to it; by then a part of the destination is overwritten, and
other ranks may have loaded theirs. Here every rank looks at its own files while it plans, and a failure in planning is
one on all ranks, before the first byte.
"""

import inspect
import io
import os
from collections.abc import Callable, Collection
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from .load_checks import listed


class CheckedReader(StorageReader):
    """A ``FileSystemReader`` that vouches for its files, in one load.

    Passes everything on to ``reader``, through whose file system it looks.

    Args:
        reader: that reads.
    """

    def __init__(self, reader: FileSystemReader) -> None:
        self.reader = reader
        self._failure: RuntimeError | None = None

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The checkpoint's address; shown in DCP's own log."""
        return self.reader.checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """As ``FileSystemReader``."""
        return FileSystemReader.validate_checkpoint_id(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another load begins, perhaps of another checkpoint."""
        self.reader.reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata; none at all if there are none that can be read.

        DCP takes an exception here as a reason to try again with ``rank=``, for what this rank alone has saved, and
        may not even pass on its message. So only a ``.metadata`` that is not there is an exception: a damaged one must
        not be replaced by a file of this rank, perhaps left over from another save. What is wrong is said in
        :meth:`set_up_storage_reader`, which is called next.

        Raises:
            FileNotFoundError: there is no ``.metadata``, and ``rank`` is not given.
        """
        rank = kwargs.get("rank")
        path = self.reader.fs.concat_path(self.reader.path, ".metadata" if rank is None else f"__{rank}.metadata")
        try:
            if rank is not None and "kwargs" not in _parameters(self.reader.read_metadata):
                raise FileNotFoundError(path)
            metadata: object = self.reader.read_metadata(*args, **kwargs)
            if isinstance(metadata, Metadata) and isinstance(metadata.storage_data, dict):
                return metadata
            self._failure = _damage(path, f"it has a {type(metadata).__name__} that says of no data where it is")
        except FileNotFoundError:
            if rank is None:
                raise
            self._failure = RuntimeError(
                f"there is no .metadata in {self.reader.path}. DCP writes it last: either this is no checkpoint, or "
                "its save did not end"
            )
        except Exception as error:  # noqa: BLE001  # unpickling what is not a pickle can raise anything
            self._failure = _damage(path, f"{type(error).__name__}: {error}")
        return Metadata({}, storage_data={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """As the reader; without keywords for one that was written before DCP gave any.

        Raises:
            RuntimeError: there are no metadata that can be read.
        """
        if self._failure is not None:
            raise self._failure
        if "kwargs" not in _parameters(self.reader.set_up_storage_reader):
            kwargs = {}
        self.reader.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The reader's plan.

        Raises:
            RuntimeError: a file that this rank needs is not there, or too short.
        """
        plan = self.reader.prepare_local_plan(plan)
        _check_files(self.reader, plan)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As the reader."""
        return self.reader.prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As the reader."""
        return self.reader.read_data(plan, planner)


def _parameters(method: Callable[..., Any]) -> Collection[str]:
    return inspect.signature(method).parameters  # where DCP itself looks


def _damage(path: object, what: str) -> RuntimeError:
    return RuntimeError(
        f"{path} cannot be read as the metadata of a checkpoint ({what}). It is damaged, cut short, or not from "
        "torch.distributed.checkpoint; use another checkpoint"
    )


def _check_files(reader: FileSystemReader, plan: LoadPlan) -> None:
    needed_bytes: dict[str, int] = {}  # by file
    nowhere = []
    for item in plan.items:
        info = reader.storage_data.get(item.storage_index)
        if info is None:
            nowhere.append(item.storage_index.fqn)
        else:
            end = info.offset + info.length
            needed_bytes[info.relative_path] = max(end, needed_bytes.get(info.relative_path, 0))
    wrong = [text for path, needed in needed_bytes.items() if (text := _why_unreadable(reader, path, needed))]
    if nowhere:
        wrong.append(f"the metadata does not say where it has {listed(list(dict.fromkeys(nowhere)))}")
    if wrong:
        raise RuntimeError(
            f"the checkpoint {reader.path} is incomplete, and nothing has been loaded: {listed(wrong)}. Was it copied "
            "in part, or did its save not end? Use another checkpoint, or fetch these files again"
        )


def _why_unreadable(reader: FileSystemReader, relative_path: str, needed_bytes: int) -> str | None:
    try:
        with reader.fs.create_stream(reader.fs.concat_path(reader.path, relative_path), "rb") as stream:
            found_bytes = stream.seek(0, io.SEEK_END)
    except FileNotFoundError:
        return f"{relative_path} is not there"
    except OSError as error:
        return f"{relative_path} cannot be opened ({error})"
    if found_bytes < needed_bytes:
        return f"{relative_path} has {found_bytes} bytes of at least {needed_bytes}"
    return None
