"""A model as Megatron-FSDP leaves it, small: with Megatron's real package where that is given, and without it alike.

::

    SHAPES ──cut over tensor-parallel ranks──▶ rows of this one ──slices of ENDS, row by row──▶ a DTensor parameter

Its ``state_dict()`` has keys ``module.…``, its parameters are ``module.module.…`` and its optimizer calls them
``module.module.module.…``, as with Megatron's two wrappers. Every element of every tensor is another number.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from fsdp_offload.fsdp.dtensor import local_shard

Shape = tuple[int, ...]

MLP, MOE, SINGLE, GDN = (
    "module.decoder.layers.0.mlp",
    "module.decoder.layers.1.mlp",
    "module.decoder.layers.2.mlp",
    "module.decoder.layers.3.self_attention",
)

# Global shapes, and the dimension that tensor parallelism cuts.
SHAPES: dict[str, tuple[Shape, int | None]] = {
    f"{MLP}.linear_fc1.weight": ((24, 4), 0),
    f"{MLP}.linear_fc1.bias": ((24,), 0),
    f"{MLP}.linear_fc2.weight": ((4, 12), 1),
    "module.decoder.layers.0.norm.weight": ((9,), None),
    f"{MOE}.experts.linear_fc1.weight0": ((16, 4), 0),
    f"{MOE}.experts.linear_fc1.weight1": ((16, 4), 0),
    f"{MOE}.experts.linear_fc1.bias0": ((16,), 0),
    f"{MOE}.experts.linear_fc1.bias1": ((16,), 0),
    f"{MOE}.experts.linear_fc2.weight0": ((4, 8), 1),
    f"{MOE}.experts.linear_fc2.weight1": ((4, 8), 1),
    f"{MOE}.shared_experts.linear_fc1.weight": ((16, 4), 0),
    f"{MOE}.shared_experts.linear_fc2.weight": ((4, 8), 1),
    f"{SINGLE}.experts.local_experts.0.linear_fc1.weight": ((16, 4), 0),
    f"{SINGLE}.experts.local_experts.0.linear_fc1.bias": ((16,), 0),
    f"{SINGLE}.experts.local_experts.0.linear_fc2.weight": ((4, 8), 1),
    f"{GDN}.in_proj.weight": ((28, 4), 0),
    f"{GDN}.conv1d.weight": ((16, 1, 3), 0),
    f"{GDN}.conv1d.bias": ((16,), 0),
}
GDN_DIMS = {"qk_dim": 4, "v_dim": 8, "num_value_heads": 2}
MOMENTS = ("exp_avg", "exp_avg_sq")

# Where the slices of the data-parallel ranks end: rows of `rows`, and elements beyond them (then in mid-row).
Ends = Callable[[int, int, int], tuple[int, int]]
ENDS: dict[str, Ends] = {
    "even": lambda rank, ranks, rows: (rows * (rank + 1) // ranks, 0),
    "uneven": lambda rank, ranks, rows: (rows * (rank + 1) ** 2 // ranks**2, 0),
    "empty first": lambda rank, ranks, rows: (rows * rank // (ranks - 1), 0),
    "empty last": lambda rank, ranks, rows: (min(rows * (rank + 1) // (ranks - 1), rows), 0),
    "one has all": lambda rank, ranks, rows: (rows if rank >= ranks // 2 else 0, 0),
    "in mid-row": lambda rank, ranks, rows: (rows * (rank + 1) // ranks, 1 if rank < ranks - 1 else 0),
}


class Layout:
    """Which slices a model has, over which mesh.

    Args:
        device_mesh: with the dimensions ``dp`` and ``tp``.
        ends: one of :data:`ENDS`.
        index: Megatron's ``FSDPDistributedIndex`` over the mesh; otherwise a stand-in with the attribute we read.
    """

    def __init__(self, device_mesh: DeviceMesh, ends: str, index: Any = None) -> None:
        self.mesh = device_mesh
        self.ends = ENDS[ends]
        self.index = SimpleNamespace(tp_dim="tp") if index is None else index
        (self.dp, self.tp), (self.dp_rank, self.tp_rank) = device_mesh.shape, device_mesh.get_coordinate()

    def rows_of(self, whole: Tensor, tp_dim: int | None) -> Tensor:
        """What this tensor-parallel rank has."""
        return whole if tp_dim is None else whole.chunk(self.tp, tp_dim)[self.tp_rank].contiguous()

    def own(self, whole: Tensor, tp_dim: int | None) -> Tensor:
        """This rank's part of it, in one dimension."""
        rows = self.rows_of(whole, tp_dim)
        return rows.reshape(-1)[self.slice_of(tuple(rows.shape))]

    def slice_of(self, shape: Shape) -> slice:
        """Of what a tensor-parallel rank has, the range of this data-parallel rank."""
        rows, row_numel = shape[0], math.prod(shape[1:])
        edges = [0]
        for rank in range(self.dp):
            row, beyond = self.ends(rank, self.dp, rows)
            edges.append(min(row * row_numel + beyond, rows * row_numel))
        return slice(edges[self.dp_rank], edges[self.dp_rank + 1])


