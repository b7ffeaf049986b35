"""Ten training steps with ulysses.attention, and the same ten steps with PyTorch's attention.

python train_torch.py                              one process
torchrun --nproc-per-node 2 train_torch.py         two ranks (gloo), each with half of the tokens

The program fails if losses or weights differ.
"""

import os

import torch
import torch.distributed as dist
import ulysses
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

VOCAB, HIDDEN, HEADS, SEQ, STEPS = 64, 64, 4, 129, 10


class Model(nn.Module):
    """Two layers with attention and an MLP. attend(q, k, v) takes arrays [B, rows, heads, D]."""

    def __init__(self, attend):
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        self.embed, self.position = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQ, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.qkv = nn.ModuleList(nn.Linear(HIDDEN, 3 * HIDDEN) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
            for _ in range(2)
        )

    def forward(self, ids, positions):
        x = self.embed(ids) + self.position(positions)
        for qkv, mlp in zip(self.qkv, self.mlp):
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
            x = x + self.attend(q, k, v).flatten(2)
            x = x + ulysses.tiled_compute(mlp, x, tile_rows=32)
        return self.head(x)


def pytorch_attention(q, k, v):
    return scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True
    ).transpose(1, 2)


ranks = int(os.environ.get("WORLD_SIZE", 1))
if ranks > 1:
    dist.init_process_group("gloo")
with ulysses.Context.torch() if ranks > 1 else ulysses.Context() as ctx:
    ulysses.use(ctx)
    sharded = Model(lambda q, k, v: ulysses.attention(q, k, v, causal=True))
    reference = Model(pytorch_attention)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (sharded, reference)]

    torch.manual_seed(1)
    text = torch.randint(0, VOCAB, (1, 8)).repeat(1, SEQ // 8 + 1)[:, :SEQ]
    for step in range(STEPS):
        # Each rank gives one batch to shard, which returns a micro-batch for each. Here all ranks
        # have the same batch, so a step uses only the first one.
        micro_batch = next(iter(ulysses.shard({"input_ids": text, "labels": text}, ctx)))
        labels = micro_batch["shift_labels"]
        mean = cross_entropy(
            sharded(micro_batch["input_ids"], micro_batch["position_ids"]).flatten(0, 1),
            labels.flatten(),
            ignore_index=-100,
        )
        loss = ulysses.reduce_sequence_parallel_loss(
            mean, (labels != -100).sum(), gradients="summed"
        )
        loss.backward()
        if ranks > 1:
            for p in sharded.parameters():
                dist.all_reduce(p.grad)

        whole = cross_entropy(
            reference(text, torch.arange(SEQ)[None]).flatten(0, 1),
            ulysses.shift_labels(text).flatten(),
            ignore_index=-100,
        )
        whole.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if ctx.rank == 0:
            print(
                f"step {step}: loss {loss.item():.6f}, PyTorch's attention {whole.item():.6f}",
                flush=True,
            )
        assert abs(loss.item() - whole.item()) < 1e-4, (loss.item(), whole.item())
    for (name, a), b in zip(sharded.named_parameters(), reference.parameters()):
        assert (a - b).abs().max() < 1e-4 * b.abs().max().clamp(min=1), name
if ranks > 1:
    dist.destroy_process_group()
