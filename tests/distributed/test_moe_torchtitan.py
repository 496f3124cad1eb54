"""torchtitan's mixtures of experts: experts on a second mesh inside one ``fully_shard`` (``ShardPlacementResult``).

Small Qwen3 and DeepSeek-V3 models. torchtitan builds, shards, routes and balances them, and makes the state dicts; FSDP
or HSDP, times expert parallelism 1, 2 or 4. Not its own are the meshes' device (CUDA to it, without an accelerator),
the kernel of attention (compiled, or CUDA's), and gloo's exchange of tokens. Of its backends, ``spmd_types`` is the
default, and shards nothing with torch 2.13; ``full_dtensor`` shards no experts.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchtitan.distributed.parallel_dims as titan_meshes
import torchtitan.distributed.utils as titan
from torch import Tensor, nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig, register_moe_load_balancing_hook
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.models import deepseek_v3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention

from fsdp_offload import OffloadPolicy, offload_report
from fsdp_offload.fsdp.fully_shard import fsdp_modules
from fsdp_offload.integrations.torchtitan import offloaded
from tests.async_writers import read_checkpoint
from tests.distributed.frameworks import POLICIES
from tests.distributed.launch import DEVICE_TYPE, run_cases, spawn, this_device
from tests.distributed.same_files import digests, metadata_differences
from tests.parity import leaves, local, same_bits, same_value
from tests.proofs import OTHER_RANKS, RESUMES, TRAINS, proves

pytestmark = pytest.mark.distributed

VOCABULARY, WIDTH, TOKENS, MAX_NORM = 96, 32, (2, 8), 6.2  # some steps clip
LAYOUTS: dict[str, dict[str, int]] = {
    "ep 2": {"ep": 2},
    "ep 1": {"ep": 1},
    "HSDP, ep 1": {"ep": 1, "data_parallel_replicate_degree": 2},
    "ep 2, columns": {"ep": 2, "experts": 2},  # fewer experts than ranks: torchtitan shards another dim
    "ep 4": {"ep": 4},
    "HSDP, ep 2": {"ep": 2, "data_parallel_replicate_degree": 2},
    "TP, ep 2": {"ep": 2, "tensor_parallel_degree": 2},
}
BACKEND = "partial_dtensor" if torch.__version__ < "2.14" else "spmd_types"
COMMON = {"dim": WIDTH, "n_layers": 2, "moe_hidden_dim": 24, "attn_backend": "flex", "moe_comm_backend": "standard"}


def qwen3_layers(experts: int) -> list[Any]:
    rope = CosSinRoPE.Config(dim=8, max_seq_len=64)
    heads = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    return qwen3._build_qwen3_moe_layers(num_experts=experts, top_k=2, rope=rope, **heads, **COMMON)


def deepseek_v3_layers(experts: int) -> list[Any]:
    """A dense layer, and one with shared experts."""
    rope = ComplexRoPE.Config(dim=8, max_seq_len=64)
    heads = {"q_lora_rank": 0, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    mlp = {"n_dense_layers": 1, "dense_hidden_dim": 48, "num_shared_experts": 2, "non_blocking_capacity_factor": None}
    router = {"num_experts": experts, "router_top_k": 2, "router_score_func": "softmax"}
    return deepseek_v3._build_dsv3_layers(rope=rope, n_heads=4, mscale=0.7, **heads, **mlp, **router, **COMMON)


FAMILIES: dict[str, tuple[Any, Callable[..., nn.Module], Callable[[int], list[Any]]]] = {
    "Qwen3": (qwen3.Qwen3Model, qwen3.parallelize_qwen3, qwen3_layers),
    "DeepSeek-V3": (deepseek_v3.DeepSeekV3Model, deepseek_v3.parallelize_deepseekv3, deepseek_v3_layers),
}


def build(family: str, dims: titan_meshes.ParallelDims, parallelism: ParallelismConfig, experts: int) -> nn.Module:
    """As torchtitan's trainer: on the meta device, sharded, then made."""
    model_class, parallelize, layers_of = FAMILIES[family]
    layers = layers_of(experts)
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    init = {"weight": functools.partial(nn.init.normal_, std=0.1)}
    config = model_class.Config(
        vocab_size=VOCABULARY,
        dim=WIDTH,
        layers=layers,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=init),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init={"weight": nn.init.ones_}),
        lm_head=Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=init),
    )
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"):
        model = config.build()
    rest = {"training": TrainingConfig(), "compile_config": CompileConfig(), "ac_config": None, "dump_folder": ""}
    parallelize(model, parallel_dims=dims, parallelism=parallelism, **rest)
    for module in fsdp_modules(model):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum that scales
    model.to_empty(device=this_device())
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def exchange(outputs: list[Tensor], inputs: list[Tensor], group: Any = None) -> None:
    """``all_to_all`` of any sizes: gloo's own takes one size."""
    received = torch.empty_like(torch.cat(outputs))
    sizes = [[len(chunk) for chunk in chunks] for chunks in (outputs, inputs)]
    dist.all_to_all_single(received, torch.cat(inputs), *sizes, group=group)
    for output, chunk in zip(outputs, received.split(sizes[0]), strict=True):
        output.copy_(chunk)


