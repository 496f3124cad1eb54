"""transformers: a Trainer under FSDP2, with the optimizer's state in host memory.

    torchrun --standalone --nproc-per-node 2 examples/with_trainer.py
    python examples/with_trainer.py             # on the CPU, where accelerate has no FSDP; the rest is the same

Only one class and one argument differ from a script without offload. Trains a small Llama on bytes, evaluates in
between, and resumes from the checkpoint half way in a second Trainer: the losses have to be the same, bit by bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from fsdp_offload import offload_report
from fsdp_offload.integrations.transformers import OffloadTrainer

TEXT = Path(__file__).read_bytes()
LENGTH = 32


class Bytes(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The bytes of this file, in sequences of LENGTH."""

    def __len__(self) -> int:
        return len(TEXT) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor(list(TEXT[index * LENGTH : (index + 1) * LENGTH]))
        return {"input_ids": tokens, "labels": tokens}


def train(args: argparse.Namespace, resume: str | None = None) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    sizes = {"hidden_size": args.width, "intermediate_size": 4 * args.width, "num_hidden_layers": args.layers}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=4, **sizes))
    on_device = torch.accelerator.is_available()
    fsdp = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": "SHARDED_STATE_DICT"}
    options = {"fsdp": True, "fsdp_config": fsdp} if on_device else {"use_cpu": True}
    arguments = TrainingArguments(
        output_dir=args.folder,
        max_steps=args.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=args.steps // 2,
        save_steps=args.steps // 2,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer = OffloadTrainer(
        model,
        arguments,
        train_dataset=Bytes(),
        eval_dataset=Bytes(),
        offload_policy={"bucket_bytes": 1 << 20, "device_bytes": 8 << 20},
        offload_metrics=True,
    )
    trainer.train(resume_from_checkpoint=resume)
    if trainer.is_world_process_zero():
        print(offload_report(trainer.optimizer))
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", default="runs/with-trainer", help="for checkpoints; all ranks have to see it")
    args = parser.parse_args(argv)
    whole = train(args)
    resumed = train(args, f"{args.folder}/checkpoint-{args.steps // 2}")
    same = [entry["loss"] for entry in whole] == [entry["loss"] for entry in resumed]
    print(f"loss {whole[0]['loss']:.3f} -> {whole[-1]['loss']:.3f}; resumed: {'the same' if same else 'OTHER LOSSES'}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
