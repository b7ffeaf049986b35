"""The DeepSpeed-Ulysses algorithm on torch.distributed with gloo: attention, forward and backward.

Each of P processes holds shards [S/P, H, D] of q, k and v. Three all_to_all_single, one for each
array, re-shard them to [S, H/P, D], SDPA computes attention, and a fourth all-to-all re-shards the
output to [S/P, H, D]. Backward is the mirror image, by autograd, so there are eight all-to-alls
(Jacobs et al. 2023, arXiv:2309.14509).

Before timing, the program compares a small case with one process.
"""

import os
import socket
from typing import Callable

import common
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F


def sequence_to_heads(x: torch.Tensor) -> torch.Tensor:
    """Re-shards [S/P, H, D] to [S, H/P, D]."""
    p, (n, h, d) = dist.get_world_size(), x.shape
    send = x.view(n, p, h // p, d).transpose(0, 1).contiguous()
    recv = torch.empty_like(send)
    dist.all_to_all_single(recv, send)
    return recv.view(p * n, h // p, d)


def heads_to_sequence(x: torch.Tensor) -> torch.Tensor:
    """Re-shards [S, H/P, D] to [S/P, H, D]."""
    p, (s, h, d) = dist.get_world_size(), x.shape
    send = x.contiguous()
    recv = torch.empty(p, s // p, h, d, dtype=x.dtype)
    dist.all_to_all_single(recv, send)
    return recv.transpose(0, 1).reshape(s // p, p * h, d)


class Reshard(torch.autograd.Function):
    """One of the two reshards. Its backward pass is the other one."""

    @staticmethod
    def forward(ctx, x, to_heads):
        ctx.to_heads = to_heads
        return sequence_to_heads(x) if to_heads else heads_to_sequence(x)

    @staticmethod
    def backward(ctx, g):
        return (heads_to_sequence(g) if ctx.to_heads else sequence_to_heads(g.contiguous())), None


def attend(q, k, v, causal):
    """Computes attention of q, k and v, [S, H, D] each."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )[0].transpose(0, 1)


def ulysses(q, k, v, causal):
    """Computes attention of shards q, k and v, [S/P, H, D] each. Collective."""
    return Reshard.apply(attend(*(Reshard.apply(x, True) for x in (q, k, v)), causal), False)


def tensors(c: dict) -> list[torch.Tensor]:
    """Returns q, k, v and dout of the whole sequence."""
    g = torch.Generator().manual_seed(0)
    return [
        torch.randn(c["tokens"], c[h], c["head_dim"], generator=g)
        for h in ("heads", "kv_heads", "kv_heads", "heads")
    ]


def shard(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()].clone()


def check() -> None:
    """Compares output and gradients of a small case with one process. Collective."""
    c = dict(
        tokens=128,
        heads=2 * dist.get_world_size(),
        kv_heads=dist.get_world_size(),
        head_dim=16,
        causal=True,
    )
    whole = tensors(c)
    local = [shard(x) for x in whole]
    for x in (*whole[:3], *local[:3]):
        x.requires_grad_()
    want, got = attend(*whole[:3], True), ulysses(*local[:3], True)
    want.backward(whole[3])
    got.backward(local[3])
    for w, g in [(want, got), *((a.grad, b.grad) for a, b in zip(whole[:3], local[:3]))]:
        error = (shard(w.detach()) - g).abs().max() / w.abs().max()
        assert error < 1e-5, f"ulysses differs from one process: error {error}"


def timed(attend: Callable, q, k, v, dout, repeat: int) -> list[float]:
    """Returns the seconds of each call of attend, forward and backward, on the slowest process.

    Collective.
    """
    for x in (q, k, v):
        x.requires_grad_()

    def before():
        q.grad = k.grad = v.grad = None
        dist.barrier()

    def both():
        attend(q, k, v).backward(dout)
        dist.barrier()

    times = common.seconds(both, repeat + 1, before)[1:]  # the first call is a warm-up
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def case(c: dict, repeat: int) -> list[float]:
    """Returns the seconds of each call of a case. Collective."""
    return timed(
        lambda q, k, v: ulysses(q, k, v, c["causal"]), *(shard(x) for x in tensors(c)), repeat
    )


def process(rank: int, a, port: int) -> None:
    join(rank, a, port)
    check()
    for name, c in common.cases("ulysses", a.cases).items():
        times = case(c, a.repeat)
        if rank == 0:
            n = (
                3.5
                * 4.0
                * c["tokens"] ** 2
                * c["heads"]
                * c["head_dim"]
                / (2 if c["causal"] else 1)
            )
            common.emit(
                "ulysses on gloo",
                name,
                op="forward+backward",
                ranks=a.ranks,
                threads=a.threads,
                gflops=n / min(times) / 1e9,
                **common.summary(times),
            )
    dist.destroy_process_group()


def start(doc: str, process: Callable) -> None:
    """Runs process(rank, arguments, port) in --ranks processes."""
    p = common.parser(doc)
    p.add_argument("--ranks", type=int, default=2, help="processes, which share --threads threads")
    a = p.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(process, args=(a, port), nprocs=a.ranks)


def join(rank: int, a, port: int) -> None:
    """Makes the process group."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(max(1, a.threads // a.ranks))
    dist.init_process_group("gloo", rank=rank, world_size=a.ranks)


if __name__ == "__main__":
    start(__doc__, process)
