"""Values of the model's config that a checkpoint itself tells, so that nobody has to give them.

====================================  =================================================================================
where                                 what
====================================  =================================================================================
``metadata.json`` of ``torch_dist``   ``tp_size`` and ``etp_size`` are 1: gate and up are stored as if there were one
                                      rank, however many wrote them
``common.pt``, or the object          Megatron's ``args``: ``tp_size``, sizes and numbers of heads
``args`` of the checkpoint
``config.json``                       Hugging Face's: whatever numbers it has
====================================  =================================================================================

Neither is run: names in pickles stand for nothing here (:func:`checkpoint_tools.stored.items.plain_pickle`).
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard

from ..core.errors import CheckpointError
from ..core.sizes import MAX_INT64
from ..stored.items import Archive, DamagedError, plain_pickle
from ..stored.reading import Checkpoint
from ..stored.storage import read_small
from ..stored.unpickle import PickledObject
from .rules import DENSE_RANKS, EXPERT_RANKS

COMMON_FILE = "common.pt"
FORMAT_FILE = "metadata.json"
_CONFIG_FILE = "config.json"
_ARGS = "args"
_MAX_BYTES = 64 << 20  # of a file that says such values


class Told(NamedTuple):
    """A value, and where it was found.

    Attributes:
        value: of the name.
        where: for people.
        is_layout: how the checkpoint is stored, which nobody can know better.
    """

    value: float
    where: str
    is_layout: bool = False


def told_values(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, Told]:
    """Look up those of the names whose values the checkpoint tells."""
    wanted = set(names)
    found: dict[str, Told] = {}
    if not wanted:
        return found
    for source in (_of_config, _of_args, _of_layout):  # the last one knows best
        found.update({name: told for name, told in source(checkpoint).items() if name in wanted})
    return found


def with_told(
    checkpoint: Checkpoint, names: Iterable[str], given: Mapping[str, float]
) -> tuple[dict[str, float], list[str]]:
    """Complete the given values with those that the checkpoint tells, and note where from.

    Raises:
        CheckpointError: a given one contradicts how the checkpoint is stored.
    """
    values, notes = dict(given), []
    for name, told in sorted(told_values(checkpoint, names).items()):
        if name not in given:
            values[name] = told.value
            notes.append(f"{name} = {told.value}, from {told.where}")
        elif given[name] != told.value and told.is_layout:
            raise CheckpointError(
                f"--value {name}={given[name]}, but it is {told.value} here ({told.where}); leave it out"
            )
        elif given[name] != told.value:
            notes.append(f"{name} = {given[name]} as given; {told.where} has {told.value}")
    return values, notes


# --- where it may be said --------------------------------------------------------------------------------------------


def _of_layout(checkpoint: Checkpoint) -> dict[str, Told]:
    if not is_torch_dist(checkpoint):
        return {}
    told = Told(1, "torch_dist, which stores gate and up as one rank has them", is_layout=True)
    return {DENSE_RANKS: told, EXPERT_RANKS: told}


def is_torch_dist(checkpoint: Checkpoint) -> bool:
    """Tell whether Megatron-Core has written it in its own format."""
    found = _json(checkpoint, FORMAT_FILE)
    return isinstance(found, dict) and found.get("sharded_backend") == "torch_dist"


def _of_args(checkpoint: Checkpoint) -> dict[str, Told]:
    for where, read in ((COMMON_FILE, _common_args), (f"the object {_ARGS}", _object_args)):
        args = read(checkpoint)
        if isinstance(args, PickledObject) and isinstance(args.state, dict):
            # Megatron itself divided the experts: no one else knows over how many ranks.
            return {
                name: Told(value, f"args in {where}", is_layout=name == EXPERT_RANKS)
                for name, value in _of_megatron(args.get).items()
            }
    return {}


def _of_megatron(get: Callable[[str], Any]) -> dict[str, int]:
    """Read Megatron's args, under the names that the presets use."""

    def product(*names: str) -> int | None:
        factors = [get(name) for name in names]
        result = 1
        for factor in factors:
            if not _is_count(factor):
                return None
            result *= factor
        return result

    heads = get("num_attention_heads")
    # What is not used is 1, as Megatron's arguments have it.
    groups = get("num_query_groups") if get("group_query_attention") is not False else heads
    found = {
        DENSE_RANKS: get("tensor_model_parallel_size"),
        EXPERT_RANKS: get("expert_tensor_parallel_size"),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": get("kv_channels"),
        "qk_dim": product("linear_num_key_heads", "linear_key_head_dim"),
        "v_dim": product("linear_num_value_heads", "linear_value_head_dim"),
        "num_value_heads": get("linear_num_value_heads"),
    }
    return {name: value for name, value in found.items() if _is_count(value)}


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= MAX_INT64


def _of_config(checkpoint: Checkpoint) -> dict[str, Told]:
    config = _json(checkpoint, _CONFIG_FILE)
    if not isinstance(config, dict):
        return {}
    if isinstance(config.get("text_config"), dict):
        config = {**config, **config["text_config"]}
    found = {name: Told(value, _CONFIG_FILE) for name, value in config.items() if _is_count(value)}
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if "head_dim" not in found and _is_count(heads) and _is_count(hidden) and hidden % heads == 0:
        found["head_dim"] = Told(hidden // heads, _CONFIG_FILE)
    for other in ("num_local_experts", "n_routed_experts"):
        if "num_experts" not in found and other in found:
            found["num_experts"] = found[other]
    if "num_key_value_heads" not in found and _is_count(heads):
        found["num_key_value_heads"] = Told(heads, _CONFIG_FILE)
    return found


# --- reading ---------------------------------------------------------------------------------------------------------


def _json(checkpoint: Checkpoint, file: str) -> Any:
    try:
        return json.loads(read_small(checkpoint.folder, file, _MAX_BYTES))
    except (OSError, ValueError, RecursionError):  # nothing is said there
        return None


def _common_args(checkpoint: Checkpoint) -> Any:
    try:
        size_bytes = checkpoint.folder.size_bytes(COMMON_FILE)
    except OSError:
        return None
    common = _unpickled(checkpoint, COMMON_FILE, 0, size_bytes)
    return common.get(_ARGS) if isinstance(common, dict) else None


def _object_args(checkpoint: Checkpoint) -> Any:
    stored = checkpoint.objects.get(_ARGS)
    if stored is None or stored.transforms or stored.content is not None:
        return None
    return _unpickled(checkpoint, stored.file, stored.offset_bytes, stored.length_bytes)


def _unpickled(checkpoint: Checkpoint, file: str, offset_bytes: int, length_bytes: int) -> Any:
    try:
        content = Archive(checkpoint.folder.view(file, offset_bytes, length_bytes)).pickled()
        return plain_pickle(content) if len(content) <= _MAX_BYTES else None
    except (OSError, ValueError, DamagedError):  # nothing is said there
        return None
