"""Attention with all options by its definition, in PyTorch and in the dtype of its arguments."""

from __future__ import annotations

import torch
import ulysses


def visible(s, *, causal=False, window=None, cu=None, b=1):
    """Returns [b, 1, s, s], true where a query sees a key. cu are the starts of documents."""
    i, j = torch.arange(s)[:, None], torch.arange(s)[None]
    see = torch.ones(s, s, dtype=torch.bool)
    if causal:
        see &= j <= i
    if window is not None:
        left, right = window
        see &= (j >= i - left) if left >= 0 else see
        see &= (j <= i + right) if right >= 0 else see
    see = see.expand(b, 1, s, s)
    if cu is not None:
        starts = torch.zeros(b * s, dtype=torch.long)
        starts[list(cu[:-1])] = 1
        document = starts.cumsum(0).reshape(b, s)
        see = see & (document[:, None, :, None] == document[:, None, None, :])
    return see


def attend(
    q, k, v, *, see=None, scale=None, softcap=0.0, sinks=None, alibi=None, mask=None, kept=None, p=0
):
    """Returns attention of whole sequences, [B, S, H, Dv].

    see is the result of `visible`, mask is [H or 1, S, S], true for keys that a block mask shows,
    and kept is [B, H, S, S], true for weights that a dropout of probability p keeps.
    """
    b, s, h, d = q.shape
    k, v = (x.repeat_interleave(h // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (d**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi is not None:
        distance = torch.arange(s)[None] - torch.arange(s)[:, None]
        scores = scores + alibi[:, None, None] * distance
    see = torch.ones(b, 1, s, s, dtype=torch.bool) if see is None else see
    see = see if mask is None else see & mask
    scores = scores.masked_fill(~see, -1e30)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(b, h, s, 1)), -1)
    weights = torch.softmax(scores, -1)[..., :s] * see
    if kept is not None:
        weights = weights * kept / (1 - p)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def kept_by_dropout(b, s, h, *, dropout, seed):
    """Returns [b, h, s, s], true for the weights that dropout keeps: a function of the seed.

    All scores are 0 and the value of key j is unit vector j, so that the output is the weights.
    """
    q, v = torch.zeros(b, s, h, 1), torch.eye(s)[None, :, None].expand(b, s, h, s)
    with ulysses.Context(threads=1) as ctx:
        out = ulysses.attention(q, q, v, dropout=dropout, seed=seed, context=ctx)
    return out.transpose(1, 2) > 0


def expanded(mask, block, s):
    """Returns a block mask as [H or 1, s, s], true where a query sees a key."""
    return mask.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :s, :s].bool()
