"""The Trainer of transformers and a loop with Accelerate, on ranks of torch.distributed."""

import pathlib
import unittest

import children
import ulysses
from need import need_torch
from ranks import contexts

HERE = pathlib.Path(__file__).resolve().parent


@need_torch
class Train(unittest.TestCase):
    def test_trainer(self):
        out = children.run(["python", HERE / "trained.py"], timeout=900).stdout
        self.assertEqual(out.count("ok"), 12, out)

    def test_one_rank(self):
        """With one rank the Trainer is transformers' own."""
        import transformers
        from ulysses.trainer import Trainer

        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=16,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                attn_implementation="sdpa",
            )
        )
        args = transformers.TrainingArguments(output_dir="unused", use_cpu=True, report_to="none")
        trainer = Trainer(model=model, args=args)
        self.assertIsNone(trainer.sequence_parallel)
        self.assertEqual(model.config._attn_implementation, "sdpa")
        with self.assertRaisesRegex(ValueError, "is 2 and torch.distributed is not initialized"):
            Trainer(model=model, args=args, sequence_parallel_size=2)


@need_torch
class Batches(unittest.TestCase):
    def test_local_batch(self):
        """The shards of a batch equal the result of `shard`. A batch that differs is refused."""
        import torch

        batch = {
            "input_ids": torch.arange(14).reshape(2, 7),
            "labels": torch.arange(14).reshape(2, 7),
            "attention_mask": torch.ones(2, 7, dtype=torch.long),
            "name": "batch",
        }

        def body(ctx):
            mine = ulysses.local_batch(batch, context=ctx)
            first = next(iter(ulysses.shard(batch, ctx)))
            self.assertEqual(set(mine), set(first))
            for name, x in first.items():
                same = torch.equal(mine[name], x) if torch.is_tensor(x) else mine[name] == x
                self.assertTrue(same, name)
            self.assertEqual((mine.sequences, mine.ranges), (first.sequences, first.ranges))
            for name, x in (
                ("input_ids", torch.ones(1, 1)),
                ("inputs_embeds", torch.ones(1, 1, 4)),
            ):
                few = ulysses.local_batch({name: x}, context=ctx)  # a token for each rank
                self.assertEqual(few[name].shape, x.shape)
            other = {**batch, "labels": batch["labels"] + ctx.rank}
            if ctx.size > 1:
                with self.assertRaisesRegex(ulysses.InvalidArgument, "shift_labels is .* on rank"):
                    ulysses.local_batch(other, context=ctx)
            wrong = {} if ctx.rank == ctx.size - 1 else batch
            with self.assertRaisesRegex(ulysses.InvalidArgument, "give a tensor"):
                ulysses.local_batch(wrong, context=ctx)

        for size in (1, 2, 3):
            contexts(size, body)


if __name__ == "__main__":
    unittest.main()
