"""Plain values as JSON, and back to the same values.

JSON has strings, whole numbers, ``true``, ``false``, ``null``, lists, and objects with strings as names; finite floats
come back bit by bit. Everything else is an object with one name that begins with ``$``:

==================================  ===================================================================================
``{"$float": "7ff0000000000000"}``  infinities and NaN: their bits, the sign first
``{"$tuple": [...]}``               a tuple; ``$size`` a ``torch.Size``, ``$set`` a set
``{"$dict": [[key, value], ...]}``  a dict whose keys are not all strings; ``$ordered`` an ``OrderedDict``
``{"$tensor": {...}}``              ``dtype``, ``shape``, and ``data``: the elements in row-major order, base64
``{"$dtype": "float32"}``           a ``torch.dtype``
``{"$complex": [real, imag]}``      a complex number
``{"$bytes": "..."}``               bytes, base64
==================================  ===================================================================================
"""

import base64
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.values import MAX_VALUES, has_more_values


class NotPlainError(Exception):
    """A value that has no such form; the message says what it is."""


def to_json(value: Any) -> Any:
    """Encode a value for :func:`json.dumps`.

    Raises:
        NotPlainError: it has no such form.
    """
    if has_more_values(value, MAX_VALUES):
        raise NotPlainError(f"more than {MAX_VALUES:,} values, or one that contains itself")
    try:
        return _to_json(value)
    except RecursionError as error:
        raise NotPlainError("a value that contains itself, or is nested too deeply") from error


def from_json(found: Any) -> Any:
    """Decode a value.

    Raises:
        ValueError: not what :func:`to_json` gives.
    """
    try:
        return _from_json(found)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (TypeError, KeyError, AttributeError, RuntimeError, OverflowError, struct.error) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _to_json(value: Any) -> Any:
    # By the exact type: a subclass would not come back as what it was.
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, Tensor):
        return {"$tensor": _tensor_to_json(value)}
    write = _WRITERS.get(type(value))
    if write is None:
        raise NotPlainError(f"a {type(value).__module__}.{type(value).__qualname__}")
    return write(value)


def _from_json(found: Any) -> Any:
    if isinstance(found, list):
        return [_from_json(each) for each in found]
    if not isinstance(found, dict):
        return found
    if any(name.startswith("$") for name in found):
        ((name, content),) = found.items()
        return _READERS[name](content)
    return {name: _from_json(each) for name, each in found.items()}


# --- one by one ------------------------------------------------------------------------------------------------------


def _float_to_json(value: float) -> Any:
    if value - value == 0:  # neither infinite nor NaN
        return value
    return {"$float": struct.pack(">d", value).hex()}


def _dict_to_json(value: dict[Any, Any]) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _to_json(each) for key, each in value.items()}
    return {"$dict": _pairs(value)}


def _pairs(value: dict[Any, Any]) -> list[list[Any]]:
    return [[_to_json(key), _to_json(each)] for key, each in value.items()]


def _from_pairs(content: Any) -> dict[Any, Any]:
    return {_from_json(key): _from_json(value) for key, value in content}


def _many(name: str) -> Callable[[Any], Any]:
    return lambda value: {name: [_to_json(each) for each in value]}


def _tensor_to_json(value: Tensor) -> dict[str, Any]:
    is_plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided
    if not is_plain or value.is_quantized or value.device.type != "cpu":
        raise NotPlainError(f"a tensor of {type(value).__name__}, {value.layout} on {value.device}")
    value = value.detach().resolve_conj().resolve_neg()
    flat = torch.empty(value.numel(), dtype=value.dtype).copy_(value.reshape(-1))
    data = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()
    return {"dtype": _dtype_to_json(value.dtype), "shape": list(value.shape), "data": data}


def _tensor_from_json(content: Any) -> Tensor:
    data = bytearray(base64.b64decode(content["data"], validate=True))
    raw = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    # A copy of its own, which is aligned and as large as the tensor.
    return raw.clone().view(_dtype_from_json(content["dtype"])).reshape(content["shape"])


def _dtype_to_json(value: torch.dtype) -> str:
    return str(value).removeprefix("torch.")


def _dtype_from_json(name: Any) -> torch.dtype:
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {name}")
    return found


_WRITERS: dict[type, Callable[[Any], Any]] = {
    float: _float_to_json,
    list: lambda value: [_to_json(each) for each in value],
    tuple: _many("$tuple"),
    torch.Size: _many("$size"),
    set: _many("$set"),
    dict: _dict_to_json,
    OrderedDict: lambda value: {"$ordered": _pairs(value)},
    torch.dtype: lambda value: {"$dtype": _dtype_to_json(value)},
    complex: lambda value: {"$complex": [_to_json(value.real), _to_json(value.imag)]},
    bytes: lambda value: {"$bytes": base64.b64encode(value).decode()},
}

_READERS: dict[str, Callable[[Any], Any]] = {
    "$float": lambda content: struct.unpack(">d", bytes.fromhex(content))[0],
    "$tuple": lambda content: tuple(map(_from_json, content)),
    "$size": torch.Size,
    "$set": lambda content: set(map(_from_json, content)),
    "$dict": _from_pairs,
    "$ordered": lambda content: OrderedDict(_from_pairs(content)),
    "$tensor": _tensor_from_json,
    "$dtype": _dtype_from_json,
    "$complex": lambda content: complex(*map(_from_json, content)),
    "$bytes": lambda content: base64.b64decode(content, validate=True),
}
