"""Plan the conversion of Megatron's ``torch_dist`` to split ``fsdp_dtensor``, with all of the optimizer's state.

::

    decoder.layers.mlp.linear_fc1.weight         model.module.decoder.layers.{0, 1, ...}.mlp.linear_fc1.weight_{w, v}
    optimizer.state.exp_avg.<that>               optimizer.state.module.module.module.<each>.exp_avg
    optimizer.state.param.<that>                 model.module.<each>: Megatron-FSDP's weights are the fp32 mains
    common.pt: param groups                      optimizer.param_to_group_meta.module.module.module.<each, fused>.step
    common.pt: args, iteration, ...              args, iteration, ...

``torch_dist`` stacks layers and experts along the first dimensions, and stores ``[gate; up]`` as one rank has them. So
each new tensor is a rectangle of an old one. Only plain values of ``args`` are kept; no code in them is run.
"""

import argparse
import functools
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import rewrite
from ..core.regions import Shape, TensorRegion, replaced, stretches, whole_of
from ..core.text import CheckpointError, counted, human_bytes, some_of
from ..core.values import flattened, values_in
from ..fuse.files import COMMON_FILE, FORMAT_FILE, is_torch_dist
from ..fuse.names import sorted_out
from ..fuse.rules import DENSE_RANKS, EXPERT_RANKS, find_matches, preset
from ..rewrite import LARGEST_PIECE_BYTES, Piece, Rewrite, given
from ..stored.checkpoint import Checkpoint, Path, StoredTensor
from ..stored.items import DamagedError, ItemReader
from ..stored.metadata import open_dcp
from ..stored.rank_files import Reading, told
from ..stored.unpickle import PickledObject, allowed
from .convert import Wanted, as_dcp, wanted_keys

_WRAPPERS = "module.module.module."  # around the model in the optimizer: two of Megatron-FSDP, and Float16Module
_MAINS = ("param", "fp32_param", "master_param")
_LAYERS = re.compile(r"(?!.*\blayers\.\d)((?:.*\.)?layers)\.(\D.*)")  # stacked in the first dimension, as experts are
_EXPERTS = re.compile(r"(.*\.experts\.experts)\.(linear_fc\d\..*)")
_MOST_PARTS = 1 << 20  # of one tensor: layers times experts
_EXPERT = re.compile(r"(.*\.experts)\.experts\.(\d+)\.(linear_fc\d)\.(weight|bias)(_[wv])?")
_GROUPED, _SEQUENTIAL = r"\1.\3.\4\2\5", r"\1.local_experts.\2.\3.\4\5"
_WITHIN = re.compile(r"(\b(?:linear_fc1|in_proj|conv1d)\.(?:weight|bias)\d*)(_[wv]|\.\w+)$")  # a fused parameter
_OTHERS = ("rng_state", "rerun_state_machine", "content_metadata")
_BUCKETS = "its optimizer is stored by buckets (dp_reshardable), and only Megatron knows which parameter is where"


class _Part(NamedTuple):
    """A new tensor: the rectangle at ``start`` of one layer or expert, the stored tensor's index ``at`` (stacked)."""

    name: str
    at: Shape
    start: Shape
    shape: Shape

    def read(self, tensor: StoredTensor, region: TensorRegion, reader: ItemReader) -> Tensor:
        """Read a region of the tensor."""
        offsets = (*self.at, *map(int.__add__, self.start, region.offsets))
        sizes = (*(1 for _ in self.at), *region.sizes)
        return reader.read_region(tensor, TensorRegion(offsets, sizes)).view(region.sizes)


