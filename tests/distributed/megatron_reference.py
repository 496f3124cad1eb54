"""What Megatron's own code makes of the model of ``megatron_model.py``: running it writes the fixture of the tests.

    python -m tests.distributed.megatron_reference tests/distributed/megatron_reference.json

needs megatron-core beside torch (it runs on the CPU), and writes which version it was: the fixture is of Megatron-LM
d98e8a64, as 0.16.1 on the package index does not split GatedDeltaNet. Its functions run as they are;
two things are replaced, because they want a GPU or a whole training set-up: ``Tensor.cuda`` of the flags that
``validate_uneven_dtensor`` reduces returns the tensor, and the expert-parallel rank and size are set by Megatron's own
setters.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.launch import mesh, spawn
from tests.distributed.megatron_model import (
    ENDS,
    MOMENTS,
    SHAPES,
    Described,
    Layout,
    build,
    described,
    fill_state,
    model_state,
    optimizer_name,
    own_of,
)

MESHES = [(2, 1), (4, 1), (2, 2)]
FIXTURE = Path(__file__).with_suffix(".json")

# Megatron's shards are whole rows: its `view(-1, *row)` raises for others.
KINDS = [kind for kind in ENDS if kind != "in mid-row"]


def case_name(dp: int, tp: int, kind: str) -> str:
    return f"dp {dp} × tp {tp}, {kind}"


def megatron_layout(dp: int, tp: int, kind: str) -> Layout:
    """With Megatron's own index of meshes."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import FSDPDistributedIndex

    device_mesh = mesh(dp, tp, names=("dp", "tp"))
    index = FSDPDistributedIndex(device_mesh, dp_shard_dim="dp", tp_dim="tp", expt_device_mesh=device_mesh)
    return Layout(device_mesh, kind, index)


def megatron_state(layout: Layout) -> tuple[Any, dict[str, Tensor], dict[str, Any]]:
    """The model by Megatron's ``make_fsdp_dtensor``, its state dict, and the optimizer's in ``fsdp_dtensor``."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import make_fsdp_dtensor

    model = build(layout, make_fsdp_dtensor)
    params = dict(model.named_parameters())
    state = {
        optimizer_name(name): {
            "step": torch.tensor(3.0),
            **{k: torch.zeros_like(params[f"module.{name}"]) for k in MOMENTS},
        }
        for name in SHAPES
    }
    fill_state(SHAPES, lambda name: state[optimizer_name(name)], own_of(layout))
    meta = {optimizer_name(name): {"lr": 0.5, "wd_mult": 1.0} for name in SHAPES}
    return model, model_state(model), {"state": state, "param_to_group_meta": meta}


def split_by_megatron(model: Any, model_values: dict[str, Any], optim: dict[str, Any]) -> tuple[Any, Any]:
    """``preprocess_fsdp_dtensor_state_dict`` of its training loop, the handlers that this version has."""
    from megatron.core import parallel_state
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint as handlers

    parallel_state.set_expert_model_parallel_world_size(1)
    parallel_state.set_expert_model_parallel_rank(0)
    model.config = SimpleNamespace(num_moe_experts=2)
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    model_values, optim = handlers.handle_swiglu_in_state_dict(model, model_values, optim)
    if hasattr(handlers, "handle_gdn_in_state_dict"):
        model_values, optim = handlers.handle_gdn_in_state_dict(model, model_values, optim)
    preprocess_state_dict_for_uneven_dtensor({"model": model_values, "optimizer": optim})
    return model_values, optim


def numbered_by_megatron(ep_rank: int, num_local: int, keys: list[str]) -> list[str]:
    from megatron.core import parallel_state
    from megatron.core.transformer.fsdp_dtensor_checkpoint import handle_experts_in_state_dict

    parallel_state.set_expert_model_parallel_world_size(2)
    parallel_state.set_expert_model_parallel_rank(ep_rank)
    return list(handle_experts_in_state_dict(dict.fromkeys(keys), 2 * num_local))


def by_key(everyones: list[Described]) -> dict[str, Any]:
    """``{key: [global shape, [chunks of rank 0, of rank 1, ...]]}``: the fixture has each key once."""
    return {key: [shape, [of_rank[key][1] for of_rank in everyones]] for key, (shape, _) in everyones[0].items()}


def reference_of(case: str, rank: int) -> Described:
    """What the fixture says of one rank."""
    found = json.loads(FIXTURE.read_text())["cases"][case]
    return {key: [shape, chunks[rank]] for key, (shape, chunks) in found.items()}


def run_reference(rank: int, world_size: int, dp: int, tp: int, folder: Path) -> None:
    warnings.filterwarnings("ignore")
    cases = {}
    for kind in KINDS:
        made = split_by_megatron(*megatron_state(megatron_layout(dp, tp, kind)))
        everyones: list[Described] = [{} for _ in range(world_size)]
        dist.all_gather_object(everyones, described({"model": made[0], "optimizer": made[1]}))
        cases[case_name(dp, tp, kind)] = by_key(everyones)
    if rank == 0:
        (folder / "cases.json").write_text(json.dumps(cases))


def main(path: Path) -> None:
    import megatron.core

    cases: dict[str, Any] = {}
    for dp, tp in MESHES:
        with tempfile.TemporaryDirectory() as folder:
            spawn(run_reference, dp * tp, Path(folder), dp, tp, Path(folder))
            cases |= json.loads((Path(folder) / "cases.json").read_text())
    names = numbered_by_megatron(1, 2, [key for key in SHAPES if "experts" in key])
    fixture = {"megatron_core": megatron.core.__version__, "experts": names, "cases": cases}
    path.write_text(json.dumps(fixture, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
