"""Expert parallelism: local experts have the same names on every rank, and checkpoints need a name for each.

::

    rank of expert parallelism, number of local experts ──▶ Experts ──▶ number: local names ──▶ global ones
                                                                    ──▶ localize: the inverse

Where two ranks save different experts under one key, ``torch.distributed.checkpoint`` keeps those of one rank and says
nothing. Names are Megatron-LM's (``core/transformer/moe/experts.py``), with whatever wraps the model in front:

=============================================  ========================================================================
name                                           what has it
=============================================  ========================================================================
``experts.linear_fc1.weight2``, ``….bias2``    grouped experts (``TEGroupedMLP``); split, with ``_w`` or ``_v`` behind
``experts.local_experts.2.linear_fc1.weight``  one module for each expert (``SequentialMLP``)
=============================================  ========================================================================
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_NUMBERED = re.compile(r"(?:^|\.)experts\.(?:linear_fc\d+\.(?:weight|bias)|local_experts\.)(?P<number>\d+)(?![0-9])")


@dataclass(frozen=True)
class Experts:
    """The experts of a model that this rank has: ``count`` of them, from the global number ``first`` on."""

    first: int
    count: int

    def __post_init__(self) -> None:
        if self.first < 0 or self.count < 1:
            raise ValueError(f"expected first >= 0 and count >= 1, got {self.first} and {self.count}")

    @classmethod
    def of_rank(cls, expert_parallel_rank: int, num_local_experts: int) -> "Experts":
        """Those of a rank that has as many as every other one.

        Args:
            expert_parallel_rank: Megatron's ``parallel_state.get_expert_model_parallel_rank()``.
            num_local_experts: on each rank: ``config.num_moe_experts`` over the expert-parallel size.
        """
        return cls(expert_parallel_rank * num_local_experts, num_local_experts)

    def number(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``state_dict`` with global numbers for local ones, to be saved or loaded into.

        Args:
            state_dict: of a model, of an optimizer in any layout (by FQN), or several of them nested in one. Not
                changed; tensors are taken over as they are.

        Raises:
            ValueError: a number is not that of a local expert. Has it been renumbered already?
        """
        return self._renamed(state_dict, self.global_name)

    def localize(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Undo :meth:`number`.

        Raises:
            ValueError: an expert is another rank's.
        """
        return self._renamed(state_dict, self.local_name)

    def global_name(self, name: str) -> str:
        """``name`` of a parameter with the global number of its expert; other names as they are."""
        return _moved(name, range(self.count), self.first, "local experts are")

    def local_name(self, name: str) -> str:
        """The inverse of :meth:`global_name`."""
        return _moved(name, range(self.first, self.first + self.count), -self.first, "this rank's experts are")

    def _renamed(self, values: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
        renamed: dict[str, Any] = {}
        for key, value in values.items():
            if isinstance(value, Mapping):
                value = self._renamed(value, rename)
            elif key == "param_groups" and isinstance(value, list):
                value = [_with_names(group, rename) for group in value]
            renamed[rename(key)] = value
        return renamed


def is_numbered(name: str) -> bool:
    """Return whether ``name`` is that of an expert's parameter, with a number in it."""
    return _NUMBERED.search(name) is not None


def _moved(name: str, known: range, by: int, what: str) -> str:
    found = _NUMBERED.search(name)
    if found is None:
        return name
    number = int(found["number"])
    if number not in known:
        raise ValueError(
            f"{name}: {what} {known.start} to {known.stop - 1}. Has it been renumbered already, or is the number of "
            "local experts another one?"
        )
    begin, end = found.span("number")
    return f"{name[:begin]}{number + by}{name[end:]}"


def _with_names(group: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """A param group whose lists of names are renamed."""
    lists = {entry: value for entry, value in group.items() if entry in ("params", "param_names")}
    return {
        **group,
        **{entry: [rename(n) if isinstance(n, str) else n for n in names] for entry, names in lists.items()},
    }