def plan(source: str, wanted: Wanted, threads: int) -> Rewrite:
    """Open and check a checkpoint, and plan its conversion."""
    opened = open_dcp(source)
    if not is_torch_dist(opened):
        raise CheckpointError(f"{source} is no torch_dist of Megatron, whose {FORMAT_FILE} says so")
    opened = replace(opened, own_files=(*(opened.own_files or ()), COMMON_FILE, FORMAT_FILE))
    checkpoint = rewrite.whole(opened, threads)
    keys = wanted_keys(checkpoint, wanted.excluded)
    is_unnamed = any("optimizer." in key for key in sorted_out(keys, checkpoint.paths).others)
    refusal = _BUCKETS if is_unnamed else checkpoint.refusal
    if refusal and any("optimizer." in key for key in keys):
        raise CheckpointError(
            f"{source}: {refusal}; load it in Megatron, and save it with --dist-ckpt-optim-fully-reshardable, or leave "
            "the optimizer out with --exclude '*optimizer.*'"
        )
    return _Plan(checkpoint, keys, wanted).rewrite()


class _Plan:
    def __init__(self, checkpoint: Checkpoint, keys: list[str], wanted: Wanted) -> None:
        self.checkpoint, self.wanted, tensors = checkpoint, wanted, checkpoint.tensors
        self.new: dict[str, StoredTensor] = {}
        self.pieces: list[Piece] = []
        self.contents: dict[str, bytes] = {}
        self.paths: dict[str, Path] = {}
        self.saved: dict[int, bytes] = {}  # ``id`` of a value → its bytes, once for options that many parameters share
        self.common, unread = _common(checkpoint)
        self.args: dict[str, Any] = vars(self.common.get("args", argparse.Namespace()))
        names = sorted_out(keys, checkpoint.paths)
        self.state: dict[str, dict[str, StoredTensor]] = {key: {} for key in names.others if key in tensors}
        for name in names.states:
            tensor, is_known = tensors.get(name.key), name.fqn in self.state and name.kind
            is_alike = tensor and is_known and tensor.shape == tensors[name.fqn].shape
            if not tensor or not is_alike or (name.kind in _MAINS and tensor.dtype != torch.float32):
                raise CheckpointError(
                    f"{checkpoint.path}: {name.key} is no state of {name.fqn}: no such name, another shape, or a main "
                    "that is not fp32; leave it out with --exclude"
                )
            self.state[name.fqn][name.kind] = tensor
        objects = (re.sub(r"/shard_.*|.*\.(?=_extra_state)", "", key) for key in keys if key in checkpoint.objects)
        left = [*dict.fromkeys([*objects, *unread])]
        self.notes = [f"left out: {some_of(left, 20)}"] * bool(left)
        self.notes += ["without rng_state, Megatron loads it with --no-load-rng"]
        apart = sum(found[2][0] == "." for key in self.state if (found := _WITHIN.search(key)))
        what = f"{counted(apart, 'part')} of in_proj and conv1d left apart, as for dev and Bridge; for main, merge them"
        self.notes += [what] * bool(apart)

    def rewrite(self) -> Rewrite:
        mains, trained = 0, dict[str, int]()  # parameter with state → its number of dimensions
        for key, parts in self._parts().items():
            state = self.state[key]
            main = next((state.pop(kind) for kind in _MAINS if kind in state), None)
            mains += main is not None
            for part in parts:
                self._add(("model", f"module.{part.name}"), main or self.checkpoint.tensors[key], part)
                for kind, tensor in state.items():
                    self._add(("optimizer", "state", f"{_WRAPPERS}{part.name}", kind), tensor, part)
                if state or main:
                    trained[part.name] = len(part.shape)
        if trained:  # options of each parameter; its step counter also in its state, where torch's optimizers read it
            groups, found = self._groups(), {}
            for name, dims in trained.items():
                found[module] = options = self._options_of(module := _WITHIN.sub(r"\1", name), dims, groups)
                if "step" in options:
                    key = self._new_key(("optimizer", "state", f"{_WRAPPERS}{name}", "step"))
                    self.new[key] = StoredTensor(key, (), torch.float32, ())
                    self.pieces.append(given(key, torch.tensor(float(options["step"])), whole_of(())))
            for module, options in found.items():
                self._add_values(("optimizer", "param_to_group_meta", f"{_WRAPPERS}{module}"), options)
        self.notes += [f"{counted(mains, 'weight')} from the fp32 mains, as Megatron-FSDP has them"] * bool(mains)
        for name, value in self.common.items():
            self._add_values((name,), value if name != "optimizer" else {})
        new = as_dcp(self.checkpoint, self.new, self.pieces, self.contents, self.paths, self.wanted.shard_bytes)
        size = f"{human_bytes(new.nbytes)} in {counted(len(new.files), 'file')}"
        headline = f"{counted(len(new.tensors), 'tensor')} as fsdp_dtensor, {size}"
        return new._replace(notes=(*self.notes, *self.checkpoint.notes), headline=headline)

    def _parts(self) -> dict[str, list[_Part]]:
        """Return the new tensors that each tensor of the model becomes: by layer and expert, gate and up apart."""
        tensors, path = self.checkpoint.tensors, self.checkpoint.path
        form = _GROUPED if self.args.get("moe_grouped_gemm", True) else _SEQUENTIAL
        placed: dict[str, tuple[str, Shape]] = {}  # by parameter: stored tensor and place
        counts: dict[str, int] = {}
        for key in self.state:
            names: dict[str, Shape] = {key: ()}
            for stacked in (_LAYERS, _EXPERTS):
                first, at = next(iter(names.items()))
                if match := stacked.fullmatch(first):
                    count = (*tensors[key].shape, 0, 0)[len(at)]
                    if counts.setdefault(match[1], count) != count or not 0 < count * len(names) <= _MOST_PARTS:
                        raise CheckpointError(
                            f"{path}: {key} has shape {tensors[key].shape}, and others {counts[match[1]]:,} in front: "
                            "no model has such layers or experts"
                        )
                    numbers = range(count)
                    names = {stacked.sub(rf"\1.{n}.\2", k): (*at, n) for k, at in names.items() for n in numbers}
            for name, at in names.items():
                if placed.setdefault(_EXPERT.sub(form, name), (key, at)) != (key, at):
                    raise CheckpointError(f"{path} has {name} twice: alone, and in what is stacked")
        shapes = {name: tensors[key].shape[len(at) :] for name, (key, at) in placed.items()}
        fused = {found.fused: found for found in find_matches("split", shapes, preset("megatron-swiglu"))}
        parts: dict[str, list[_Part]] = {}
        for name, (key, at) in placed.items():
            shape, own = shapes[name], parts.setdefault(key, [])
            start = (0,) * len(shape)
            if name not in fused or fused[name].is_whole(shapes):
                own.append(_Part(name, at, start, shape))
                continue
            dim, combs = fused[name].divided(shape, {DENSE_RANKS: 1, EXPERT_RANKS: 1}, shapes)
            for part, comb in zip(fused[name].parts, combs, strict=True):
                own.append(_Part(part, at, replaced(start, dim, comb.start), comb.part_shape(shape, dim)))
        return parts

    def _add(self, path: Path, tensor: StoredTensor, part: _Part) -> None:
        key = self._new_key(path)
        self.new[key] = StoredTensor(key, part.shape, tensor.dtype, ())
        for small in stretches(whole_of(part.shape), LARGEST_PIECE_BYTES // tensor.dtype.itemsize):
            read = functools.partial(part.read, tensor, small)
            self.pieces.append(Piece(key, small, small.numel * tensor.dtype.itemsize, read))

    def _add_values(self, path: Path, value: Any) -> None:
        """Add values other than state; each value in a nested dict gets its own key, as in DCP."""
        for own, each in flattened(value, path):
            if isinstance(each, Tensor):
                shape = tuple(each.shape)
                tensor = StoredTensor(".".join(map(str, own)), shape, each.dtype, vars(each)["chunks"])
                self._add(own, tensor, _Part("", (), (0,) * len(shape), shape))
                continue
            if id(each) not in self.saved:
                if any(isinstance(one, Tensor) for one in values_in(vars(each) if path == ("args",) else each)):
                    raise CheckpointError(
                        f"{self.checkpoint.path}/{COMMON_FILE}: {'.'.join(map(str, own))} has a tensor"
                    )
                torch.save(each, buffer := io.BytesIO())
                self.saved[id(each)] = buffer.getvalue()
            self.contents[self._new_key(own)] = self.saved[id(each)]

    def _new_key(self, path: Path) -> str:
        key = ".".join(map(str, path))
        if self.paths.setdefault(key, path) is not path:
            raise CheckpointError(f"{self.checkpoint.path}: there would be two values named {key}")
        return key

    def _groups(self) -> list[dict[str, Any]]:
        """Return the param groups of all optimizers, with the counter of torch's optimizers."""
        found, view = self.common.pop("optimizer", {}), self.checkpoint.folder.view
        groups = []
        with told(f"the optimizer in {self.checkpoint.path}/{COMMON_FILE}"):
            each = [found] if {"optimizer", "param_groups"} & {*found} else [*found.values()]
            for one in (own.get("optimizer", own) for own in each):
                for group in one["param_groups"]:
                    step = group.get("step", one.get("state", {}).get("common_step"))
                    if isinstance(step, Tensor):
                        content = bytearray(view(*vars(step)["chunks"][0].place))
                        step = torch.frombuffer(content, dtype=step.dtype).item()
                    if step is not None and (isinstance(step, bool) or int(step) != step):
                        raise DamagedError(f"its step is {step}")
                    options = {option: value for option, value in group.items() if option != "params"}
                    groups.append(options if step is None else {**options, "step": int(step)})
            self._add_values(("optimizer", "grad_scaler"), each[0].get("grad_scaler", {}))
        return groups

    def _options_of(self, name: str, dims: int, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the options of the parameter's group, found by ``--names`` or else by Megatron's default rule."""
        names, fitting = self.wanted.names, groups
        if names:
            fitting = [
                group for group, own in zip(groups, names, strict=False) if isinstance(own, list) and name in own
            ]
        has_decay = self.args.get("apply_wd_to_qk_layernorm") and re.search(r"[qk]_layernorm\.", name)
        is_small = (dims == 1 or name.endswith(".bias")) and not has_decay
        kept_apart = ("is_expert_parallel", ".experts." in name), ("wd_mult", 1.0 - is_small)
        for option, value in () if names else kept_apart:
            if len({repr(group.get(option)) for group in fitting}) > 1:
                fitting = [group for group in fitting if group.get(option) == value]
        if len(fitting) != 1:
            raise CheckpointError(
                f"{self.checkpoint.path}: which of {counted(len(groups), 'param group')} {name} is in is not known; "
                f"give --names FILE, a JSON list with a list of the names in each of them, as they are in {COMMON_FILE}"
            )
        return fitting[0]


def _common(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """Read Megatron's common state; also return names of omitted entries: not plain, or of use in torch_dist only."""
    unread: list[str] = []
    if COMMON_FILE not in checkpoint.folder.files():
        raise CheckpointError(f"{checkpoint.path} has no {COMMON_FILE}, in which torch_dist has its options; fetch it")
    with told(f"{checkpoint.path}/{COMMON_FILE}"):
        reading = Reading(checkpoint.folder, COMMON_FILE, allowed("common"))
        if isinstance(args := reading.pickled.get("args"), PickledObject) and args.name == "Namespace":
            reading.pickled["args"] = dict(args.state)
        unread += [name for name in reading.pickled if name.startswith(_OTHERS)]
        common = dict(_plain(reading, {k: v for k, v in reading.pickled.items() if k not in unread}, "", unread))
        if wrong := [name for name in unread if name.startswith("optimizer")]:
            raise DamagedError(f"{wrong[0]} is no plain value")
        if "args" in common:
            common["args"] = argparse.Namespace(**common["args"])
    return {"checkpoint_version": 3.0, **common}, unread


def _plain(reading: Reading, values: Mapping[Any, Any], lead: str, unread: list[str]) -> Iterator[tuple[Any, Any]]:
    for name, value in values.items():
        try:
            is_dict = isinstance(value, dict)
            found = dict(_plain(reading, value, f"{lead}{name}.", unread)) if is_dict else reading.plain(value)
        except DamagedError:
            unread.append(f"{lead}{name}")
            continue
        yield name, found
