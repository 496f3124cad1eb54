"""An exchange that is being put together, and what is checked when it is complete: names, and what would be left."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..core.errors import CheckpointError
from ..fused.fusions import Exchange, Fusion
from ..fused.keys import Names, Path, StateName
from ..stored.reading import Checkpoint
from .roles import Roles


class Draft:
    """Exchange under construction: what becomes of each key.

    Attributes:
        fusions, copies, objects, paths: those of the :class:`~checkpoint_tools.fused.fusions.Exchange`.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.fusions: list[Fusion] = []
        self.copies: dict[str, tuple[str, ...]] = {}
        self.objects: dict[str, bytes] = {}
        self.paths: dict[str, Path] = {}
        self._old: set[str] = set()
        self._new: list[str] = []

    def exchange(self, parameters: int, matched: tuple[str, ...]) -> Exchange:
        """Finish the exchange; its first ``parameters`` fusions are tensors of a model."""
        return Exchange(tuple(self.fusions), self.copies, self.objects, self.paths, parameters, matched)

    # --- to put together ---

    def fuse(self, fusion: Fusion, *, old: Iterable[str], new: Iterable[str]) -> None:
        """Record a fused tensor with its parts: those stored, and those that replace them."""
        self.fusions.append(fusion)
        self._old.update(old)
        self._new += new

    def copy(self, name: StateName, fqns: Sequence[str]) -> None:
        """Copy an entry of state to these parameters."""
        renamed = [name.renamed(fqn) for fqn in fqns]
        self.copies[name.key] = tuple(key for key, _ in renamed)
        self.paths.update((key, path) for key, path in renamed if path)

    def drop(self, key: str) -> None:
        """Drop a key without a replacement."""
        self.copies[key] = ()

    def path_beside(self, key: str, other: str) -> None:
        """Put the new key ``other`` where ``key`` was in the nested state dict."""
        path = self._checkpoint.paths.get(key, ())
        if not path or ".".join(map(str, path)) != key:
            return
        for at in range(len(path), 0, -1):  # the longest beginning that both have
            lead = "".join(f"{part}." for part in path[: at - 1])
            if other.startswith(lead):
                self.paths[other] = (*path[: at - 1], other.removeprefix(lead))
                return

    # --- to check ---

    def check_new_keys(self) -> None:
        """Check that every new key is free.

        Raises:
            CheckpointError: there would be two values of one name.
        """
        new = [*self._new, *(key for keys in self.copies.values() for key in keys)]
        left = {*self._checkpoint.tensors, *self._checkpoint.objects} - {*self._old, *self.copies}
        twice = {key for key in new if new.count(key) > 1} if len(set(new)) < len(new) else set()
        taken = sorted({key for key in new if key in left} | twice)
        if taken:
            raise CheckpointError(f"there would be two values named {taken[0]} ({len(taken)} such names)")

    def check_left(self, names: Names, roles: Roles) -> None:
        """Refuse state that seems to belong to an exchanged tensor and would silently stay as it was.

        Raises:
            CheckpointError: it does, and nobody has excluded it.
        """
        known = self._old & roles.model_shapes.keys()
        known |= {key.partition(".")[2] for key in known if "." in key}
        for key in names.others:
            if key in self._old or key not in self._checkpoint.tensors or roles.is_excluded(key):
                continue
            inside = next((name for name in _beginnings(key) if name in known), None)
            if inside is not None:
                raise CheckpointError(
                    f"{key} looks as if it belongs to {inside}, and it is not known how; --exclude the one to leave it "
                    "as it is, or the other"
                )


def _beginnings(key: str) -> Iterator[str]:
    """Yield every prefix of a key that ends before a dot."""
    words = key.split(".")
    for start in range(len(words)):
        for stop in range(start + 1, len(words)):
            yield ".".join(words[start:stop])


@dataclass(frozen=True)
class ExchangeWork:
    """Fields that splitting and merging have in common.

    Attributes:
        checkpoint: that has what is exchanged.
        names: its keys.
        roles: what they are.
        values: of the model's config, which the rules name.
        draft: gets what is found.
    """

    checkpoint: Checkpoint
    names: Names
    roles: Roles
    values: Mapping[str, float]
    draft: Draft
