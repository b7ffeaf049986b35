"""The program that test_launch.py starts on each rank: launched.py mpi|world|torch|mpi_torch.

It tests contexts over mpi4py's communicators, directly and by callbacks, over MPI without mpi4py,
and over torch.distributed.
"""

import sys

import numpy as np
import ulysses
from reference import TOLERANCE, attention, error, mask


def refused(call, *words, error=ulysses.InvalidArgument):
    """Checks that a call raises an error with these words on this rank."""
    try:
        call()
    except error as e:
        assert all(w in str(e) for w in words), e
        return
    raise AssertionError("not refused")


def faults(ctx):
    """Checks calls that are wrong on the last rank only, and calls for which MPI would abort."""
    ctx.use(None)  # shard has set lengths
    last = ctx.rank == ctx.size - 1

    def one(n):
        return ulysses.attention(*[np.ones((1, n, 4, 8), np.float32)] * 3, causal=True, context=ctx)

    one(36), one(37)
    refused(lambda: one(35 - last * 5), "rows")  # lengths for which there is no batch yet
    refused(
        lambda: ulysses.attention(
            *[np.ones((1, 4, 4, 8), np.int64 if last else np.float32)] * 3, context=ctx
        ),
        f"rank {ctx.size - 1} of {ctx.size} refused the call" if not last else "",
        "dtype int64",
        error=ulysses.Unsupported,
    )
    heads = np.ones((1, 6, 2 + last, 4), np.float32)  # the last rank has one head more
    refused(
        lambda: ulysses.gather_heads_scatter_seq(heads, 2, 1, padded=True, context=ctx),
        "heads, its shard of",
    )
    # Heads that are not a multiple of the ranks need no heads=.
    uneven = np.ones((1, 2 * ctx.size, 1 + (ctx.rank == 0), 4), np.float32)
    assert ulysses.gather_heads_scatter_seq(uneven, 2, 1, context=ctx).shape == (
        1,
        2,
        ctx.size + 1,
        4,
    )
    # The last rank has no tokens. NumPy gives such arrays strides of 0, other libraries do not.
    rows = 1 - last
    for x in (
        np.ones((1, rows, 4, 16), np.float32),
        np.lib.stride_tricks.as_strided(
            np.ones(64, np.float32), (1, rows, 4, 16), (256 * rows, 64, 64 * rows, 4)
        ),
    ):
        assert ulysses.attention(x, x, x, causal=True, context=ctx).shape == x.shape


def check(ctx, s=29, seed=0):
    """Checks attention, a reshard, the loss and `shard` on a context over any communicator."""
    rng = np.random.default_rng(seed)
    q, k, v, dout = (rng.standard_normal((2, s, h, 16), np.float32) for h in (6, 2, 2, 6))
    lo, hi = ulysses.shard_rows(s, ctx.size, ctx.rank)

    def shard(x):
        return np.ascontiguousarray(x[:, lo:hi])

    out, lse, call = ulysses.attention_forward(
        shard(q), shard(k), shard(v), causal=True, seq=s, lse=True, context=ctx
    )
    found = (out, lse, *ulysses.attention_backward(call, shard(dout)))
    for a, b in zip(found, attention(q, k, v, dout, see=mask(s, s, True))):
        assert error(a, b[:, lo:hi]) < TOLERANCE
    x = np.arange(s * 6 * 2, dtype=np.float32).reshape(1, s, 6, 2)
    heads = ulysses.shard_rows(6, ctx.size, ctx.rank)
    got = ulysses.gather_seq_scatter_heads(shard(x), 1, 2, s, padded=False, context=ctx)
    np.testing.assert_array_equal(got, x[:, :, heads[0] : heads[1]])
    if ctx.size > 1:
        faults(ctx)
    mean = ulysses.reduce_sequence_parallel_loss(float(ctx.rank), ctx.rank, context=ctx)
    n = sum(range(ctx.size))
    assert abs(mean - sum(r * r for r in range(ctx.size)) / max(n, 1)) < 1e-12
    micro_batches = list(ulysses.shard({"input_ids": np.full((1, 5), ctx.rank)}, ctx))
    assert [m["input_ids"].max(initial=m.owner) for m in micro_batches] == list(range(ctx.size))


def check_projections(ctx):
    """Checks that overlapped projections are bitwise equal to plain ones, on PyTorch tensors."""
    from test_projections import case, overlapped, run, synchronous

    layer = case(9, 2, True, "rmsnorm")
    want = run(synchronous, layer, "rmsnorm", False, ctx)
    for name, x in run(overlapped, layer, "rmsnorm", False, ctx).items():
        np.testing.assert_array_equal(x, want[name])


def mpi():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with ulysses.Context(world, threads=1) as ctx:
        assert (ctx.rank, ctx.size) == (world.rank, world.size)
        check(ctx)
    with ulysses.Context(world, threads=1, callbacks=True) as ctx:
        check(ctx)
    # Two contexts are open: one over all ranks, and one over half of them.
    half = world.Split(world.rank % 2, world.rank)
    with ulysses.Context(world, threads=1) as whole, ulysses.Context(half, threads=1) as subset:
        check(subset, seed=world.rank % 2)
        check(whole)
        check(subset, s=200)
    # The program frees its communicator before the context's first call.
    for callbacks in (False, True):
        own = world.Dup()
        with ulysses.Context(own, threads=1, callbacks=callbacks) as ctx:
            own.Free()
            check(ctx)
    if world.size > 1:
        second = world.Create_group(world.group.Incl([1]))  # without rank 0
        if world.rank == 1:
            with ulysses.Context(second, threads=1) as ctx:
                check(ctx)
    world.Barrier()
    return world.rank


def mpi_with_torch():
    from mpi4py import MPI

    with ulysses.Context(MPI.COMM_WORLD, threads=1) as ctx:
        check_projections(ctx)
    return MPI.COMM_WORLD.rank


def world():
    """MPI without mpi4py: the library initializes and finalizes it."""
    with ulysses.Context.world(threads=1) as ctx:
        check(ctx)  # the library implements the communicator
        data = bytes(range(100 * ctx.rank, 100 * ctx.rank + 61))
        every = bytearray(61 * ctx.size)
        ctx.communicator.allgather(memoryview(data), memoryview(every))
        assert (
            bytes(every)
            == ctx.communicator._allgather_by_sums(data)
            == b"".join(bytes(range(100 * r, 100 * r + 61)) for r in range(ctx.size))
        )  # the allgather of a context on a GPU
        return ctx.rank


def torch_gloo():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    with ulysses.Context.torch(threads=1) as ctx:
        check(ctx)
        check_projections(ctx)
    pair = dist.new_group([0, 1], backend="gloo")
    with ulysses.Context(pair, threads=1) as ctx:
        check(ctx)
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rank


if __name__ == "__main__":
    modes = {"mpi": mpi, "world": world, "torch": torch_gloo, "mpi_torch": mpi_with_torch}
    rank = modes[sys.argv[1]]()
    print(f"rank {rank} ok", flush=True)
