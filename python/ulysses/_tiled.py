"""The autograd function of tiled compute. Imports PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ._torch import once
from .errors import InvalidArgument


@dataclass(frozen=True)
class Run:
    """The state in which a function runs, for a second run that differentiates it.

    Attributes:
        autocast: (device type, enabled, dtype) of each device
        rng: the states of the random number generators; None = the second run draws other numbers
    """

    autocast: tuple[Any, ...]
    rng: Any

    @classmethod
    def of(cls, values: Sequence[Any], preserve_rng: bool = True) -> Run:
        """Returns the state before a run with these arguments."""
        devices = {v.device.type for v in values if isinstance(v, torch.Tensor)}
        autocast = (
            (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in sorted(devices)
        )
        return cls(tuple(autocast), _rng_state(values) if preserve_rng else None)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restores the state inside a with statement, and records a graph."""
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype in self.autocast:
                # Without the cache of autocast: it may have a weight that was converted in another
                # run, whose graph is not that of this one.
                stack.enter_context(
                    torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)
                )
            if self.rng is not None:
                gpus = [d for d, _ in self.rng[1]]
                stack.enter_context(torch.random.fork_rng(devices=gpus))
                _set_rng_state(self.rng)
            stack.enter_context(torch.enable_grad())
            yield


@dataclass
class TiledFunction:
    """A function, its tiles, and what forward records for backward.

    Attributes:
        fn, dim, out_dim, reduction, preserve_rng: as in `tiled_compute`
        tiled: for each input, whether fn receives a tile of it
        tiles: the ranges [lo, hi) of rows
        runs: the state before each tile
    """

    fn: Callable[..., Any]
    tiled: tuple[bool, ...]
    tiles: list[tuple[int, int]]
    dim: int
    out_dim: int
    reduction: str
    preserve_rng: bool
    runs: list[Run] = field(default_factory=list)

    def arguments(self, values: Sequence[Any], lo: int, hi: int) -> list[Any]:
        """Returns the arguments of fn for the tile [lo, hi)."""
        return [v.narrow(self.dim, lo, hi - lo) if t else v for v, t in zip(values, self.tiled)]

    def result(self, out: Any) -> tuple[torch.Tensor, Any]:
        """Returns the result of fn as (tensor, count or None).

        Raises InvalidArgument if it does not fit the reduction.
        """
        want = "one tensor"
        if self.reduction == "concatenate" and isinstance(out, torch.Tensor):
            if -out.ndim <= self.out_dim < out.ndim:
                return out, None
            want = f"a tensor with axis {self.out_dim}, or give another out_dim"
        if self.reduction == "sum":
            if isinstance(out, torch.Tensor) and out.numel() == 1:
                return out.reshape(()), None
            want = "a scalar tensor"
        if self.reduction == "mean":
            if isinstance(out, (tuple, list)) and len(out) == 2:
                total, count = out
                if isinstance(total, torch.Tensor) and total.numel() == 1:
                    return total.reshape(()), count
            want = "(sum, count), where sum is a scalar tensor"
        shape = f" of shape {tuple(out.shape)}" if isinstance(out, torch.Tensor) else ""
        raise InvalidArgument(
            f"ulysses.tiled_compute: reduction {self.reduction!r}: the function returned a "
            f"{type(out).__name__}{shape}; return {want}"
        )

    def forward(self, values: Sequence[Any]) -> tuple[torch.Tensor, list[int], Any]:
        """Runs all tiles without a graph.

        Returns the joined result, the extent of each tile's result on out_dim, and the total count.
        """
        results, extents, count = [], [], 0
        self.runs = []
        with torch.no_grad():
            for lo, hi in self.tiles:
                self.runs.append(Run.of(values, self.preserve_rng))
                out, n = self.result(self.fn(*self.arguments(values, lo, hi)))
                if n is not None:
                    count += _whole(n)
                results.append(out)
                extents.append(out.shape[self.out_dim] if self.reduction == "concatenate" else 1)
        if self.reduction == "concatenate":
            joined = torch.cat(results, self.out_dim) if len(results) > 1 else results[0].clone()
            return joined, extents, None
        total = results[0].to(_sum_dtype(results[0], len(results)), copy=True)
        for out in results[1:]:
            total += out
        if self.reduction == "mean":
            total = total / max(count, 1)
        dtype = results[0].dtype
        return (total.to(dtype) if dtype.is_floating_point else total), extents, count


