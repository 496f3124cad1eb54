"""transformers' Trainer and TRL's SFTTrainer with FSDP2: training, evaluation, ``resume_from_checkpoint``."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_offload import is_offloaded
from tests.distributed.frameworks import (
    OVERLAPPED,
    POLICY,
    SAVED_AT,
    STEPS,
    as_torchrun,
    assert_same,
    record,
    recorded,
    same_scripts,
)
from tests.distributed.launch import DEVICE_TYPE
from tests.parity import assert_at_home
from tests.proofs import OTHER_RANKS, RESUMES, TRAINS, proves

pytest.importorskip("transformers")
pytestmark = pytest.mark.distributed

VOCABULARY, LENGTH = 64, 8


def tokens(number: int) -> list[dict[str, list[int]]]:
    rows = torch.randint(0, VOCABULARY, (number, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "labels": row} for row in rows]


def model_of() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes))


def on_any_device(cls: type) -> type:
    """accelerate would leave FSDP to accelerators; what it does after these lines is the same on a CPU."""

    class OnAnyDevice(cls):  # type: ignore[misc,valid-type]
        def create_accelerator_and_postprocess(self) -> None:
            from accelerate import FullyShardedDataParallelPlugin, PartialState
            from accelerate.utils import DistributedType

            super().create_accelerator_and_postprocess()
            PartialState().distributed_type = self.accelerator.state.distributed_type = DistributedType.FSDP
            self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True

    return OnAnyDevice


def trainer_of(kind: str, policy: dict[str, Any] | None, options: dict[str, Any], seen: list[float]) -> Any:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from fsdp_offload.integrations.transformers import OffloadTrainer

    class Note(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            del args, state, control, kwargs
            seen.extend(logs[name] for name in ("loss", "grad_norm", "learning_rate", "eval_loss") if name in logs)

    given: dict[str, Any] = {} if policy is None else {"offload_policy": policy}
    common = {"train_dataset": tokens(2 * 2 * 2 * STEPS), "eval_dataset": tokens(8), "callbacks": [Note()], **given}
    base: type = Trainer if policy is None else OffloadTrainer
    if kind == "trainer":
        return on_any_device(base)(model_of(), TrainingArguments(**options), **common)
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    for name in ("train_dataset", "eval_dataset"):
        common[name] = Dataset.from_list([{"input_ids": row["input_ids"]} for row in common[name]])  # type: ignore[attr-defined]
    cls = SFTTrainer if policy is None else type("OffloadSFTTrainer", (OffloadTrainer, SFTTrainer), {})
    if kind == "lora":
        from peft import LoraConfig

        targets = ["q_proj", "v_proj", "down_proj"]
        common["peft_config"] = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    return on_any_device(cls)(model_of(), SFTConfig(**options, max_length=LENGTH), processing_class=tokenizer, **common)


def environment(rank: int, world_size: int) -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)  # of the script before in this process
    GradientState._reset_state()
    as_torchrun(rank, world_size)


def options_of(folder: Path) -> dict[str, Any]:
    wrapped = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    fsdp = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "reshard_after_forward": True, **wrapped}
    place = {"output_dir": str(folder), "use_cpu": DEVICE_TYPE == "cpu", "fsdp": True, "fsdp_config": fsdp}
    batches = {"max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    training = {"bf16": False, "max_grad_norm": 0.5, "learning_rate": 0.01, "lr_scheduler_type": "cosine"}
    now_and_then = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": SAVED_AT, "save_total_limit": 2}
    said = {"logging_steps": 1, "logging_nan_inf_filter": False, "report_to": [], "disable_tqdm": True}
    return place | batches | training | now_and_then | said


def script(
    rank: int,
    world_size: int,
    folder: Path,
    name: str,
    *,
    kind: str = "trainer",
    policy: dict[str, Any] | None = None,
    resume: Path | None = None,
    again: bool = False,
) -> None:
    environment(rank, world_size)
    options = options_of(folder / name)
    seen: list[float] = []
    trainer = trainer_of(kind, policy, options, seen)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    if again:
        trainer.args.max_steps = 2
        trainer.train()
    assert is_offloaded(trainer.optimizer) == (policy is not None)
    trained = [name for name, param in trainer.model.named_parameters() if param.requires_grad]
    assert all(("lora_" in name) == (kind == "lora") for name in trained)
    if policy is not None:
        assert_at_home(trainer.optimizer.optimizer)
    record(folder, name, rank, seen, trainer.model, [trainer.optimizer])


OF_TRAINER = proves("transformers' Trainer", "transformers", TRAINS, RESUMES, OTHER_RANKS)
OF_SFT = proves("TRL's SFTTrainer", "trl", TRAINS, RESUMES)
OF_LORA = proves("TRL's SFTTrainer with LoRA", "peft", TRAINS, RESUMES)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [pytest.param("trainer", marks=OF_TRAINER), pytest.param("sft", marks=OF_SFT), pytest.param("lora", marks=OF_LORA)],
)
def test_training_and_resuming(tmp_path: Path, kind: str) -> None:
    for package in {"sft": ("trl",), "lora": ("trl", "peft")}.get(kind, ()):
        pytest.importorskip(package)
    plain: dict[str, Any] = {"kind": kind}
    offloaded = {**plain, "policy": POLICY}
    first = {"plain": plain, "offloaded": offloaded}
    if kind == "trainer":
        first["overlapped"] = {"policy": OVERLAPPED}
        twice = {"plain twice": {"again": True}, "offloaded twice": {"again": True, "policy": POLICY}}
        same_scripts(script, tmp_path, 2, twice)
    same_scripts(script, tmp_path, 2, first)
    seen = len(recorded(tmp_path, "plain")[0])
    assert seen >= 3 * STEPS
    saved = f"checkpoint-{SAVED_AT}"
    later = {
        "plain from offloaded": {**plain, "resume": tmp_path / "offloaded" / saved},
        "offloaded from plain": {**offloaded, "resume": tmp_path / "plain" / saved},
    }
    same_scripts(script, tmp_path, 2, later)
    seen_before = seen - len(recorded(tmp_path, "plain from offloaded")[0])
    assert seen_before >= 3 * SAVED_AT
    assert_same(tmp_path, "plain", "plain from offloaded", 2, seen_since=seen_before)
    if kind == "trainer":
        alone = {f"{one} alone": {**first[one], "resume": tmp_path / "plain" / saved} for one in ("plain", "offloaded")}
        same_scripts(script, tmp_path, 1, alone)
