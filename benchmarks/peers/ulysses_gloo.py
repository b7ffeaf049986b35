"""The DeepSpeed-Ulysses algorithm on torch.distributed's gloo: attention over sequence shards, forward and backward.

Each of P processes holds [S/P, H, D] of q, k and v. One all_to_all_single for each of the three gives it all tokens of H/P heads, SDPA attends,
a fourth brings the output back to [S/P, H, D]; backward is the mirror image by autograd: eight exchanges in all (Jacobs et al. 2023).
Before timing, a small case is checked against one process without exchanges.
"""

import json
import os
import pathlib
import socket
import statistics
import time

import common
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

CASES = pathlib.Path(__file__).resolve().parent.parent / "cases.json"


def sequence_to_heads(x: torch.Tensor) -> torch.Tensor:
    """[S/P, H, D] -> [S, H/P, D]"""
    p, (n, h, d) = dist.get_world_size(), x.shape
    send = x.view(n, p, h // p, d).transpose(0, 1).contiguous()
    recv = torch.empty_like(send)
    dist.all_to_all_single(recv, send)
    return recv.view(p * n, h // p, d)


def heads_to_sequence(x: torch.Tensor) -> torch.Tensor:
    """[S, H/P, D] -> [S/P, H, D]"""
    p, (s, h, d) = dist.get_world_size(), x.shape
    send = x.contiguous()
    recv = torch.empty(p, s // p, h, d, dtype=x.dtype)
    dist.all_to_all_single(recv, send)
    return recv.transpose(0, 1).reshape(s // p, p * h, d)


class Exchange(torch.autograd.Function):
    """Either exchange; its gradient is the other one."""

    @staticmethod
    def forward(ctx, x, to_heads):
        ctx.to_heads = to_heads
        return sequence_to_heads(x) if to_heads else heads_to_sequence(x)

    @staticmethod
    def backward(ctx, g):
        return (heads_to_sequence(g) if ctx.to_heads else sequence_to_heads(g.contiguous())), None


def attend(q, k, v, causal):
    """[S, H, D] each."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )[0].transpose(0, 1)


def ulysses(q, k, v, causal):
    """[S/P, H, D] each."""
    return Exchange.apply(attend(*(Exchange.apply(x, True) for x in (q, k, v)), causal), False)


def tensors(c: dict) -> list[torch.Tensor]:
    """q, k, v, dout of the whole sequence."""
    g = torch.Generator().manual_seed(0)
    return [
        torch.randn(c["tokens"], c[h], c["head_dim"], generator=g)
        for h in ("heads", "kv_heads", "kv_heads", "heads")
    ]


def shard(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()].clone()


def check() -> None:
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
        assert error < 1e-5, f"the exchange is wrong: error {error}"


def case(c: dict, repeat: int) -> list[float]:
    q, k, v, dout = (shard(x) for x in tensors(c))
    for x in (q, k, v):
        x.requires_grad_()
    times = []
    for _ in range(repeat + 1):
        q.grad = k.grad = v.grad = None
        dist.barrier()
        t = time.perf_counter()
        ulysses(q, k, v, c["causal"]).backward(dout)
        dist.barrier()
        times.append(time.perf_counter() - t)
    slowest = torch.tensor(times[1:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def process(rank: int, a, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(max(1, a.threads // a.ranks))
    dist.init_process_group("gloo", rank=rank, world_size=a.ranks)
    check()
    cases = {c["name"]: c for c in json.loads(CASES.read_text())["ulysses"]}
    for name in common.chosen(list(cases), a.cases):
        c = cases[name]
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
                min_s=min(times),
                median_s=statistics.median(times),
                repeat=a.repeat,
            )
    dist.destroy_process_group()


def main() -> None:
    p = common.parser(__doc__)
    p.add_argument(
        "--ranks", type=int, default=2, help="processes; --threads are shared among them"
    )
    a = p.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(process, args=(a, port), nprocs=a.ranks)


if __name__ == "__main__":
    main()
