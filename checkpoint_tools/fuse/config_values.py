"""Values of the model's config that a checkpoint itself contains, so that users need not give them.

``metadata.json`` of Megatron's ``torch_dist``: ``tp_size`` and ``etp_size`` are 1, as gate and up are stored as one
rank has them. Megatron's ``args``, in ``common.pt`` or as an object: numbers of ranks, sizes and heads. Hugging Face's
``config.json``: its numbers. No pickle is run (:func:`checkpoint_tools.stored.items.plain_pickle`).
"""

import contextlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard

from ..core.errors import CheckpointError
from ..core.text import MAX_INT64
from ..stored.items import Archive, DamagedError, plain_pickle
from ..stored.reading import Checkpoint
from ..stored.storage import read_small
from ..stored.unpickle import PickledObject
from .rules import DENSE_RANKS, EXPERT_RANKS

COMMON_FILE = "common.pt"
FORMAT_FILE = "metadata.json"
_CONFIG_FILE = "config.json"
_ARGS = "args"
_MAX_BYTES = 64 << 20  # of a file with such values

_MEGATRON = {
    DENSE_RANKS: ("tensor_model_parallel_size",),
    EXPERT_RANKS: ("expert_tensor_parallel_size",),
    "num_attention_heads": ("num_attention_heads",),
    "num_query_groups": ("num_query_groups",),
    "kv_channels": ("kv_channels",),
    "qk_dim": ("linear_num_key_heads", "linear_key_head_dim"),
    "v_dim": ("linear_num_value_heads", "linear_value_head_dim"),
    "num_value_heads": ("linear_num_value_heads",),
}
"""The presets' names of values → the arguments of Megatron whose product they are."""


class _Known(NamedTuple):
    """A value, where it was found, and whether it is how the checkpoint is stored, which users cannot know better."""

    value: float
    where: str
    is_layout: bool = False


def with_told(
    checkpoint: Checkpoint, names: Iterable[str], given: Mapping[str, float]
) -> tuple[dict[str, float], list[str]]:
    """Complete the given values of these names with those that the checkpoint contains, and note their source."""
    found: dict[str, _Known] = {}
    wanted = set(names)
    for source in (_of_config, _of_args, _of_layout) if wanted else ():  # the last one knows best
        found.update({name: known for name, known in source(checkpoint).items() if name in wanted})
    values, notes = dict(given), []
    for name, (value, where, is_layout) in sorted(found.items()):
        if name not in given:
            values[name] = value
            notes.append(f"{name} = {value}, from {where}")
        elif given[name] != value and is_layout:
            raise CheckpointError(f"--value {name}={given[name]}, but it is {value} here ({where}); leave it out")
        elif given[name] != value:
            notes.append(f"{name} = {given[name]} as given; {where} has {value}")
    return values, notes


def _of_layout(checkpoint: Checkpoint) -> dict[str, _Known]:
    if _json(checkpoint, FORMAT_FILE).get("sharded_backend") != "torch_dist":
        return {}
    known = _Known(1, "torch_dist, which stores gate and up as one rank has them", is_layout=True)
    return {DENSE_RANKS: known, EXPERT_RANKS: known}


def _json(checkpoint: Checkpoint, file: str) -> dict[str, Any]:
    try:
        found = json.loads(read_small(checkpoint.folder, file, _MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _of_args(checkpoint: Checkpoint) -> dict[str, _Known]:
    common: Any = None
    with contextlib.suppress(OSError):
        common = _unpickled(checkpoint, COMMON_FILE, 0, checkpoint.folder.size_bytes(COMMON_FILE))
    common, own = common.get(_ARGS) if isinstance(common, dict) else None, None
    stored = checkpoint.objects.get(_ARGS)
    if stored is not None and not stored.transforms and stored.content is None:
        own = _unpickled(checkpoint, *stored.place)
    for where, args in ((COMMON_FILE, common), (f"the object {_ARGS}", own)):
        if isinstance(args, PickledObject) and isinstance(args.state, dict):
            state = args.state
            if state.get("group_query_attention") is False:  # then Megatron's argument is 1
                state = {**state, "num_query_groups": state.get("num_attention_heads")}
            counts: dict[str, list[Any]] = {name: [state.get(each) for each in of] for name, of in _MEGATRON.items()}
            # Megatron itself divided the experts: nothing else tells over how many ranks.
            return {
                name: _Known(math.prod(factors), f"args in {where}", is_layout=name == EXPERT_RANKS)
                for name, factors in counts.items()
                if all(map(_is_count, factors)) and _is_count(math.prod(factors))
            }
    return {}


def _of_config(checkpoint: Checkpoint) -> dict[str, _Known]:
    config = _json(checkpoint, _CONFIG_FILE)
    if isinstance(config.get("text_config"), dict):
        config = {**config, **config["text_config"]}
    found = {name: value for name, value in config.items() if _is_count(value)}
    heads, hidden = found.get("num_attention_heads"), found.get("hidden_size")
    if heads:
        found.setdefault("num_key_value_heads", heads)
        if hidden and hidden % heads == 0:
            found.setdefault("head_dim", hidden // heads)
    for other in ("num_local_experts", "n_routed_experts"):
        if other in found:
            found.setdefault("num_experts", found[other])
    return {name: _Known(value, _CONFIG_FILE) for name, value in found.items()}


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= MAX_INT64


def _unpickled(checkpoint: Checkpoint, file: str, offset_bytes: int, length_bytes: int) -> Any:
    try:
        content = Archive(checkpoint.folder.view(file, offset_bytes, length_bytes)).pickled()
        return plain_pickle(content) if len(content) <= _MAX_BYTES else None
    except (OSError, ValueError, DamagedError):
        return None
