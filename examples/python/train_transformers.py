"""Five steps of a small Qwen3 with the Trainer of transformers, on sequences sharded over ranks.

python train_transformers.py                             one process, transformers' own Trainer
torchrun --nproc-per-node 2 train_transformers.py        two ranks, each with half of the tokens

Both commands print the same losses, and the program fails if they are not falling.
"""

import os
import tempfile

import torch
import transformers
from ulysses.trainer import Trainer

SEQ, STEPS = 257, 5


class Text(torch.utils.data.Dataset):
    """Eight sequences of bytes; all but the first of each pair are shorter, so they are padded."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        ids = (torch.arange(SEQ - 40 * (i % 2)) * (i + 3) + i) % 64
        return {"input_ids": ids, "labels": ids}


def padded(rows):
    """Pads the sequences of a batch on the right."""
    stack = torch.nn.utils.rnn.pad_sequence
    ids = [r["input_ids"] for r in rows]
    return {
        "input_ids": stack(ids, batch_first=True),
        "labels": stack([r["labels"] for r in rows], batch_first=True, padding_value=-100),
        "attention_mask": stack([torch.ones_like(x) for x in ids], batch_first=True),
    }


transformers.set_seed(0)
config = transformers.Qwen3Config(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    attn_implementation="sdpa",
)
ranks = int(os.environ.get("WORLD_SIZE", 1))
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=transformers.Qwen3ForCausalLM(config),
        args=transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo" if ranks > 1 else None,
            per_device_train_batch_size=2,  # sequences of a group of ranks
            gradient_accumulation_steps=2,
            max_steps=STEPS,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Text(),
        eval_dataset=Text(),
        data_collator=padded,
        sequence_parallel_size=ranks,
        evaluation="sharded",
    )
    trainer.train()
    evaluation = trainer.evaluate()
losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
if trainer.is_world_process_zero():
    print("losses", *(f"{x:.4f}" for x in losses), f"eval_loss {evaluation['eval_loss']:.4f}")
assert evaluation["eval_loss"] < losses[0], (losses, evaluation)
if ranks > 1:
    torch.distributed.destroy_process_group()
