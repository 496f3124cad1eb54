"""Training with the real megatron-core on the CPU, and the checkpoints that it writes and loads itself.

Megatron asks for CUDA devices by name. :func:`cpu_for_cuda` gives it the CPU instead; nothing of Megatron is replaced
but its random numbers for dropout, which there is none of.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.overrides import TorchFunctionMode

from tests.fused_adam_reference import FusedAdam

TOKENS = torch.arange(8).view(1, 8)
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24}
SIZES |= {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 4}
# How Megatron-Core saves: layers stacked in front, one key for each layer, or with gate and up already apart.
STACKED: Mapping[str, Any] = {"distrib_optim_sharding_type": "fully_reshardable"}
LAYERS: Mapping[str, Any] = {**STACKED, "non_homogeneous_layers": True}
SINGLETON: Mapping[str, Any] = {**STACKED, "singleton_local_shards": True}
BUCKETS: Mapping[str, Any] = {"distrib_optim_sharding_type": "dp_reshardable"}


class _CpuForCuda(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _cpu(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*map(_cpu, args), **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _cpu(value: Any) -> Any:
    is_cuda = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return torch.device("cpu") if is_cuda else value


@contextlib.contextmanager
def cpu_for_cuda() -> Iterator[None]:
    """Wherever CUDA is asked for, it is the CPU.

    Megatron's distributed optimizer loads its own checkpoints only with an Adam that counts steps by group.
    """
    from megatron.core.optimizer import distrib_optimizer

    nothing = mock.MagicMock()  # what streams and events wait for, on the CPU
    streams = {"Stream": nothing, "Event": nothing, "current_stream": nothing, "stream": contextlib.nullcontext}
    with (
        _CpuForCuda(),
        mock.patch.multiple(torch.cuda, **streams),
        mock.patch("torch.Tensor.record_stream"),
        # Gloo has no product in a sum: gradients of Megatron-FSDP are not averaged.
        mock.patch("torch.distributed._make_nccl_premul_sum", return_value=dist.ReduceOp.SUM),
        mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")),
        mock.patch("torch.cuda.synchronize", return_value=None),
        # Without Transformer Engine megatron-core 0.16.1 does not define it, and asks whether it is None.
        mock.patch("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, create=True),
        mock.patch("megatron.core.optimizer.Adam", CountsByGroup),
        mock.patch.multiple(distrib_optimizer, Adam=CountsByGroup, HAVE_APEX_OR_TE=True, USING_TE_OPTIMIZER=True),
    ):
        yield


class CountsByGroup(FusedAdam):
    """As Megatron makes Transformer Engine's."""

    def __init__(self, *args: Any, adam_w_mode: bool, **options: Any) -> None:
        assert adam_w_mode
        super().__init__(*args, **options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Megatron-FSDP gives names for numbers, which torch takes from the groups."""
        numbers = {name: n for n, name in enumerate(name for g in state_dict["param_groups"] for name in g["params"])}
        groups = [{**g, "params": [numbers[name] for name in g["params"]]} for g in state_dict["param_groups"]]
        state = {numbers[name]: entries for name, entries in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state, "param_groups": groups})


class Training:
    """A small GPT with an optimizer. Make it in every rank, inside of :func:`cpu_for_cuda`.

    Args:
        tp: ranks for tensor parallelism.
        is_distributed: the optimizer is Megatron's distributed one.
        is_fsdp: Megatron-FSDP instead of data parallelism.
        qk_layernorm: as Qwen3 has it.
        experts: how many the second layer has; the first one is dense. None: both are.
        seed: of the weights.
    """

    def __init__(
        self,
        tp: int,
        *,
        is_distributed: bool = True,
        is_fsdp: bool = False,
        qk_layernorm: bool = False,
        experts: int | None = None,
        seed: int = 0,
    ) -> None:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.transformer_config import TransformerConfig

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
        torch.manual_seed(seed)
        moe: dict[str, Any] = (
            {"num_moe_experts": experts, "moe_layer_freq": [0, 1], "moe_router_topk": 2} if experts else {}
        )
        config = TransformerConfig(
            **SIZES,
            **moe,
            tensor_model_parallel_size=tp,
            qk_layernorm=qk_layernorm,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            normalization="RMSNorm",
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            apply_rope_fusion=False,
        )
        model = GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm"),
            vocab_size=32,
            max_sequence_length=8,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        options = DistributedDataParallelConfig(use_distributed_optimizer=is_distributed)
        if is_fsdp:
            options.use_megatron_fsdp = options.overlap_grad_reduce = options.overlap_param_gather = True
            options.data_parallel_sharding_strategy = "optim_grads_params"
        self.model = (FullyShardedDataParallel if is_fsdp else DistributedDataParallel)(config, options, model)
        config = OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=is_distributed)
        with mock.patch("megatron.core.optimizer.USING_PYTORCH_OPTIMIZER", not is_distributed):
            self.optimizer = get_megatron_optimizer(config, [self.model])
        self.steps(1)  # only then is there state to load into

    def steps(self, count: int) -> list[float]:
        """Train, and the loss before each step."""
        losses = []
        for _ in range(count):
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            mask = torch.ones(1, 1, 8, 8).tril() < 0.5
            loss = self.model(TOKENS, TOKENS, mask, labels=(TOKENS + 1) % 32).mean()
            loss.backward()
            self.model.finish_grad_sync()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def _state(self, metadata: Mapping[str, Any], *, is_loading: bool) -> dict[str, Any]:
        model = self.model.module.sharded_state_dict(metadata=dict(metadata))
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(metadata))
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path, metadata: Mapping[str, Any], **common: Any) -> None:
        """With ``torch_dist``; ``common`` goes to common.pt, as Megatron's ``args`` and ``iteration`` do."""
        from megatron.core import dist_checkpointing

        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save({**self._state(metadata, is_loading=False), **common}, str(folder))

    def load(self, folder: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """What :meth:`save` wrote, or the tools made of it; everything has to be there, and used."""
        from megatron.core import dist_checkpointing
        from megatron.core.safe_globals import register_safe_globals

        register_safe_globals()
        state = dist_checkpointing.load(self._state(metadata, is_loading=True), str(folder), strict="raise_all")
        self.model.module.load_state_dict(state["model"], strict=True)
        with torch.no_grad():
            self.optimizer.load_state_dict(state["optimizer"])
        return state

    def logits_of(self, folder: Path, metadata: Mapping[str, Any]) -> torch.Tensor:
        """Of the model alone, with the weights of a checkpoint that has nothing else; Megatron's own extras are not."""
        from megatron.core import dist_checkpointing

        wanted = {"model": self.model.module.sharded_state_dict(metadata=dict(metadata))}
        state = dist_checkpointing.load(wanted, str(folder), strict="log_all")
        missing, unexpected = self.model.module.load_state_dict(state["model"], strict=False)
        assert not unexpected
        assert all(key.endswith("_extra_state") for key in missing)
        with torch.no_grad():
            return self.model.module(TOKENS, TOKENS, torch.ones(1, 1, 8, 8).tril() < 0.5)

    def save_fsdp_dtensor(self, folder: Path, *, split: bool) -> None:
        """As Megatron-LM's training does it with functions of Megatron-Core; ``split``: with gate and up apart."""
        dcp.save(self._fsdp_dtensor(split=split, is_loading=False)[1], checkpoint_id=folder)

    def load_fsdp_dtensor(self, folder: Path, renamed: Callable[[str], str]) -> None:
        """By plain DCP, which has to find every key; ``renamed``: those of the file for names of this model."""
        raw, wanted = self._fsdp_dtensor(split=True, is_loading=True)
        flat = {renamed(key): value for key, value in flatten_state_dict(wanted)[0].items()}
        dcp.load(flat, checkpoint_id=folder)
        meta = raw["optimizer"]["param_to_group_meta"]
        for name, options in meta.items():
            meta[name] = {k: flat[renamed(f"optimizer.param_to_group_meta.{name}.{k}")] for k in options}
        self.model.load_state_dict(raw["model"])
        self.optimizer.load_state_dict(raw["optimizer"])

    def _fsdp_dtensor(self, *, split: bool, is_loading: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor
        from megatron.core.transformer import fsdp_dtensor_checkpoint

        model = dict(self.model.state_dict_for_save_checkpoint())
        metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        fsdp_dtensor_checkpoint.handle_fp8_extra_state_case(model)
        raw = {"model": model, "optimizer": optimizer}
        if split:
            model, _ = fsdp_dtensor_checkpoint.handle_swiglu_in_state_dict(self.model, model, None)
            # One module less before the names in the optimizer: there is no Float16Module here.
            inner = self.model.module
            _, optimizer = fsdp_dtensor_checkpoint.handle_swiglu_in_state_dict(inner, {}, optimizer)
        state = {"model": model, "optimizer": optimizer}
        return raw, uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(state)