def whole_of(name: str, shift: float = 0.0) -> Tensor:
    """The global tensor: numbers that no other parameter has, plus ``shift``."""
    shape, _ = SHAPES[name]
    begin = 1000 * list(SHAPES).index(name)
    return torch.arange(begin, begin + math.prod(shape), dtype=torch.float32).view(shape) + shift


class Module(nn.Module):
    """A module with names below it; the sizes of GatedDeltaNet where Megatron looks for them."""

    def at(self, path: str) -> "Module":
        """The module at ``path``, made on the way."""
        first, _, rest = path.partition(".")
        if not hasattr(self, first):
            self.add_module(first, Module())
        below: Module = getattr(self, first)
        return below.at(rest) if rest else below


def build(layout: Layout, make: Callable[..., Tensor] | None = None, *, zeros: bool = False) -> Module:
    """The model; ``make`` is Megatron's ``make_fsdp_dtensor``, or else a stand-in."""
    model = Module()
    for name, (shape, tp_dim) in SHAPES.items():
        whole = torch.zeros(shape) if zeros else whole_of(name)
        path, _, last = f"module.{name}".rpartition(".")
        model.at(path).register_parameter(last, parameter(layout, whole, tp_dim, make))
    attention = model.at(f"module.{GDN}")
    tp_size = layout.tp
    for key, value in {**GDN_DIMS, "in_proj_dim": SHAPES[f"{GDN}.in_proj.weight"][0][0], "tp_size": tp_size}.items():
        setattr(attention, key, value)
    return model


def parameter(layout: Layout, whole: Tensor, tp_dim: int | None, make: Callable[..., Tensor] | None) -> nn.Parameter:
    """As ``_init_optimizer_named_parameters`` of Megatron's ``param_and_grad_buffer.py`` makes them."""
    rows = layout.rows_of(whole, tp_dim)
    fsdp_slice = layout.slice_of(tuple(rows.shape))
    local = rows.reshape(-1)[fsdp_slice].clone()
    if make is None:
        made = _stand_in(layout, whole, local, tp_dim)
    else:
        original = rows.clone()
        _tell_tensor_parallel(original, tp_dim)
        made = make(local, original, layout.index, run_check=False, update_uneven_dtensor_chunk_meta=True)
    param: Any = nn.Parameter(made)
    param.megatron_fsdp_slice = fsdp_slice
    param.megatron_fsdp_dist_index = layout.index
    _tell_tensor_parallel(param, tp_dim)
    return param  # type: ignore[no-any-return]


def _tell_tensor_parallel(tensor: Any, tp_dim: int | None) -> None:
    if tp_dim is not None:
        tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = True, tp_dim, 1


