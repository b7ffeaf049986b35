"""Attention over a sequence that is sharded over ranks: NumPy, forward and backward.

python attention_numpy.py                      one process
mpirun -n 4 python attention_numpy.py          four ranks, with mpi4py
mpirun -n 4 python attention_numpy.py 3        a communicator of three of the four ranks

Each rank compares its first token with plain attention in float64, and prints the error.
"""

import sys

import numpy as np
import ulysses

try:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD if MPI.COMM_WORLD.size > 1 else None
    if comm and len(sys.argv) > 1:  # any communicator works
        comm = comm.Split(0 if comm.rank < int(sys.argv[1]) else MPI.UNDEFINED)
        if comm == MPI.COMM_NULL:
            sys.exit()
except ImportError:
    comm = None

# Tokens, query heads, key heads and features of a head. Tokens and heads need not be multiples of
# the number of ranks.
S, H, HKV, D = 1001, 8, 2, 32

with ulysses.Context(comm) as ctx:
    # Every rank draws the whole sequence and uses its shard. Real programs load only the shard.
    rng = np.random.default_rng(0)
    whole = [rng.standard_normal((1, S, h, D), np.float32) for h in (H, HKV, HKV, H)]
    lo, hi = ulysses.shard_rows(S, ctx.size, ctx.rank)
    q, k, v, dout = (x[:, lo:hi] for x in whole)

    out, _, call = ulysses.attention_forward(q, k, v, causal=True, seq=S, context=ctx)
    dq, dk, dv = ulysses.attention_backward(call, dout)

    # Plain attention of the rank's first token, in float64.
    i = lo
    keys, values = (np.repeat(x[0, : i + 1], H // HKV, 1).astype(np.float64) for x in whole[1:3])
    score = np.einsum("hd,jhd->hj", whole[0][0, i], keys) / D**0.5
    weight = np.exp(score - score.max(1, keepdims=True))
    want = np.einsum("hj,jhd->hd", weight / weight.sum(1, keepdims=True), values)
    error = abs(out[0, 0] - want).max()
    print(
        f"rank {ctx.rank} of {ctx.size}: tokens {lo} to {hi}, error {error:.1e}, "
        f"|dq| {np.linalg.norm(dq):.4f}",
        flush=True,
    )
    assert error < 1e-5 and np.isfinite(dk).all() and np.isfinite(dv).all()