class Training:
    """A model and the container of its optimizer, which torchtitan's function clips, offloaded or not."""

    def __init__(
        self, family: str, policy: OffloadPolicy | None, *, ep: int, experts: int = 4, seed: int = 0, **sizes: int
    ) -> None:
        titan_meshes.device_type = DEVICE_TYPE
        if DEVICE_TYPE == "cpu":
            dist.all_to_all = exchange
        titan.set_spmd_backend(BACKEND)
        _clear_sharding_prop_cache()  # of specs on meshes of other trainings, which fully_shard takes for other meshes
        parallelism = ParallelismConfig(expert_parallel_degree=ep, spmd_backend=BACKEND, **sizes)
        self.dims = titan_meshes.ParallelDims.from_config(parallelism, dist.get_world_size())
        torch.manual_seed(seed)
        self.model = build(family, self.dims, parallelism, experts)
        adamw = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})
        config = OptimizersContainer.Config(param_groups=[adamw], implementation="foreach")
        config = config if policy is None else offloaded(config, policy)
        self.container = config.build(model_parts=[self.model])
        (self.optimizer,) = self.container.optimizers
        register_moe_load_balancing_hook(self.container, [self.model], self.dims)

    def train(self, steps: range, *, clips: bool) -> list[float]:
        """Losses of each rank's own tokens, and norms."""
        seen = []
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank() // self.dims.tp)
            tokens = torch.randint(0, VOCABULARY, TOKENS, generator=generator).to(this_device())
            self.container.zero_grad()
            with titan.get_spmd_context(parallel_dims=self.dims, spmd_typechecking=False)():
                loss = cross_entropy_loss(self.model(tokens), tokens, global_vocab_size=VOCABULARY) / tokens.numel()
                loss.backward()
            if clips:
                params, options = list(self.model.parameters()), {"foreach": True, "ep_enabled": self.dims.ep_enabled}
                seen.append(titan.clip_grad_norm_(params, MAX_NORM, **options).item())
            self.container.step()
            seen.append(loss.item())
        return seen

    def state(self) -> dict[str, Any]:
        return ModelWrapper(self.model).state_dict() | self.container.state_dict()

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        ModelWrapper(self.model).load_state_dict(state)
        self.container.load_state_dict(state)


