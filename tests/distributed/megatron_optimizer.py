"""megatron-core's own DistributedOptimizer, chained for experts, around an optimizer that is offloaded: the same bits.

Its DistributedDataParallel reduces into fp32 buffers, its finalize_model_grads ends the gradients, its chain clips by
the norm over both optimizers. Parameters are bf16, with norms in fp32.

On GPUs Transformer Engine's FusedAdam updates, and device memory is measured between steps. On the CPU Megatron is told
that tensors are on a GPU, and gets the reference of FusedAdam.

Needs megatron-core (0.16), and Transformer Engine on GPUs. A seed's test runs it: tests/seeds/test_megatron_2811.py.
"""

import contextlib
import copy
import gc
import types
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fsdp_offload import (
    OffloadPolicy,
    is_offloaded,
    offload_optimizer,
    offload_states,
    release_states,
    reload_before,
    remove_offload,
)
from tests.distributed.launch import DEVICE_TYPE, this_device
from tests.fused_adam_reference import FusedAdam
from tests.parity import leaves, same_bits, same_value

ON_GPU = DEVICE_TYPE == "cuda"
HIDDEN, LAYERS = (1024, 3) if ON_GPU else (48, 2)
STEPS = 4
CLIP = 0.01


class Case(NamedTuple):
    """Options of Megatron, by its own names, and what state follows from them."""

    optimizer: dict[str, Any]
    ddp: dict[str, Any]
    moments_bytes: int = 8
    """Bytes of an element's two moments."""
    master_bytes: int = 4
    """Bytes of an element's fp32 main or master, or of what a master has more than its bf16 parameter."""


AWARE = {"use_precision_aware_optimizer": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000_000}

BF16_MOMENTS = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}

CASES = {
    "mains": Case({}, {}),
    "mains, communication overlapped": Case({}, OVERLAP),
    "remainders": Case(AWARE, {}, master_bytes=2),
    "remainders, communication overlapped": Case(AWARE, OVERLAP, master_bytes=2),
    "masters": Case({**AWARE, "store_param_remainders": False}, {}),
    "bf16 moments": Case({**AWARE, **BF16_MOMENTS}, {}, moments_bytes=4, master_bytes=2),
}


class Seen(NamedTuple):
    """Results of one training, on the host.

    ``saved`` is as Megatron itself saves it: groups, and mains and state gathered on the first rank.
    """

    losses: list[float]
    norms: list[float]
    values: dict[str, Tensor]
    between_bytes: list[int]
    """Device memory allocated where the forward begins, in each step but the first."""
    expected_bytes: int
    """Bytes of all state and mains of this rank."""
    saved: tuple[Any, list[Any]]


def compare(name: str) -> list[str]:
    """Find what is different, or stays on the device."""
    with contextlib.nullcontext() if ON_GPU else as_if_on_cuda():
        plain = train(name, offload=False)
        offloaded = train(name, offload=True)
        if CASES[name].master_bytes == 4:  # Megatron does not load remainders from this format, plain or not
            resume(name, plain)
    assert all(norm > CLIP for norm in plain.norms), "clipping changes nothing"
    assert plain.values.keys() == offloaded.values.keys()
    problems = [key for key, value in plain.values.items() if not same_bits(value, offloaded.values[key])]
    problems += [] if same_value(plain.saved, offloaded.saved) else ["what Megatron saves"]
    problems += ["losses"] * (plain.losses != offloaded.losses) + ["norms"] * (plain.norms != offloaded.norms)
    gone = min(before - after for before, after in zip(plain.between_bytes, offloaded.between_bytes, strict=True))
    # What comes instead are counters, and what an allocation has more than its tensor.
    if gone < 0.99 * plain.expected_bytes:
        problems.append(f"{gone} of {plain.expected_bytes} bytes are gone between steps")
    return problems


