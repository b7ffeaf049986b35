"""Attention by its definition in float64 NumPy, and the measure of errors of the tests."""

import numpy as np

TOLERANCE = 2e-5  # of float32 results, relative to the largest value of a tensor


def draw(seed, *shape):
    """Returns normally distributed float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def mask(sq, sk, causal=False, window=None, cu=None, kv_cu=None):
    """Returns [sq, sk], true where a query sees a key.

    cu and kv_cu are the documents of queries and keys. The last query of a document is aligned with
    its last key.
    """
    cu = [0, sq] if cu is None else cu
    kv_cu = ([0, sk] if sq != sk or cu == [0, sq] else cu) if kv_cu is None else kv_cu
    see = np.zeros((sq, sk), bool)
    for (a, b), (c, d) in zip(zip(cu, cu[1:]), zip(kv_cu, kv_cu[1:])):
        i, j = np.arange(b - a)[:, None] + (d - c) - (b - a), np.arange(d - c)[None]
        ok = np.ones((b - a, d - c), bool)
        if causal:
            ok &= j <= i
        if window is not None:
            left, right = window
            ok &= (j >= i - left) if left >= 0 else True
            ok &= (j <= i + right) if right >= 0 else True
        see[a:b, c:d] = ok
    return see


def attention(q, k, v, dout=None, scale=None, see=None):
    """Returns (out, lse), or (out, lse, dq, dk, dv) if dout is given.

    q [B, S, H, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv]; see is a mask [S, Sk].
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kh, vh = np.repeat(k, group, 2), np.repeat(v, group, 2)
    s = np.einsum("bihd,bjhd->bhij", q, kh) * scale
    if see is not None:
        s = np.where(see, s, -np.inf)
    top = s.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    e = np.exp(s - top)
    total = e.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0].transpose(0, 2, 1)
    p = e / np.where(total == 0, 1, total)
    out = np.einsum("bhij,bjhd->bihd", p, vh)
    if dout is None:
        return out, lse
    dout = np.asarray(dout, np.float64)
    dp = np.einsum("bihd,bjhd->bhij", dout, vh)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
    dq = np.einsum("bhij,bjhd->bihd", ds, kh)
    dk, dv = np.einsum("bhij,bihd->bjhd", ds, q), np.einsum("bhij,bihd->bjhd", p, dout)

    def fold(x):
        return x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3)

    return out, lse, dq, fold(dk), fold(dv)


def mix(x):
    """Returns the function of SplitMix64 (Steele et al. 2014) of uint64 numbers."""
    with np.errstate(over="ignore"):
        x = np.asarray(x, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return x ^ x >> np.uint64(31)


def keeps(p, seed, tokens, features):
    """Returns [tokens, features], true where dropout keeps an element.

    seed is 64 random bits, tokens are the numbers of tokens.
    """
    with np.errstate(over="ignore"):
        token = mix(mix(seed) + np.asarray(tokens, np.uint64))[:, None]
        feature = mix(~np.uint64(seed) + np.arange(features, dtype=np.uint64))[None]
        x = (token ^ feature).astype(np.uint32) * ((token >> np.uint64(32)).astype(np.uint32) | 1)
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x7FEB352D)
        x ^= x >> np.uint32(15)
        x *= np.uint32(0x846CA68B)
        x ^= x >> np.uint32(16)
    return x >> np.uint32(8) >= np.uint32(np.rint(p * 2**24))


def error(found, want):
    """Returns max|found - want| / max|want|. It is infinite if a value is NaN."""
    found, want = np.asarray(found, np.float64), np.asarray(want, np.float64)
    assert found.shape == want.shape, (found.shape, want.shape)
    if not want.size:
        return 0.0
    e = np.abs(found - want).max() / max(np.abs(want).max(), 1e-30)
    return float("inf") if np.isnan(e) else float(e)


def per_head(found, want):
    """Returns the largest error of a head, relative to the value of this head."""
    return max(error(a, b) for a, b in zip(found.reshape(-1, 1), want.reshape(-1, 1)))
