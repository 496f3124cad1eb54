"""Rules for the keys that a load may leave out: names in, verdicts out. No tensor, nothing of torch.

::

    requested keys ─┬─ not in the checkpoint ──▶ missing: left out of the plan, or refused
    stored keys ────┴─ not requested, in scope ▶ extra: left in the checkpoint, or refused

Optimizer state is recognised by the ``param_groups`` beside it, below whatever prefix. Its two forms are those of
``layouts.py``; the flattened one says in its keys which parameters it knows, the nested one in a value for each group.

==============================================  =======================================================================
key                                             left out without asking
==============================================  =======================================================================
missing ``….master_param``                      the caller rebuilds it from the parameter
missing ``state.{fqn}.*``                       if the checkpoint lists the parameter in its groups, and no state of it
                                                at all: it had none when it was saved. In the nested form ``load`` finds
                                                out; a planner alone does not read, and refuses
extra ``….master_param``                        if other state of its parameter is requested: a copy of fp32 parameters
==============================================  =======================================================================

Masters only if they are floating point: the lower bits of a parameter, kept as integers, cannot be made from it. The
planner looks at the dtypes.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from ..optimizers.masters import MASTER

Allowed = bool | Sequence[str]

_GROUPS = re.compile(r"\.(?:param_groups|param_to_group_meta)\.")  # the latter in Megatron's fsdp_dtensor, by FQN
_IS_NESTED_GROUP = re.compile(r"\d+\.params").fullmatch  # a group's list of FQNs; the flattened form has none


def matcher(name: str, allowed: Allowed) -> Callable[[str], bool]:
    """Return whether the user allows a key.

    Args:
        name: the argument's name, for the message.
        allowed: all keys, none, or those that match one of these ``fnmatch`` patterns.

    Raises:
        TypeError: neither a bool nor a sequence of strings. One string is refused too: its letters would be patterns.
    """
    if isinstance(allowed, bool):
        return lambda key: allowed
    if isinstance(allowed, str) or not all(isinstance(pattern, str) for pattern in allowed):
        raise TypeError(f"{name}: expected a bool or a sequence of patterns such as ['model.head.*'], got {allowed!r}")
    patterns = tuple(allowed)
    return lambda key: any(fnmatchcase(key, pattern) for pattern in patterns)


def is_params_list(key: str) -> bool:
    """Return whether ``key`` is the list of FQNs of a nested param group."""
    return re.search(r"param_groups\.\d+\.params$", key) is not None


def is_state(key: str) -> bool:
    """Return whether a flat key is that of optimizer state, in any of the layouts."""
    return ".state." in f".{key}"


def is_master(key: str) -> bool:
    """Return whether a flat key is that of a higher-precision copy of a parameter."""
    return key.endswith(f".{MASTER}")


# --- missing ---------------------------------------------------------------------------------------------------------


def without_saved_state(
    missing: Iterable[str], stored: Iterable[str], nested: Mapping[str, Collection[str]] | None = None
) -> set[str]:
    """Those of the ``missing`` keys that are state of a parameter which the checkpoint lists, but has no state of.

    Args:
        missing: keys.
        stored: all keys of the checkpoint.
        nested: what :func:`nested_group_keys` hold, by key, where that has been read: in the nested form the names of
            the listed parameters are values.
    """
    stored = list(stored)
    listed = _flattened_parameters(stored)
    for key, fqns in (nested or {}).items():
        for root, _ in _group_entries([key]):
            listed.setdefault(root, set()).update(map(str, fqns))
    if not listed:
        return set()
    with_state = {parameter_of(key, listed) for key in stored}
    found = {key: parameter_of(key, listed) for key in missing}
    return {key for key, parameter in found.items() if parameter is not None and parameter not in with_state}


def nested_state_roots(stored: Iterable[str]) -> set[str]:
    """``…state.`` of every optimizer that the checkpoint has in the nested form."""
    return {root for root, entry in _group_entries(stored) if _IS_NESTED_GROUP(entry)}


def nested_group_keys(stored: Iterable[str]) -> list[str]:
    """The keys under which the nested form has the FQNs of each param group."""
    return [key for key in stored for _, entry in _group_entries([key]) if _IS_NESTED_GROUP(entry)]


def _flattened_parameters(stored: list[str]) -> dict[str, set[str]]:
    """``…state.`` → the FQNs that its ``param_groups.{fqn}.{entry}`` keys name."""
    nested = nested_state_roots(stored)
    listed: dict[str, set[str]] = {}
    for root, entry in _group_entries(stored):
        if root not in nested:
            listed.setdefault(root, set()).add(entry.rpartition(".")[0])
    return listed


def _group_entries(keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield, for every key below some ``param_groups``, the root of the state beside it, and the key below that."""
    for key in keys:
        dotted = f".{key}"
        groups = _GROUPS.search(dotted)
        if groups is not None:
            yield f"{dotted[: groups.start()]}.state."[1:], dotted[groups.end() :]


def parameter_of(key: str, listed: Mapping[str, set[str]]) -> str | None:
    """Root and FQN of the listed parameter whose state ``key`` is.

    The longest name that fits: those of state values may have dots as well, where values are dicts.
    """
    for root, fqns in listed.items():
        name = key.removeprefix(root) if key.startswith(root) else ""
        while name := name.rpartition(".")[0]:
            if name in fqns:
                return f"{root}{name}"
    return None


# --- extra -----------------------------------------------------------------------------------------------------------


def extra_keys(requested: Mapping[str, Sequence[object]], stored: Iterable[str]) -> list[str]:
    """Stored keys in scope that nobody requests.

    In scope is what shares its first component with something requested, so that a model alone can be loaded from a
    checkpoint of model and optimizer. The state beside requested ``param_groups`` is in scope, also where none of it is
    requested.

    Args:
        requested: flat keys and their paths, as DCP flattens a state dict.
        stored: the keys of the checkpoint.
    """
    roots = {_root(path) for path in requested.values()}
    roots |= {state_root.removesuffix(".") for state_root, _ in _group_entries(requested)}
    return [key for key in stored if key not in requested and not roots.isdisjoint(_dotted_prefixes(key))]


def superfluous_masters(extra: Iterable[str], requested: Iterable[str]) -> set[str]:
    """Masters among the ``extra`` keys for whose parameter other state is requested."""
    parameters = {key.rpartition(".")[0] for key in requested}
    return {key for key in extra if is_master(key) and key.rpartition(".")[0] in parameters}


def _root(path: Sequence[object]) -> str:
    """The outermost key; of a dict that was flattened by its maker, the first component."""
    first = str(path[0])
    return first if len(path) > 1 else first.partition(".")[0]


def _dotted_prefixes(key: str) -> Iterator[str]:
    """``a``, ``a.b`` and ``a.b.c`` of ``a.b.c``."""
    end = key.find(".")
    while end >= 0:
        yield key[:end]
        end = key.find(".", end + 1)
    yield key