def train(name: str, *, offload: bool) -> Seen:
    from megatron.core.distributed import finalize_model_grads

    gc.collect()  # what is left of the training before would count
    model, chain = build(CASES[name])
    model.config.finalize_model_grads_func = finalize_model_grads
    if offload:
        assert offload_optimizer(chain, policy=OffloadPolicy(bucket_bytes=(32 << 20) if ON_GPU else 4096)) is chain
        model.config.finalize_model_grads_func = reload_before(finalize_model_grads, chain)
    losses, norms, between = [], [], []
    for step in range(STEPS):
        model.zero_grad_buffer()
        chain.zero_grad()
        if offload:
            offload_states(chain)
            release_states(chain)
        if step:
            between.append(device_bytes(chain))
        losses.append(forward_backward(model, step))
        model.config.finalize_model_grads_func([model])
        successful, norm, _ = chain.step()
        assert successful
        norms.append(norm)
    values = read(model, chain)
    saved = chain.state_dict(), [one.get_parameter_state_dp_zero() for one in chain.chained_optimizers]
    expected = sum(value.nbytes for key, value in values.items() if not key.startswith("model."))
    assert expected == formula_bytes(CASES[name], chain)
    if offload:
        inners = [one.optimizer for one in chain.chained_optimizers]
        assert all(map(is_offloaded, inners))
        remove_offload(chain)
        assert not any(map(is_offloaded, inners))
        removed = read(model, chain)
        assert all(same_bits(value, removed[key]) for key, value in values.items())
    seen = Seen(losses, norms, values, between, expected, saved)
    del model, chain
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
    return seen


def resume(name: str, plain: Seen) -> None:
    """Let Megatron load what it saved of plain training: into a fresh optimizer, and while mains are away."""
    for begun in (False, True):
        model, chain = build(CASES[name])
        offload_optimizer(chain, policy=OffloadPolicy(bucket_bytes=(32 << 20) if ON_GPU else 4096))
        if begun:
            forward_backward(model, 7)
            model.finish_grad_sync()
            chain.step()
            offload_states(chain)
            release_states(chain)
        groups, gathered = copy.deepcopy(plain.saved)
        with torch.no_grad():
            for key, param in model.named_parameters():
                param.copy_(plain.values[f"model.{key}"])
            chain.load_state_dict(groups)
            for one, of_one in zip(chain.chained_optimizers, gathered, strict=True):
                one.load_parameter_state_from_dp_zero(of_one)
        loaded = read(model, chain)
        wrong = [key for key, value in plain.values.items() if not same_bits(value, loaded[key])]
        assert not wrong, f"begun={begun}: {wrong[:5]} are loaded wrongly"


def forward_backward(model: Any, step: int) -> float:
    """Two micro-batches; only the second reduces gradients."""
    total = 0.0
    for micro_batch in range(2):
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + dist.get_rank())
        x = torch.randn(64, HIDDEN, generator=generator).to(this_device())
        with model.no_sync() if micro_batch == 0 else contextlib.nullcontext():
            loss = (model(x) - x.roll(1, 0)).square().mean() / 2
            loss.backward()
        total += float(loss.detach())
    return total


def read(model: Any, chain: Any) -> dict[str, Tensor]:
    """Parameters, mains and state, by name, copied to the host.

    Of an fp32 parameter FusedAdam has a master that its kernel neither reads nor writes; offloaded, there is none.
    """
    values = {f"model.{name}": param.detach().cpu() for name, param in model.named_parameters()}
    for number, one in enumerate(chain.chained_optimizers):
        names = {id(group): i for i, group in enumerate(one.optimizer.param_groups)}
        mains = {id(main) for group in one.shard_fp32_from_float16_groups for main in group if main is not None}
        for group in one.optimizer.param_groups:
            for place, param in enumerate(group["params"]):
                key = f"{number}.{names[id(group)]}.{place}"
                if id(param) in mains:
                    values[f"{key}.main"] = param.detach().to("cpu", copy=True)
                for state_name, value in one.optimizer.state[param].items():
                    if param.dtype is torch.float32 and state_name == "master_param":
                        continue
                    if isinstance(value, Tensor) and value.dim():
                        for leaf_number, leaf in enumerate(leaves(value)):
                            values[f"{key}.{state_name}.{leaf_number}"] = leaf.detach().to("cpu", copy=True)
    return values


