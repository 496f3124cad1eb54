"""Whose state it is: the tensor of a model that state of an optimizer belongs to.

The FQNs of both may have other prefixes: ``model.module.x`` in the model, ``module.module.x`` in the optimizer.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..core.errors import CheckpointError


class Owner(NamedTuple):
    """The tensor of a model that state belongs to: ``key = lead + same``, and the state's ``fqn = own_lead + same``."""

    key: str
    lead: str
    own_lead: str

    def own(self, other_key: str, fqn: str) -> str:
        """Return the state's name for another tensor of the same model."""
        if not other_key.startswith(self.lead):
            raise CheckpointError(
                f"state of {fqn} belongs to {self.key}, but what becomes of it, {other_key}, does not begin with "
                f"{self.lead!r} as well; write the rule with a placeholder for the prefix"
            )
        return self.own_lead + other_key.removeprefix(self.lead)


class Owners:
    """Finds them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._by_end: dict[str, list[str]] = {}
        for key in keys:
            at = 0
            while at >= 0:
                self._by_end.setdefault(key[at:], []).append(key)
                at = key.find(".", at) + 1 or -1

    def of(self, fqn: str, same: Callable[[str, str], bool]) -> Owner | None:
        """Return the owner of state of ``fqn``; of several, the one with the shortest prefix before it.

        Args:
            fqn: as the optimizer has it; it may have ``module.`` in front more often than the model.
            same: whether the same would become of two of the model's keys. If not, which is it?
        """
        own_lead, end = "", fqn
        while True:
            found = self._by_end.get(end, [])
            if found:
                depth = min(key.removesuffix(end).count(".") for key in found)
                nearest = [key for key in found if key.removesuffix(end).count(".") == depth]
                if not all(same(nearest[0], other) for other in nearest[1:]):
                    raise CheckpointError(
                        f"state of {fqn} may belong to {' or '.join(nearest[:3])}, of which not the same becomes; use "
                        "rules that match all of them, or --exclude them all"
                    )
                return Owner(nearest[0], nearest[0].removesuffix(end), own_lead)
            if not end.startswith("module."):
                return None
            own_lead, end = own_lead + "module.", end.removeprefix("module.")
