"""Offload parameters in Megatron-FSDP's slices; split them like its checkpoints, save, and load on other ranks.

    python examples/megatron_slices.py                             # 4 ranks save, 3 go on
    python examples/megatron_slices.py --ranks 2 --resume-ranks 4

or each half by itself:

    torchrun --standalone --nproc-per-node 4 examples/megatron_slices.py --save checkpoint
    torchrun --standalone --nproc-per-node 3 examples/megatron_slices.py --resume checkpoint

Megatron-FSDP lays the parameters of a unit one after the other into a flat buffer, and cuts it into equal shards. So a
rank has a flat slice of a parameter, which may begin and end in mid-row, or nothing of it. No placement describes the
slice; the parameter's attribute `megatron_fsdp_slice` does. Here such parameters are made without Megatron, and random
gradients without a model. Everything else is what a training loop of Megatron would do:

- `offload_optimizer`: the state is in host memory, in slices like the parameters;
- `get_optimizer_state_dict(fsdp_dtensor=True)`: the layout of Megatron's `fsdp_dtensor`;
- `split_state_dict`: the halves of SwiGLU's `linear_fc1` become `linear_fc1.weight_w` and `_v`, in state too;
- `save`, and `load` on another number of ranks, where the slices are different.

After both halves every rank compares its slices with a plain `torch.optim.AdamW` on whole tensors. Exit code 0 means
that every bit is the same. Runs on the CPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from checkpoint_tools import merge_state_dict, preset, split_state_dict
from fsdp_offload import OffloadPolicy, offload_optimizer, offload_states, release_states, reload_states
from fsdp_offload.checkpoint import get_optimizer_state_dict, load, save, set_optimizer_state_dict

STEPS = 5
LAYER = "decoder.layers.0.mlp"
SHAPES = {  # in the order of Megatron's buffer; 24 x 5 rows are cut in mid-row by 4 ranks and by 3
    f"{LAYER}.linear_fc1.weight": (24, 5),
    f"{LAYER}.linear_fc1.bias": (24,),
    f"{LAYER}.linear_fc2.weight": (5, 12),
    "decoder.final_layernorm.weight": (5,),
}
SWIGLU, VALUES = preset("megatron-swiglu"), {"tp_size": 1}


# The model -----------------------------------------------------------------------------------------------------------


def whole_values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def slices(ranks: int, rank: int) -> dict[str, slice]:
    """Return the part of each flat parameter that a rank's shard of the buffer has."""
    total = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    shard = -(-total // ranks)
    found, begin = {}, 0
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        first, last = (min(max(shard * edge - begin, 0), numel) for edge in (rank, rank + 1))
        found[name] = slice(first, last)
        begin += numel
    return found


def build(mesh: DeviceMesh, wholes: dict[str, Tensor]) -> nn.Module:
    """Make modules with Megatron's names, and parameters like those of its `param_and_grad_buffer.py`."""
    model = nn.Module()
    for name, own in slices(mesh.size(), mesh.get_rank()).items():
        whole = wholes[name]
        local = whole.flatten()[own].clone()
        made = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
        param: Any = nn.Parameter(made)
        param.megatron_fsdp_slice = own
        param.megatron_fsdp_dist_index = SimpleNamespace(tp_dim=None)
        *path, last = f"module.{name}".split(".")
        module = model
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, param)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, first: int) -> None:
    own = slices(mesh.size(), mesh.get_rank())
    for step in range(first, first + STEPS):
        offload_states(optimizer)
        optimizer.zero_grad()
        release_states(optimizer)
        for name, whole in gradients(step).items():  # instead of Megatron's forward, backward and reduction
            param = model.get_parameter(f"module.{name}")
            local = whole.flatten()[own[name]].clone()
            param.grad = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
        reload_states(optimizer)  # in Megatron: reload_before(config.finalize_model_grads_func, optimizer)
        optimizer.step()