def _stand_in(layout: Layout, whole: Tensor, local: Tensor, tp_dim: int | None) -> DTensor:
    row_shape = layout.rows_of(whole, tp_dim).shape[1:]
    shaped = local.view(-1, *row_shape) if local.numel() % math.prod(row_shape) == 0 else local
    is_cut = tp_dim is not None and layout.tp > 1
    over = layout.mesh if is_cut else layout.mesh["dp"]
    placements = [Shard(0), Shard(tp_dim)] if is_cut else [Shard(0)]
    if is_cut:
        over._shard_order = [1, 0]  # tensor parallelism first, whatever the spec says
    return DTensor.from_local(shaped, over, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def model_state(model: Module) -> dict[str, Tensor]:
    """As the wrapper's ``state_dict()``: detached, without the slices, one ``module.`` less."""
    return {key.removeprefix("module."): value for key, value in model.state_dict().items()}


def optimizer_name(name: str) -> str:
    """What Megatron's optimizer calls the parameter that the model's state dict calls ``name``."""
    return f"module.module.{name}"


Own = Callable[[str, int], Tensor]
"""This rank's part of the parameter of a name (0), or of one of its moments: numbers that no other has."""


def own_of(layout: Layout) -> Own:
    return lambda name, number: layout.own(whole_of(name, number / 4), SHAPES[name][1])


def fill_state(names: Iterable[str], state_of: Callable[[str], dict[str, Tensor]], own: Own) -> None:
    """Write the numbers of each moment into the local tensors of a state."""
    for name in names:
        for number, key in enumerate(MOMENTS, start=1):
            local = local_shard(state_of(name)[key])
            local.copy_(own(name, number).view(local.shape))


def begin_state(optimizer: Optimizer, params: Mapping[str, nn.Parameter], own: Own) -> None:
    """As a first step leaves it that changes no parameter."""
    for param in params.values():
        param.grad = torch.zeros_like(param)
    optimizer.param_groups[0].update(lr=0.0)
    optimizer.step()
    optimizer.param_groups[0].update(lr=0.5)
    fill_state(params, lambda name: optimizer.state[params[name]], own)


def wrong_values(optimizer: Optimizer, params: Mapping[str, nn.Parameter], own: Own) -> Iterator[str]:
    for name, param in params.items():
        state = optimizer.state[param]
        for number, value in enumerate((param, *(state[key] for key in MOMENTS))):
            if not torch.equal(local_shard(value).detach().cpu().reshape(-1), own(name, number)):
                yield f"{name}, {number}: {local_shard(value).reshape(-1)[:5]}, not {own(name, number)[:5]}"
        if state["step"] != 1:
            yield f"step of {name} is {state['step']}"
    if optimizer.param_groups[0]["lr"] != 0.5:
        yield f"lr is {optimizer.param_groups[0]['lr']}"


# What a state dict says, to be compared -------------------------------------------------------------------------------

Described = dict[str, list[Any]]


def described(values: dict[str, Any]) -> Described:
    """``{key: [global shape, [[offsets, sizes, hash of the values], ...]]}`` of what DCP would write of DTensors."""
    found: Described = {}
    for key, value in _flat(values):
        if isinstance(value, DTensor):
            items = [item for item in value.__create_write_items__(key, value) if 0 not in item.tensor_data.chunk.sizes]
            found[key] = [list(value.shape), [_chunk(value, item) for item in items]]
    return found


def _chunk(value: DTensor, item: Any) -> list[Any]:
    shard = value.__get_tensor_shard__(item.index)
    chunk = item.tensor_data.chunk
    assert tuple(shard.shape) == tuple(chunk.sizes), (item, shard.shape)
    return [list(chunk.offsets), list(chunk.sizes), hash_of(shard)]


def hash_of(values: Tensor) -> str:
    """Short enough for a fixture."""
    return hashlib.blake2b(values.contiguous().cpu().numpy().tobytes(), digest_size=4).hexdigest()


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def different(one: Described, other: Described, ranks: Sequence[int] = ()) -> Iterator[str]:
    """What two descriptions disagree on."""
    if one.keys() != other.keys():
        yield f"{ranks} keys: {sorted(one.keys() ^ other.keys())}"
    for key in one.keys() & other.keys():
        if one[key] != other[key]:
            yield f"{ranks} {key}: {one[key]} and {other[key]}"