def _whole(count: Any) -> int:
    """Returns the count of a tile. Raises InvalidArgument for a fraction, NaN or Inf."""
    if not float(count).is_integer():
        raise InvalidArgument(
            f"ulysses.tiled_compute: reduction 'mean': the function returned the count "
            f"{float(count)}; return the whole number of rows that count"
        )
    return int(count)


def _sum_dtype(x: torch.Tensor, terms: int) -> torch.dtype:
    """Returns the dtype of a sum over tiles: float16 and bfloat16 would lose small terms."""
    if terms == 1 or not x.dtype.is_floating_point:
        return x.dtype
    return torch.promote_types(x.dtype, torch.float32)


def _rng_state(values: Sequence[Any]) -> tuple[Any, list[tuple[Any, Any]]]:
    """Returns the random number states of the CPU and of the GPUs of the tensors."""
    gpus = sorted({v.device.index for v in values if isinstance(v, torch.Tensor) and v.is_cuda})
    return torch.get_rng_state(), [(d, torch.cuda.get_rng_state(d)) for d in gpus]


def _set_rng_state(rng: tuple[Any, list[tuple[Any, Any]]]) -> None:
    torch.set_rng_state(rng[0])
    for device, state in rng[1]:
        torch.cuda.set_rng_state(state, device)


def first_node() -> int:
    """Returns a number that is below the sequence numbers of autograd nodes made after it."""
    with torch.enable_grad():
        return int(torch.zeros((), requires_grad=True).clone().grad_fn._sequence_nr())


def leaves(out: torch.Tensor, first: int) -> list[torch.Tensor]:
    """Returns the leaf tensors of the graph of `out`, which may itself be one.

    Raises InvalidArgument for a node with a number below `first`, one that is older than the
    function's run. Each tile would compute the gradients of that older graph, and the first tile
    would free it.
    """
    found = [out] if out.is_leaf and out.requires_grad else []
    for node in _graph(out):
        if hasattr(node, "variable"):
            found.append(node.variable)
        elif node._sequence_nr() < first:
            raise InvalidArgument(
                "ulysses.tiled_compute: the function uses a tensor that was computed outside of it "
                f"({node.name()}) and needs a gradient; pass it as an input, wrapped in Whole if "
                "every tile needs all of it"
            )
    return found