def start(mesh: DeviceMesh, wholes: dict[str, Tensor]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(mesh, wholes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="offload_optimizer: The parameters are on the CPU")
        offload_optimizer(optimizer, policy=OffloadPolicy(bucket_bytes=1024))
    return model, optimizer


# Checkpoints ---------------------------------------------------------------------------------------------------------


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, for_load: bool = False) -> tuple[Any, Any]:
    """Return the split state of a checkpoint, as views of this rank's slices: a load fills the slices."""
    # state_dict() loses the parameters' slices; `model=` passes them on.
    optim_state = get_optimizer_state_dict(model, optimizer, for_load=for_load, fsdp_dtensor=True)
    return split_state_dict(model.state_dict(), optim_state, SWIGLU, values=VALUES, model=model)


def save_half(folder: Path, mesh: DeviceMesh) -> bool:
    model, optimizer = start(mesh, whole_values())
    train(model, optimizer, mesh, first=0)
    model_state, optim_state = state_of(model, optimizer)
    save({"model": model_state, "optimizer": optim_state}, checkpoint_id=folder)
    tell(f"saved by {mesh.size()} ranks: {', '.join(key for key in model_state if key.endswith(('_w', '_v')))}")
    return compare(model, optimizer, mesh, STEPS)


def resume_half(folder: Path, mesh: DeviceMesh) -> bool:
    model, optimizer = start(mesh, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    model_state, optim_state = state_of(model, optimizer, for_load=True)
    load({"model": model_state, "optimizer": optim_state}, checkpoint_id=folder)
    _, optim_state = merge_state_dict(model_state, optim_state, SWIGLU, values=VALUES)
    set_optimizer_state_dict(model, optimizer, optim_state)
    same = compare(model, optimizer, mesh, STEPS)
    train(model, optimizer, mesh, first=STEPS)
    return same and compare(model, optimizer, mesh, 2 * STEPS)


def compare(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, steps: int) -> bool:
    """Compare slices with a plain optimizer on whole tensors; tell whether they are the same on all ranks."""
    wholes = {name: nn.Parameter(whole) for name, whole in whole_values().items()}
    plain = torch.optim.AdamW(wholes.values(), lr=1e-2)
    for step in range(steps):
        for name, grad in gradients(step).items():
            wholes[name].grad = grad
        plain.step()
    same = True
    for name, own in slices(mesh.size(), mesh.get_rank()).items():
        param = model.get_parameter(f"module.{name}")
        pairs = [(param, wholes[name])]
        pairs += [(optimizer.state[param][key], plain.state[wholes[name]][key]) for key in ("exp_avg", "exp_avg_sq")]
        same &= all(torch.equal(one.to_local().flatten(), other.flatten()[own]) for one, other in pairs)
    verdicts: list[bool] = [False] * mesh.size()
    dist.all_gather_object(verdicts, same)
    tell(f"after {steps} steps on {mesh.size()} ranks: " + ("every bit is the same" if all(verdicts) else "DIFFERENT"))
    return all(verdicts)


# The program ---------------------------------------------------------------------------------------------------------


def tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def run_as_rank(options: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    same = save_half(options.save, mesh) if options.save else resume_half(options.resume, mesh)
    dist.barrier()
    dist.destroy_process_group()
    return int(not same)


def launch(ranks: int, *flags: str) -> bool:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, __file__, *flags], env=environment, check=False).returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="that save (%(default)s)")
    parser.add_argument("--resume-ranks", type=int, default=3, help="that go on (%(default)s)")
    half = parser.add_mutually_exclusive_group()
    half.add_argument("--save", type=Path, metavar="FOLDER", help="the first half only; run me with torchrun")
    half.add_argument("--resume", type=Path, metavar="FOLDER", help="the second half only; run me with torchrun")
    options = parser.parse_args(argv)
    if options.save or options.resume:
        if "RANK" not in os.environ:
            parser.error("--save and --resume are for the ranks that torchrun starts")
        return run_as_rank(options)
    with tempfile.TemporaryDirectory(prefix="megatron_slices_") as folder:
        passed = launch(options.ranks, "--save", folder) and launch(options.resume_ranks, "--resume", folder)
    print("PASS" if passed else "FAIL")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
