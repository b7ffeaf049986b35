"""Ring attention with a zigzag on torch.distributed with gloo: attention, forward and backward.

The algorithm of ring-flash-attention (zigzag): each of P processes holds the chunks r and 2P-1-r of
q, k and v. Keys and values go around the ring while the step before computes with PyTorch's
flash attention for the CPU; partial outputs are merged with their logsumexp. In backward, keys and
values go around again, and the gradients of keys follow them, one hop behind (Liu et al. 2023,
arXiv:2310.01889).

Before timing, the program compares a small case with one process.
"""

import common
import torch
import torch.distributed as dist
import ulysses_gloo

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def zigzag(x: torch.Tensor) -> torch.Tensor:
    """Returns this process's chunks of a whole tensor [S, H, D]."""
    p, r = dist.get_world_size(), dist.get_rank()
    chunks = x.chunk(2 * p)
    return torch.cat([chunks[r], chunks[2 * p - 1 - r]])


def grouped(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeats the key heads of [1, Hkv, S, D] for so many query heads."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


class Shift:
    """Sends tensors to the next process while others compute."""

    def __init__(self, *tensors: torch.Tensor):
        p, r = dist.get_world_size(), dist.get_rank()
        self.received = [torch.empty(x.shape) for x in tensors]
        ops = [dist.P2POp(dist.isend, x.contiguous(), (r + 1) % p) for x in tensors]
        ops += [dist.P2POp(dist.irecv, x, (r - 1) % p) for x in self.received]
        self.requests = dist.batch_isend_irecv(ops)

    def wait(self) -> list[torch.Tensor]:
        for request in self.requests:
            request.wait()
        return self.received


def parts(step: int, q, k, v):
    """Returns the rows of q and of k and v of a step, and whether it is causal."""
    r, half = dist.get_rank(), q.shape[2] // 2
    everything = slice(None)
    if step == 0:
        return everything, everything, True
    if step <= r:
        return everything, slice(0, half), False
    return slice(half, None), everything, False


class Ring(torch.autograd.Function):
    """Attention of q, k and v, [1, H, S/P, D] each, in zigzag order."""

    @staticmethod
    def forward(ctx, q, k, v):
        p, out, lse, own = dist.get_world_size(), None, None, (k, v)
        for step in range(p):
            shift = Shift(k, v) if step + 1 < p else None
            rows, keys, causal = parts(step, q, k, v)
            o, s = flash(
                q[:, :, rows],
                grouped(k[:, :, keys], q.shape[1]),
                grouped(v[:, :, keys], q.shape[1]),
                0.0,
                causal,
            )
            if out is None:
                out, lse = o, s
            else:
                a, b = lse[:, :, rows], torch.logaddexp(lse[:, :, rows], s)
                out[:, :, rows] = (
                    out[:, :, rows] * (a - b).exp()[..., None] + o * (s - b).exp()[..., None]
                )
                lse[:, :, rows] = b
            if shift:
                k, v = shift.wait()
        ctx.save_for_backward(q, *own, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        p, heads, behind = dist.get_world_size(), k.shape[1], None
        dq = torch.zeros_like(q)
        for step in range(p):
            shift = Shift(k, v) if step + 1 < p else None
            rows, keys, causal = parts(step, q, k, v)
            grads = flash_backward(
                dout[:, :, rows],
                q[:, :, rows],
                grouped(k[:, :, keys], q.shape[1]),
                grouped(v[:, :, keys], q.shape[1]),
                out[:, :, rows],
                lse[:, :, rows],
                0.0,
                causal,
            )
            dq[:, :, rows] += grads[0]
            sums = [
                x.view(1, heads, -1, x.shape[2], x.shape[3]).sum(2) for x in (grads[1], grads[2])
            ]
            dk, dv = behind.wait() if behind else (torch.zeros_like(k), torch.zeros_like(v))
            dk[:, :, keys] += sums[0]
            dv[:, :, keys] += sums[1]
            behind = Shift(dk, dv) if p > 1 else None
            if shift:
                k, v = shift.wait()
        if behind:
            dk, dv = behind.wait()
        return dq, dk, dv


def ring(q, k, v):
    """Computes attention of shards q, k and v, [S/P, H, D] each. Collective."""
    return Ring.apply(*(x.transpose(0, 1)[None] for x in (q, k, v)))[0].transpose(0, 1)


def check() -> None:
    """Compares output and gradients of a small case with one process. Collective."""
    c = dict(tokens=128, heads=4, kv_heads=2, head_dim=16, causal=True)
    whole = ulysses_gloo.tensors(c)
    local = [zigzag(x).clone() for x in whole]
    for x in (*whole[:3], *local[:3]):
        x.requires_grad_()
    want, got = ulysses_gloo.attend(*whole[:3], True), ring(*local[:3])
    want.backward(whole[3])
    got.backward(local[3])
    for w, g in [(want, got), *((a.grad, b.grad) for a, b in zip(whole[:3], local[:3]))]:
        error = (zigzag(w.detach()) - g).abs().max() / w.abs().max()
        assert error < 1e-5, f"the ring differs from one process: error {error}"


def case(c: dict, repeat: int) -> list[float]:
    """Returns the seconds of each call of a case. Collective."""
    whole = ulysses_gloo.tensors(c)
    return ulysses_gloo.timed(ring, *(zigzag(x).clone() for x in whole), repeat)


def process(rank: int, a, port: int) -> None:
    ulysses_gloo.join(rank, a, port)
    check()
    for name, c in common.cases("ulysses", a.cases).items():
        times = case(c, a.repeat)
        if rank == 0:
            common.emit(
                "ring on gloo",
                name,
                op="forward+backward",
                ranks=a.ranks,
                threads=a.threads,
                **common.summary(times),
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    ulysses_gloo.start(__doc__, process)
