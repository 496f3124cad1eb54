"""Decide which keys of a checkpoint replace which, when fused tensors are split or parts are merged.

::

    keys, shapes ──names.sorted_out──▶ model tensors ──rules──▶ Match ─┐
                                       state by FQN ───whose tensor?───┴──▶ Exchange: fusions, copies, new objects
                                       (names)             (owners, roles)     (splitting or merging, draft)

The state of a parameter follows the parameter: where a model's tensors are in the same checkpoint, its optimizers'
state is exchanged as they are, even if the FQNs have other prefixes (``model.module.x`` and ``module.module.x``). State
without a model is matched by its own FQNs. Only metadata are looked at, and objects and counters that have to be
changed or compared.

Here is the order of the steps, and where errors of the rules become those of the command line.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import CheckpointError
from ..fused.fusions import Exchange
from ..fused.keys import GroupName, sorted_out
from ..fused.rules import ALL, MissingValueError, Rule, Wanted
from ..stored.reading import Checkpoint
from .draft import Draft
from .merging import Merging
from .param_groups import listed, read_groups, relisted
from .request import Way
from .roles import Roles
from .splitting import Splitting


def find_exchange(
    way: Way,
    checkpoint: Checkpoint,
    rules: Sequence[Rule],
    values: Mapping[str, float],
    excluded: Sequence[str] = (),
    wanted: Wanted = ALL,
) -> Exchange:
    """Exchange fused tensors for their parts, or the other way round.

    Args:
        way: ``"split"``, or its inverse ``"merge"``.
        checkpoint: that has what is exchanged.
        rules: that match fused tensors.
        values: of the model's config, which the rules name.
        excluded: patterns of keys that stay.
        wanted: which of the matches are exchanged.

    Raises:
        CheckpointError: rules do not fit, state is of another shape than its parameter, names are taken or ambiguous;
            a rule, a value or a pattern is of no use; or parts are missing, or differ in what there can be only one of.
    """
    _check_values(rules, values)
    try:
        return _exchange(Splitting if way == "split" else Merging, checkpoint, rules, values, excluded, wanted)
    except MissingValueError as error:
        raise CheckpointError(error.told(f"--value {error.name}=NUMBER", values)) from error
    except (ValueError, KeyError) as error:  # the rules' own errors
        raise CheckpointError(str(error)) from error


def _check_values(rules: Sequence[Rule], values: Mapping[str, float]) -> None:
    """Refuse values that no rule uses: typing errors."""
    known = {name for rule in rules for name in rule.value_names}
    idle = [name for name in values if name not in known]
    if idle:
        raise CheckpointError(
            f"--value that no rule uses: {', '.join(idle)}. The rules name {', '.join(sorted(known)) or 'none'}"
        )


def _exchange(
    way: type[Splitting | Merging],
    checkpoint: Checkpoint,
    rules: Sequence[Rule],
    values: Mapping[str, float],
    excluded: Sequence[str],
    wanted: Wanted,
) -> Exchange:
    names = sorted_out([*checkpoint.tensors, *checkpoint.objects], checkpoint.paths)
    groups = read_groups(checkpoint, names.groups)
    roles = Roles(way.side, checkpoint, names, groups, rules, excluded, wanted)
    draft = Draft(checkpoint)
    worker = way(checkpoint, names, roles, values, draft)
    worker.exchange_model()
    parameters = len(draft.fusions)
    worker.exchange_states()
    worker.check_groups(groups)
    for name, content in groups.items():
        new = _relisted(name, content, roles, worker)
        if new is not None:
            draft.objects[name.key] = new
    draft.check_new_keys()
    draft.check_left(names, roles)
    return draft.exchange(parameters, roles.matched())


def _relisted(name: GroupName, content: Any, roles: Roles, worker: Splitting | Merging) -> bytes | None:
    """Return the new content of a param group that lists exchanged tensors, or None."""

    def listed_as(fqn: Any) -> Sequence[Any]:
        return worker.listed_as(fqn, roles.of_fqn(name.optimizer, fqn))

    if all(roles.of_fqn(name.optimizer, fqn) is None for fqn in listed(content, name)):
        return None
    return relisted(content, name, listed_as)
