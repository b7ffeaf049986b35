"""The walk over tiles and its autograd function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch.autograd.function import once_differentiable

from .errors import InvalidArgument


@dataclass
class Walk:
    """A function and its tiles."""

    fn: Callable[..., Any]
    cut: tuple[bool, ...]
    tiles: list[tuple[int, int]]
    dim: int
    out_dim: int
    reduction: str
    preserve_rng: bool
    seeds: list[Any] = field(default_factory=list)  # state of the random numbers before each tile
    autocast: tuple[Any, ...] = ()

    def arguments(self, values: Sequence[Any], lo: int, hi: int) -> list[Any]:
        return [v.narrow(self.dim, lo, hi - lo) if c else v for v, c in zip(values, self.cut)]

    def result(self, out: Any) -> tuple[torch.Tensor, Any]:
        """What fn returned as (tensor, count or None), checked against the reduction."""
        if self.reduction == "mean":
            if not (
                isinstance(out, (tuple, list))
                and len(out) == 2
                and isinstance(out[0], torch.Tensor)
                and out[0].numel() == 1
            ):
                raise InvalidArgument(
                    "ulysses.tiled_compute: reduction 'mean': the function must return (sum, count), the sum a scalar tensor"
                )
            return out[0].reshape(()), out[1]
        if not isinstance(out, torch.Tensor) or (self.reduction == "sum" and out.numel() != 1):
            what = "a scalar tensor" if self.reduction == "sum" else "one tensor"
            raise InvalidArgument(
                f"ulysses.tiled_compute: reduction '{self.reduction}': the function must return {what}"
            )
        return (out.reshape(()) if self.reduction == "sum" else out), None

    def forward(self, values: Sequence[Any]) -> tuple[torch.Tensor, list[int], Any]:
        """The result, the extent of each tile's result along out_dim, and the total count. No graph is kept."""
        parts, extents, count = [], [], 0
        self.seeds = []
        devices = {v.device.type for v in values if isinstance(v, torch.Tensor)}
        self.autocast = tuple(
            (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in sorted(devices)
        )
        with torch.no_grad():
            for lo, hi in self.tiles:
                if self.preserve_rng:
                    self.seeds.append(_random_state(values))
                part, n = self.result(self.fn(*self.arguments(values, lo, hi)))
                if n is not None:
                    count = count + int(n)
                parts.append(part)
                extents.append(part.shape[self.out_dim] if self.reduction == "concatenate" else 1)
        if self.reduction == "concatenate":
            return (
                torch.cat(parts, self.out_dim) if len(parts) > 1 else parts[0].clone(),
                extents,
                None,
            )
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return (total / max(count, 1) if self.reduction == "mean" else total), extents, count

    @contextlib.contextmanager
    def again(self, i: int, values: Sequence[Any]) -> Iterator[None]:
        """The surroundings of tile i's first run."""
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            if self.preserve_rng:
                cuda = [d for d, _ in self.seeds[i][1]]
                stack.enter_context(torch.random.fork_rng(devices=cuda))
                torch.set_rng_state(self.seeds[i][0])
                for d, state in self.seeds[i][1]:
                    torch.cuda.set_rng_state(state, d)
            stack.enter_context(torch.enable_grad())
            yield


def _random_state(values: Sequence[Any]) -> tuple[Any, list[tuple[Any, Any]]]:
    cuda = sorted({v.device.index for v in values if isinstance(v, torch.Tensor) and v.is_cuda})
    return torch.get_rng_state(), [(d, torch.cuda.get_rng_state(d)) for d in cuda]


def begin() -> int:
    """Before a run of the function: nodes of this thread's graphs have lower numbers than those that it will make."""
    with torch.enable_grad():
        return int(torch.zeros((), requires_grad=True).clone().grad_fn._sequence_nr())


def leaves(out: torch.Tensor, begun: int) -> list[torch.Tensor]:
    """The tensors at the ends of the graph that the function made. It must not go on into one that was there before: every tile would go back through
    all of that, and the first one ends it."""
    seen: set[Any] = set()
    found: list[torch.Tensor] = []
    stack = [out.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        elif node._sequence_nr() < begun:
            raise InvalidArgument(
                f"ulysses.tiled_compute: the function uses a tensor that was computed outside of it ({node.name()}) and needs a gradient: pass it as "
                "an input, in Whole where every tile needs all of it"
            )
        stack.extend(f for f, _ in node.next_functions)
    return found


def _alone(args: Sequence[Any]) -> list[Any]:
    """Arguments cut off from any graph, with a gradient of their own where they had one."""
    return [
        a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a
        for a in args
    ]


def captured(walk: Walk, values: Sequence[Any]) -> list[torch.Tensor]:
    """Parameters that the function uses without having been given them: the first tile is run once more to see, and forgotten."""
    rng = _random_state(values)
    lo, hi = walk.tiles[0]
    begun = begin()
    with torch.enable_grad():
        args = _alone(walk.arguments(values, lo, min(hi, lo + 1)))
        out, _ = walk.result(walk.fn(*args))
    torch.set_rng_state(rng[0])
    for device, state in rng[1]:
        torch.cuda.set_rng_state(state, device)
    if out.grad_fn is None:
        return []
    own = {id(a) for a in args}
    return [p for p in leaves(out, begun) if id(p) not in own]


class TiledCompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, walk: Walk, n: int, *tensors: Any) -> torch.Tensor:
        values = tensors[:n]
        out, ctx.extents, ctx.count = walk.forward(values)
        ctx.walk, ctx.n = walk, n
        ctx.is_tensor = [isinstance(t, torch.Tensor) for t in values]
        ctx.others = [None if t else v for v, t in zip(values, ctx.is_tensor)]
        ctx.save_for_backward(*[v for v, t in zip(values, ctx.is_tensor) if t])
        # Not saved: checkpoints and offloading give copies of what is, and the function uses the parameters themselves.
        ctx.params, ctx.versions = tensors[n:], [p._version for p in tensors[n:]]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        walk: Walk = ctx.walk
        saved = iter(ctx.saved_tensors)
        values, params = (
            [next(saved) if t else o for t, o in zip(ctx.is_tensor, ctx.others)],
            ctx.params,
        )
        changed = [
            tuple(p.shape) for p, version in zip(params, ctx.versions) if p._version != version
        ]
        if changed:
            raise InvalidArgument(
                f"ulysses.tiled_compute: parameters of shapes {changed} were changed in place between forward and backward: go backward before the step"
            )
        needed = ctx.needs_input_grad[2:]
        grads: list[Any] = [
            torch.zeros_like(t) if need else None for t, need in zip((*values, *params), needed)
        ]
        if walk.reduction == "mean":
            dout = dout / max(ctx.count, 1)  # a new tensor: the incoming gradient is the caller's
        at = 0
        for i, (lo, hi) in enumerate(walk.tiles):
            begun = begin()
            with walk.again(i, values):
                args = []
                for v, need, cut in zip(values, needed, walk.cut):
                    if isinstance(v, torch.Tensor):
                        v = (
                            (v.narrow(walk.dim, lo, hi - lo) if cut else v)
                            .detach()
                            .requires_grad_(need)
                        )
                    args.append(v)
                part, _ = walk.result(walk.fn(*args))
            share = dout
            if walk.reduction == "concatenate":
                share = dout.narrow(walk.out_dim, at, ctx.extents[i])
                at += ctx.extents[i]
            if part.grad_fn is None:
                continue
            _refuse_strangers(part, begun, args, params)
            wanted = [(j, a) for j, a in enumerate(args) if needed[j]] + [
                (ctx.n + j, p) for j, p in enumerate(params) if needed[ctx.n + j]
            ]
            for (j, _), g in zip(
                wanted, torch.autograd.grad(part, [t for _, t in wanted], share, allow_unused=True)
            ):
                if g is None:
                    continue
                if j < ctx.n and walk.cut[j]:
                    grads[j].narrow(walk.dim, lo, hi - lo).copy_(g)
                else:
                    grads[j] += g
        return None, None, *grads


def _refuse_strangers(
    part: torch.Tensor, begun: int, args: Sequence[Any], params: Sequence[torch.Tensor]
) -> None:
    known = {id(t) for t in (*args, *params)}
    lost = [tuple(t.shape) for t in leaves(part, begun) if id(t) not in known]
    if lost:
        raise InvalidArgument(
            f"ulysses.tiled_compute: the function uses tensors of shapes {lost} that need a gradient and are neither inputs nor params: "
            "list them in params="
        )
