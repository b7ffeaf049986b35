"""Sequence-parallel groups over torch.distributed, as DeepSpeed's engine asks for them.

Ranks of a sequence are consecutive: with sequence_parallel_size P, rank r belongs to the sequence
group of the ranks from r // P * P on. The groups of one size are made once in a process, and
several sizes may be in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .context import Context
from .errors import InvalidArgument


@dataclass(frozen=True)
class ParallelState:
    """The groups of a rank, with the methods of DeepSpeed's mpu object.

    Pass it as `mpu` to deepspeed.initialize.

    Attributes:
        context: the ranks of this rank's sequence, for calls of this package
        sequence_group: the torch.distributed group of the same ranks, of the default backend
        world_group: the group over which gradients are reduced: all ranks, sequence and data
    """

    context: Context
    sequence_group: Any
    world_group: Any

    def get_sequence_parallel_group(self) -> Any:
        return self.sequence_group

    def get_sequence_parallel_world_size(self) -> int:
        return self.context.size

    def get_sequence_parallel_rank(self) -> int:
        return self.context.rank

    def get_sequence_data_parallel_group(self) -> Any:
        return self.world_group

    def get_sequence_data_parallel_world_size(self) -> int:
        import torch.distributed as dist

        return dist.get_world_size(self.world_group)

    def get_sequence_data_parallel_rank(self) -> int:
        import torch.distributed as dist

        return dist.get_rank(self.world_group)


def sequence_groups(size: int) -> ParallelState:
    """Returns the groups of `size` consecutive ranks of torch.distributed.

    Collective over all ranks, in the first call with this size after init_process_group. Later
    calls return the same groups.

    Args:
        size (int): ranks of a sequence group, a divisor of the number of ranks

    Raises:
        InvalidArgument: size is wrong, or torch.distributed is not initialized

    Example::

        >>> state = ulysses.sequence_groups(4)
        >>> ulysses.use(state.context)
    """
    check_size("ulysses.sequence_groups", size)
    return parallel_state(size)


_states: dict[int, ParallelState] = {}  # by sequence_parallel_size


def check_size(operation: str, size: int) -> None:
    """Raises InvalidArgument if no groups of `size` ranks can be made. Not collective."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidArgument(
            f"{operation}: sequence_parallel_size is {size} and torch.distributed is not "
            "initialized; call torch.distributed.init_process_group before"
        )
    world = dist.get_world_size()
    if size < 1 or world % size:
        raise InvalidArgument(
            f"{operation}: sequence_parallel_size is {size} and torch.distributed has {world} "
            f"ranks; give a divisor of {world}"
        )


def parallel_state(size: int) -> ParallelState:
    """Returns the groups of `size` consecutive ranks. Collective over all ranks of the process
    group, in the first call with this size.

    Tensors of the group's context are on the GPU if the default backend is NCCL, else on the CPU.
    """
    import torch.distributed as dist

    state = _states.get(size)
    # Another world: the process group was destroyed, and another one was initialized.
    if state and state.world_group is dist.group.WORLD and not state.context.closed:
        return state
    backend = str(dist.get_backend())
    on_gpu, rank, found = "nccl" in backend, dist.get_rank(), None
    for first in range(0, dist.get_world_size(), size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks)
        host = dist.new_group(ranks, backend="gloo") if on_gpu else group
        if rank in ranks:
            found = group, host
    assert found is not None
    context = Context.torch(found[1], device="cuda" if on_gpu else "cpu")
    _states[size] = ParallelState(context, found[0], dist.group.WORLD)
    return _states[size]
