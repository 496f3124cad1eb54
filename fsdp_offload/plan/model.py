"""A model as a plan sees it: the parameters of each ``fully_shard`` group, and a way to run it on the meta device."""

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .decoder import Decoder, DecoderConfig
from .trace import Checkpointing, Trace, trace

Loss = Callable[[nn.Module, Tensor], Tensor]
"""Takes the module and ``(sequences, length + 1)`` token numbers, and returns the loss."""


@dataclass(frozen=True)
class Model:
    """A model whose forward and backward can be traced.

    Attributes:
        name: for messages and tables.
        module: usually on the meta device; its values are never read.
        groups: what ``fully_shard`` is applied to, in forward order; the root comes last.
        loss: how to run it.
    """

    name: str
    module: nn.Module
    groups: tuple[nn.Module, ...]
    loss: Loss

    @property
    def numel(self) -> int:
        """Parameters, tied ones once."""
        return sum(param.numel() for param in self.module.parameters())

    def shapes(self) -> list[list[tuple[int, ...]]]:
        """The shapes of each group's parameters; what several groups have belongs to the first of them."""
        seen: set[nn.Parameter] = set()
        shapes = []
        for group in self.groups:
            own = [param for param in dict.fromkeys(group.parameters()) if param not in seen]
            seen.update(own)
            shapes.append([tuple(param.shape) for param in own if param.requires_grad])
        return shapes

    def trace(
        self, sequences: int, length: int, compute_dtype: torch.dtype, checkpointing: Checkpointing = "none"
    ) -> Trace:
        """Trace one micro-batch of one rank.

        Raises:
            ValueError: it cannot be run on the meta device; the error that it raised is the cause.
        """
        tokens = torch.empty(sequences, length + 1, dtype=torch.long, device="meta")
        try:
            return trace(
                self.module,
                self.groups,
                lambda module: self.loss(module, tokens),
                compute_dtype=compute_dtype,
                checkpointing=checkpointing,
            )
        except Exception as error:
            first_line = next(iter(str(error).splitlines()), "")
            raise ValueError(
                f"model {self.name!r} cannot be run forward and backward on the meta device, for {sequences} × "
                f"{length + 1} token numbers: {type(error).__name__}: {first_line}"
            ) from error


def model_of(model: "Model | nn.Module | str | Path") -> Model:
    """Find out what is meant.

    Args:
        model: a module; a path of a ``config.json``, or of a folder that has one; the name of a built-in config
            (``builtin_models()``), or of a model type of the installed transformers, such as ``"llama"``; or
            ``"package.module:name"`` of a function without arguments that makes a module or a :class:`Model`, which
            runs with the meta device as default. A module that returns something else than its loss for token numbers
            comes as a :class:`Model`.

    Raises:
        ValueError: there is no such model, or its config is not that of a decoder.
    """
    if isinstance(model, Model):
        return model
    if isinstance(model, nn.Module):
        return Model(type(model).__name__, model, groups_of(model), _loss)
    if not isinstance(model, str | Path):
        raise ValueError(f"model must be a module, a name or a path; got {type(model).__name__}")
    if ":" in str(model) and not Path(model).exists():
        return model_of(_made(str(model)))
    name, config = _config(model)
    try:
        with torch.device("meta"):
            decoder = Decoder(DecoderConfig.of(config))
    except ValueError as error:
        raise ValueError(f"model {str(model)!r}: {error}") from None
    return Model(name, decoder, groups_of(decoder), _loss)


def groups_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """The usual groups: each element of the largest list of modules, then the module itself."""
    lists = [one for one in module.modules() if isinstance(one, nn.ModuleList) and len(one) > 0]
    largest = max(lists, key=lambda one: sum(param.numel() for param in one.parameters()), default=())
    return (*largest, module)


def builtin_models() -> dict[str, Path]:
    """Configs that come with the package: name → file."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "models").glob("*.json"))}


def _made(target: str) -> "Model | nn.Module":
    module, _, name = target.partition(":")
    try:
        with torch.device("meta"):
            made = getattr(importlib.import_module(module), name)()
    except Exception as error:
        raise ValueError(f"model {target!r} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(made, Model | nn.Module):
        raise ValueError(f"model {target!r}: {name}() must return a module, got {type(made).__name__}")
    return made


def _config(model: str | Path) -> tuple[str, dict[str, Any]]:
    builtin = {name.lower(): (name, path) for name, path in builtin_models().items()}
    path = Path(model)
    name = str(model)
    if name.lower() in builtin:
        name, path = builtin[name.lower()]
    elif path.is_dir():
        path = path / "config.json"
    elif not path.is_file() and path.suffix != ".json":
        return name, _transformers_config(name)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"model {name!r}: {path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"model {name!r}: {path} does not hold a JSON object")
    return name if path.stem != "config" else path.resolve().parent.name, config


def _transformers_config(name: str) -> dict[str, Any]:
    there = f"built in are {', '.join(builtin_models())}"
    try:
        mapping = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    except ImportError:
        raise ValueError(f"no model {name!r}: {there}; transformers, which knows others, is not installed") from None
    if name not in mapping:
        raise ValueError(f"no model {name!r}: {there}; or give a config.json, or a model type of transformers: llama")
    config: dict[str, Any] = mapping[name]().to_dict()
    return config


def _loss(module: nn.Module, tokens: Tensor) -> Tensor:
    """Compute the loss of a module that returns it, or of one of transformers."""
    if hasattr(module, "config") and hasattr(module, "forward") and hasattr(module, "generation_config"):
        inputs = tokens[:, :-1]
        loss: Tensor = module(input_ids=inputs, labels=inputs, use_cache=False).loss
        return loss
    returned: object = module(tokens)
    if not isinstance(returned, Tensor) or returned.dim() > 0:
        raise ValueError(
            f"{type(module).__name__} must return its loss for token numbers; got {type(returned).__name__}. "
            "Give a fsdp_offload.plan.Model with a loss of your own"
        )
    return returned


def local_shapes(shapes: Sequence[tuple[int, ...]], shards: int) -> list[tuple[int, ...]]:
    """Compute the shapes on the first rank: the largest shards, which all others pad theirs to."""
    return [(-(-shape[0] // shards), *shape[1:]) if shape else shape for shape in shapes]