def formula_bytes(case: Case, chain: Any) -> int:
    """State and mains of this rank, whose part of each parameter Megatron has cut out of its buffers."""
    low, full = (
        sum(shard.numel() for one in chain.chained_optimizers for group in getattr(one, groups) for shard in group)
        for groups in ("shard_float16_groups", "shard_fp32_groups")
    )
    return low * (case.moments_bytes + case.master_bytes) + full * case.moments_bytes


def device_bytes(chain: Any) -> int:
    """Device memory in use; on the CPU, where none is, that of mains, with state where it has not gone home."""
    if ON_GPU:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    total = 0
    for one in chain.chained_optimizers:
        inner = one.optimizer
        for group in one.shard_fp32_from_float16_groups:
            total += sum(main.untyped_storage().nbytes() for main in group if main is not None)
        if not is_offloaded(inner):
            total += sum(value.nbytes for state in inner.state.values() for value in state.values() if value.dim())
    return total


def build(case: Case) -> tuple[Any, Any]:
    """A model in Megatron's DistributedDataParallel, and Megatron's chain of optimizers for it."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    class Model(MegatronModule):
        """Blocks in bf16 with a norm in fp32, and one layer that Megatron takes for an expert's."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.blocks = nn.ModuleList(
                nn.ModuleDict(
                    {
                        "norm": nn.LayerNorm(HIDDEN),
                        "up": nn.Linear(HIDDEN, 4 * HIDDEN + 3, dtype=torch.bfloat16),  # no rank's share is even
                        "down": nn.Linear(4 * HIDDEN + 3, HIDDEN, dtype=torch.bfloat16),
                    }
                )
                for _ in range(LAYERS)
            )
            self.expert = nn.Linear(HIDDEN, HIDDEN, dtype=torch.bfloat16)
            for param in self.expert.parameters():
                param.allreduce = False

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block["down"](torch.relu(block["up"](block["norm"](x).bfloat16()))).float()
            return x + self.expert(x.bfloat16()).float()

    torch.manual_seed(0)
    config = TransformerConfig(num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=1, bf16=True)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, check_for_nan_in_grad=False, **case.ddp
    )
    model = DistributedDataParallel(config, ddp_config, Model(config).to(this_device()))
    options = OptimizerConfig(
        optimizer="adam",
        lr=0.2 / HIDDEN,
        min_lr=0.0,
        weight_decay=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=CLIP,
        overlap_param_gather=ddp_config.overlap_param_gather,
        **case.optimizer,
    )
    return model, get_megatron_optimizer(options, [model], use_gloo_process_groups=True)


class _AsIfOnCuda(TorchFunctionMode):
    """Tensors on the CPU say that they are on a GPU where Megatron asks for their type, and are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.")
        return result


@contextlib.contextmanager
def as_if_on_cuda() -> Iterator[None]:
    """Megatron's own code, to be run on the CPU."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")))
        stack.enter_context(_AsIfOnCuda())
        engine = types.SimpleNamespace(FusedAdam=FusedAdam)
        stack.enter_context(mock.patch.dict("sys.modules", {"transformer_engine.pytorch.optimizers": engine}))
        stack.enter_context(mock.patch("megatron.core.optimizer.Adam", adam_of_engine))
        stack.enter_context(mock.patch("megatron.core.optimizer.distrib_optimizer.Adam", FusedAdam))
        stack.enter_context(mock.patch("megatron.core.optimizer.USING_PYTORCH_OPTIMIZER", False))
        for flag in ("HAVE_APEX_OR_TE", "USING_TE_OPTIMIZER"):
            stack.enter_context(mock.patch(f"megatron.core.optimizer.distrib_optimizer.{flag}", True))
        for module in ("", ".optimizer_config"):
            stack.enter_context(mock.patch(f"megatron.core.optimizer{module}.is_te_min_version", return_value=True))
        yield


def adam_of_engine(*args: Any, adam_w_mode: bool, **kwargs: Any) -> FusedAdam:
    """The reference, with the one argument that it does not know."""
    assert adam_w_mode
    return FusedAdam(*args, **kwargs)