def differences(plain: Training, moved: Training, steps: range, folder: Path, *, clips: bool) -> Iterator[str]:
    """Train and save both, and compare losses, what lies on this rank, and files."""
    one, other = (run.train(steps, clips=clips) for run in (plain, moved))
    if one != other:
        yield f"losses and norms {one} and {other}"
    states = [run.state() for run in (plain, moved)]
    tensors = [key for key, value in states[0].items() if isinstance(value, Tensor)]
    yield from (key for key in tensors if not all(map(same_bits, *(leaves(state[key]) for state in states))))
    for state, name in zip(states, ("plain", "offloaded"), strict=True):
        dcp.save(state, checkpoint_id=folder / name)
    yield from metadata_differences(folder / "plain", folder / "offloaded")
    if digests(folder / "plain") != digests(folder / "offloaded"):
        yield "the files have other bytes"


def trained(folder: Path, steps: int, policy: str, family: str, layout: str) -> Iterator[str]:
    plain, moved = (Training(family, one, **LAYOUTS[layout]) for one in (None, POLICIES[policy]))
    yield from differences(plain, moved, range(steps), folder, clips=True)
    if policy != "step" and "the loop clips" not in str(offload_report(moved.optimizer)):
        yield "clipped by torchtitan's function"
    experts = {param for name, param in moved.model.named_parameters() if ".inner_experts." in name}
    others = set(moved.model.parameters()) - experts
    if LAYOUTS[layout]["ep"] > 1 and {param.device_mesh for param in experts} & {param.device_mesh for param in others}:
        yield "experts are on no mesh of their own"
    memory, numel = offload_report(moved.optimizer).memory, sum(local(p).numel() for p in experts | others)
    if memory.host_state_bytes != 8 * numel or memory.host_parameter_bytes != (policy == "parameters") * 4 * numel:
        yield f"of {numel} parameters, this is on the host: {memory}"


def resumed(number: int, ep: int, folder: Path, steps: int, policy: str, family: str) -> Iterator[str]:
    """Load what the leg before, of another ep, has saved, and train on."""
    pair = [Training(family, one, ep=ep, seed=number) for one in (None, POLICIES[policy])]
    at, before = folder / str(number), folder / str(number - 1) / "offloaded"
    if number:
        for run in pair:
            run.load(before)
        dcp.save(pair[1].state(), checkpoint_id=at / "loaded")
        saved, loaded = read_checkpoint(before), read_checkpoint(at / "loaded")
        yield from (f"{key} changed" for key in saved if not same_value(saved[key], loaded[key]))
    yield from differences(*pair, range(steps * number, steps * (number + 1)), at, clips=False)


def run(_: int, __: int, folder: Path, every: int, compare: Any, steps: int, *axes: list[str]) -> None:
    cases = {", ".join(case): case for case in itertools.product(*axes)}
    run_cases({name: functools.partial(compare, folder / name, steps, *case) for name, case in cases.items()}, every)


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@proves("torchtitan's experts", "torchtitan", TRAINS)
@pytest.mark.parametrize(("ranks", "every", "steps"), [(4, 20, 5), long(4, 1, 10), long(2, 4, 10), long(8, 5, 10)])
def test_trains_and_saves_the_same(ranks: int, every: int, steps: int, tmp_path: Path) -> None:
    layouts = [name for name, sizes in LAYOUTS.items() if ranks % math.prod(sizes.values()) == 0]
    spawn(run, ranks, tmp_path, tmp_path, every, trained, steps, list(POLICIES), list(FAMILIES), layouts)


@proves("torchtitan's experts", "torchtitan", RESUMES, OTHER_RANKS)
@pytest.mark.parametrize(("ranks", "every"), [long((4, 4, 4), 1), long((8, 4, 8), 5), long((2, None, 2), 5)])
def test_a_checkpoint_of_ep_2_goes_to_4_and_1(ranks: tuple[int | None, ...], every: int, tmp_path: Path) -> None:
    """Two ranks have no ep 4."""
    legs = [(size, ep) for size, ep in zip(ranks, (2, 4, 1), strict=True) if size]
    for number, (size, ep) in enumerate(legs):
        leg = functools.partial(resumed, number, ep)
        spawn(run, size, tmp_path, tmp_path, every, leg, 4, list(reversed(POLICIES)), list(FAMILIES))