def _graph(out: torch.Tensor) -> Iterator[Any]:
    """Returns the nodes of the graph of `out`."""
    seen: set[Any] = set()
    stack = [out.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(f for f, _ in node.next_functions)


_STATISTICS = (
    "computes statistics over the rows, which on a tile are others than on all rows, and each run "
    "of a tile would update its running statistics; call eval() on it, use a norm of each row such "
    "as LayerNorm, or leave it out of the function"
)


def check_modules(owners: Sequence[Any]) -> None:
    """Raises InvalidArgument for modules that normalize by statistics over the rows.

    Args:
        owners: the function and its inputs, some of which may be modules
    """
    for owner in owners:
        if not isinstance(owner, torch.nn.Module):
            continue
        for name, m in owner.named_modules():
            norm = isinstance(m, (_BatchNorm, _InstanceNorm))
            if norm and (m.training or m.running_mean is None):
                raise InvalidArgument(
                    f"ulysses.tiled_compute: {type(m).__name__} {name or 'itself'} {_STATISTICS}"
                )


def _check_graph(out: torch.Tensor) -> None:
    """Does what `check_modules` does for modules that the function finds without an argument."""
    for node in _graph(out):
        if "BatchNorm" in node.name() and getattr(node, "_saved_training", False):
            raise InvalidArgument(
                f"ulysses.tiled_compute: a BatchNorm or InstanceNorm of the function {_STATISTICS}"
            )


def versions(values: Sequence[Any]) -> list[int]:
    """Returns how often each tensor was changed in place; 0 where PyTorch does not count it."""
    return [
        v._version if isinstance(v, torch.Tensor) and not v.is_inference() else 0 for v in values
    ]


def check_unchanged(values: Sequence[Any], before: Sequence[int]) -> None:
    """Raises InvalidArgument if the function has changed an input in place.

    The search for parameters and the backward pass run the function again, and would change the
    input again.
    """
    for i, (v, version, now) in enumerate(zip(values, before, versions(values))):
        if version != now:
            raise InvalidArgument(
                f"ulysses.tiled_compute: the function changed its input {i} of shape "
                f"{tuple(v.shape)} in place, and the backward pass runs it again; make a copy in "
                "the function"
            )


def _detached(args: Sequence[Any]) -> list[Any]:
    """Returns arguments without their graph; tensors that need a gradient become leaves."""
    return [
        a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a
        for a in args
    ]


def parameters_of(function: TiledFunction, values: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the tensors that the function uses, needs gradients of, and does not receive.

    The function runs once on the first row, and the random numbers are restored.
    """
    rng = _rng_state(values)
    lo, hi = function.tiles[0]
    first = first_node()
    with torch.enable_grad():
        args = _detached(function.arguments(values, lo, min(hi, lo + 1)))
        out, _ = function.result(function.fn(*args))
    _set_rng_state(rng)
    _check_graph(out)
    known = {id(a) for a in args}
    return [p for p in leaves(out, first) if id(p) not in known]


class TiledCompute(torch.autograd.Function):
    """Runs a TiledFunction on n values, some of which are no tensors, and on its parameters."""

    @staticmethod
    def forward(ctx: Any, function: TiledFunction, n: int, *tensors: Any) -> torch.Tensor:
        values = tensors[:n]
        out, ctx.extents, ctx.count = function.forward(values)
        ctx.function, ctx.n = function, n
        ctx.is_tensor = [isinstance(t, torch.Tensor) for t in values]
        ctx.others = [None if t else v for v, t in zip(values, ctx.is_tensor)]
        ctx.save_for_backward(*[v for v, t in zip(values, ctx.is_tensor) if t])
        # Parameters are not saved: checkpointing and offloading return copies of saved tensors, but
        # the function uses the parameters themselves.
        ctx.params, ctx.versions = tensors[n:], [p._version for p in tensors[n:]]
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        with torch.no_grad():
            grads = TiledCompute.gradients(ctx, dout)
        return once((None, None, *grads))

    @staticmethod
    def gradients(ctx: Any, dout: torch.Tensor) -> list[Any]:
        """Returns the gradients of the values and of the parameters; None = not wanted."""
        function: TiledFunction = ctx.function
        saved, params = iter(ctx.saved_tensors), ctx.params
        values = [next(saved) if t else o for t, o in zip(ctx.is_tensor, ctx.others)]
        changed = [
            tuple(p.shape) for p, version in zip(params, ctx.versions) if p._version != version
        ]
        if changed:
            raise InvalidArgument(
                f"ulysses.tiled_compute: parameters of shapes {changed} were changed in place "
                "between forward and backward; call backward before the optimizer's step"
            )
        needed = ctx.needs_input_grad[2:]
        tensors = (*values, *params)
        grads: list[Any] = [None] * len(tensors)
        for i, (t, need) in enumerate(zip(tensors, needed)):
            if need:
                whole = i >= ctx.n or not function.tiled[i]
                dtype = _sum_dtype(t, len(function.tiles)) if whole else t.dtype
                grads[i] = torch.zeros_like(t, dtype=dtype)
        if function.reduction == "mean":
            dout = dout / max(ctx.count, 1)  # not in place: dout belongs to the caller
        at = 0
        for i, (lo, hi) in enumerate(function.tiles):
            first = first_node()
            with function.runs[i].again():
                args = []
                for v, need in zip(function.arguments(values, lo, hi), needed):
                    args.append(
                        v.detach().requires_grad_(need) if isinstance(v, torch.Tensor) else v
                    )
                out, _ = function.result(function.fn(*args))
            dtile = dout
            if function.reduction == "concatenate":
                dtile = dout.narrow(function.out_dim, at, ctx.extents[i])
                at += ctx.extents[i]
            if not out.requires_grad:  # grad_fn is also None if fn returns its argument
                continue
            _check_leaves(out, first, args, params)
            targets = [(j, t) for j, t in enumerate((*args, *params)) if needed[j]]
            tile_grads = torch.autograd.grad(out, [t for _, t in targets], dtile, allow_unused=True)
            for (j, _), g in zip(targets, tile_grads):
                if g is None:
                    continue
                if j < ctx.n and function.tiled[j]:
                    grads[j].narrow(function.dim, lo, hi - lo).copy_(g)
                else:
                    grads[j] += g
        return [None if g is None else g.to(t.dtype) for g, t in zip(grads, tensors)]


def _check_leaves(
    out: torch.Tensor, first: int, args: Sequence[Any], params: Sequence[torch.Tensor]
) -> None:
    """Raises InvalidArgument if a leaf of the graph of `out` is no argument and no parameter."""
    known = {id(t) for t in (*args, *params)}
    others = [tuple(t.shape) for t in leaves(out, first) if id(t) not in known]
    if others:
        raise InvalidArgument(
            f"ulysses.tiled_compute: the function uses tensors of shapes {others} that need a "
            "gradient and are neither inputs nor params; list them in params="
        )
