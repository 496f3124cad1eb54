"""Models that transformers shards itself, by ``from_pretrained(distributed_config=...)``: FSDP2 × tensor parallelism.

Their parameters come after ``fully_shard``. Its helpers of a checkpoint redistribute ``_StridedShard``, also of state
whose memory is on the host.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_offload import OffloadPolicy, offload_optimizer, offload_report
from tests.distributed.frameworks import POLICIES
from tests.distributed.launch import DEVICE_TYPE, spawn, this_device
from tests.parity import leaves, local, same_bits
from tests.proofs import RESUMES, TRAINS, proves

distributed = pytest.importorskip("transformers.distributed", reason="needs transformers 5.24")
pytestmark = pytest.mark.distributed

VOCABULARY, STEPS = 64, 4


def save_models(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder / "dense")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts)).save_pretrained(folder / "experts")


def train(
    source: Path, sizes: dict[str, int], policy: OffloadPolicy | None, *, resume: Path | None, save: Path | None
) -> list[Tensor]:
    """Losses, parameters and state after some steps of a model that transformers has loaded and sharded."""
    from transformers import AutoModelForCausalLM

    config = distributed.DistributedConfig(**sizes)
    model = AutoModelForCausalLM.from_pretrained(source, distributed_config=config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if policy is not None:
        offload_optimizer(optimizer, model=model, policy=policy)
    if resume is not None:
        distributed.load_optimizer_distributed(model, optimizer, str(resume))
    generator = torch.Generator().manual_seed(dist.get_rank() // sizes.get("tp_size", 1))
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (2, 8), generator=generator).to(this_device())
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    if policy is not None:
        report = offload_report(optimizer)
        assert report.memory.host_state_bytes > 0
        assert (report.memory.host_parameter_bytes > 0) == policy.parameters
    if save is not None:
        distributed.save_optimizer_distributed(model, optimizer, str(save))
    params = list(model.parameters())
    state = [leaf for param in params for value in optimizer.state[param].values() for leaf in leaves(value)]
    seen = [tensor.detach() for tensor in (*params, *state)]  # waits where parameters live on the host
    return [*losses, *(local(tensor).cpu().clone() for tensor in seen)]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(same_bits(one, other) for one, other in zip(some, others, strict=True))


def run_saves(rank: int, world_size: int, folder: Path, kind: str, sizes: dict[str, int]) -> None:
    if rank == 0:
        save_models(folder)
    dist.barrier()
    source = folder / kind
    plain = train(source, sizes, None, resume=None, save=folder / "plain")
    for name, policy in POLICIES.items():
        offloaded = train(source, sizes, policy, resume=None, save=folder / name)
        assert same(plain, offloaded), name


def run_resumes(rank: int, world_size: int, folder: Path, kind: str, sizes: dict[str, int]) -> None:
    source = folder / kind
    fresh, resumed = (train(source, sizes, None, resume=saved, save=None) for saved in (None, folder / "plain"))
    assert not same(fresh, resumed)
    for policy, saved in ((POLICIES["step"], "plain"), (None, "iteration"), (POLICIES["parameters"], "parameters")):
        again = train(source, sizes, policy, resume=folder / saved, save=None)
        assert same(resumed, again), saved


LAYOUTS = {"dense": {"fsdp_size": 2, "tp_size": 2}, "experts": {"fsdp_size": 4, "ep_size": 2}}


@proves("transformers' DistributedConfig", "transformers", TRAINS, RESUMES)
@pytest.mark.parametrize("kind", ["dense", pytest.param("experts", marks=pytest.mark.long)])
def test_trains_saves_and_resumes_the_same(kind: str, tmp_path: Path) -> None:
    if DEVICE_TYPE != "cpu":
        pytest.skip("transformers makes the groups of its meshes for the only accelerator type it finds")
    for run in (run_saves, run_resumes):
        spawn(run, 4, tmp_path, tmp_path, kind, LAYOUTS[kind])
