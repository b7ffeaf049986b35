"""Contexts: one rank of one sequence-parallel group, with its plans and batches."""

from __future__ import annotations

import collections
import ctypes
import weakref
from typing import Any, Callable

from . import _library, _struct
from ._arguments import context_options, plan_options, sequences_of
from ._calls import Calls
from .agreement import agree, flag
from .communicator import MPI, Alone, Communicator, TorchGroup, communicator
from .errors import InvalidArgument, Unsupported
from .layout import Layout
from .library_ranks import LibraryRanks
from .plan import AttentionOptions, Batch, DeltaOptions, DeltaPlan, Plan
from .sequences import Sequences

# Plans, and batches, that a context keeps. A plan of the gated delta rule is one of a number of
# tokens. KEPT is the same on all ranks, because making a plan or a batch is collective.
KEPT = 64
_current: Context | None = None


class Context:
    """One rank of one sequence-parallel group, on one device.

    Collective: all ranks of `comm` make the context and close it.

    Args:
        comm: the ranks. None = one rank; an mpi4py communicator, which is duplicated, so that the
            program may use and free its own; a torch.distributed process group with gloo; or a
            `Communicator`. Default: None
        device (str): "cpu" or "cuda". Default: "cpu"
        ordinal (int, optional): index of the GPU. Default: PyTorch's current GPU if the program has
            imported PyTorch, else 0
        way (str): the transport of tensors in GPU memory. "auto", "host" (staged through host
            memory), "nccl" or "ipc" (CUDA IPC between processes of one machine). Default: "auto"
        threads (int): threads of the CPU kernels; 0 = the cores that this process may use.
            Default: 0
        ulysses (int), ring (int): the mesh: ring groups of ulysses ranks, whose product is the
            number of ranks. Attention divides heads over the ranks of a group, and rows over the
            groups. 0 = a ring of 1, and all other ranks in a group. Default: 0
        zigzag (bool): with a ring, each rank holds two ranges of a sequence, such that the groups
            have the same work under a causal mask without moving rows before attention. `shard`,
            `loader` and `local_tokens` make this order, `gather_tokens` restores the sequence.
            `halo` and the gated delta rule need tokens in order, and refuse it. Default: False
        gather_keys (bool): with a ring, keys and values move between groups in one all-to-all at
            the start of attention, and not in a step for each group while the step before computes.
            It needs memory for all keys that a rank sees. Default: False
        timeout (int): seconds until a late rank is an error; 0 = no limit other than the
            communicator's. Other values are not implemented. Default: 0
        callbacks (bool): use an mpi4py communicator through callbacks. Necessary if mpi4py uses an
            MPI library that libulysses.so was not built for. Default: False
        log (callable, optional): log(level, line) receives the log lines of the library

    Attributes:
        rank, size: index of this rank, and number of ranks
        ulysses, ring: the mesh that was chosen
        layout: the `Layout`: which tokens of a sequence each rank holds
        gather_keys: the default of plans for attention
        device, ordinal: "cpu" or "cuda", and the index of the GPU
        communicator: the `Communicator` over the ranks
        sequences: the lengths and documents that `use` has set, or None
        agreed: number of calls on which the ranks have agreed, equal on all ranks

    Raises:
        InvalidArgument: a wrong argument
        Unsupported: an option is not implemented; the message names it
        CommError: the communicator failed
        DeviceError: libulysses.so, the CUDA plug-in or the GPU was not found

    Only one thread at a time may call with a context. A forked child must not call.

    Example::

        >>> with ulysses.Context(MPI.COMM_WORLD) as ctx:
        ...     out = ulysses.attention(q, k, v, causal=True, seq=4096, context=ctx)
    """

    def __init__(
        self,
        comm: Any = None,
        *,
        device: str | None = "cpu",
        ordinal: int | None = None,
        way: str = "auto",
        threads: int = 0,
        ulysses: int = 0,
        ring: int = 0,
        zigzag: bool = False,
        gather_keys: bool = False,
        timeout: int = 0,
        callbacks: bool = False,
        log: Callable[[int, str], None] | None = None,
    ):
        self._handle = ctypes.c_void_p()
        self.communicator: Communicator = communicator(comm)

        def prepare() -> tuple[dict[str, Any], tuple[int, ...], _struct.Options]:
            same = dict(ulysses=ulysses, ring=ring, timeout=timeout)
            options = context_options(device, ordinal, way, threads, log, **same)
            order = {
                "zigzag": flag("ulysses.Context", "zigzag", zigzag),
                "gather_keys": flag("ulysses.Context", "gather_keys", gather_keys),
            }
            return {"device": device, "way": way, **same, **order}, (), options

        # MPI_COMM_WORLD without mpi4py: its communicator exists only after the library has made the
        # context, so the ranks cannot agree before.
        options = (
            prepare()[2]
            if isinstance(comm, _World)
            else agree(self.communicator, "ulysses.Context", prepare)[0]
        )
        self._lock = Calls()
        self.agreed = 0
        # The exception of a callback, which becomes the cause of the call's exception.
        self._failure: BaseException | None = None
        self._plans: collections.OrderedDict[Any, Any] = collections.OrderedDict()  # by options
        self._batches: collections.OrderedDict[Sequences, Batch] = collections.OrderedDict()
        self._pending: dict[int, Any] = {}  # the memory of requests in progress
        self._owned: weakref.WeakSet = weakref.WeakSet()  # plans and batches, closed by `close`
        self.sequences: Sequences | None = None
        self._keep: list[Any] = [options]  # what the library points to
        if log is not None:
            options.log = _struct.Log(
                lambda user, level, line: log(level, (line or b"").decode(errors="replace"))
            )
        # The messages of the context must not mix with the messages of the program.
        self._duplicate: MPI | None = None
        if isinstance(self.communicator, MPI) and not isinstance(comm, _World):
            self.communicator = self._duplicate = self.communicator.duplicate()
        try:
            self._create(comm, options, callbacks)
        except BaseException:
            self._free_duplicate()
            raise
        info = _struct.ContextInfo()
        self._call("ulysses_context_query", self._handle, ctypes.byref(info))
        self.rank, self.size = info.rank, info.size
        self.ulysses, self.ring = info.ulysses, info.ring
        self.layout = Layout(info.size, info.ring, zigzag)
        self.gather_keys = bool(gather_keys)
        self.device = "cuda" if info.device == _struct.CUDA else "cpu"
        self.ordinal = info.ordinal

    def _create(self, comm: Any, options: _struct.Options, callbacks: bool) -> None:
        """Makes the library's context. Collective."""
        out = ctypes.byref(self._handle)
        if isinstance(self.communicator, Alone):
            self._call("ulysses_context_create_local", ctypes.byref(options), out)
        elif hasattr(comm, "py2f") and not callbacks:
            self._call("ulysses_context_create_mpi", comm.py2f(), ctypes.byref(options), out)
        else:
            host = self._host_comm()
            self._call(
                "ulysses_context_create_host", ctypes.byref(host), ctypes.byref(options), out
            )

    def _free_duplicate(self) -> None:
        """Frees the context's duplicate of an mpi4py communicator, if there is one. Collective."""
        if self._duplicate is not None:
            self._duplicate.free()
            self._duplicate = None

    @classmethod
    def torch(cls, group: Any = None, **options: Any) -> Context:
        """Returns a context over a torch.distributed process group. Collective.

        Args:
            group: a process group whose backend communicates host memory (gloo). Default: None, the
                default group
            options: keyword arguments of `Context`
        """
        return cls(TorchGroup(group), **options)

    @classmethod
    def world(cls, **options: Any) -> Context:
        """Returns a context over MPI_COMM_WORLD without mpi4py. Collective.

        If MPI is not initialized, the library initializes it, and finalizes it at exit.

        Args:
            options: keyword arguments of `Context`

        Raises:
            InvalidArgument: mpiexec or srun has started several tasks, but MPI has found one rank,
                because they belong to different MPI libraries
        """
        self = cls.__new__(cls)
        Context.__init__(self, _World(), **options)
        self.communicator = LibraryRanks(self) if self.size > 1 else Alone()
        return self

    def _host_comm(self) -> _struct.HostComm:
        """Returns the callbacks by which the library calls the communicator."""
        comm = self.communicator

        def guarded(f: Callable[..., None]) -> Callable[..., int]:
            def run(*args: Any) -> int:
                try:
                    f(*args)
                    return 0
                except BaseException as e:  # an exception must not pass through C
                    self._failure = e
                    return 1

            return run

        def allgather(user: int, send: int, receive: int, n: int) -> None:
            comm.allgather(_memory(send, n), _memory(receive, n * comm.size))

        def alltoallv(
            user: int, send: int, send_bytes: Any, receive: int, receive_bytes: Any
        ) -> None:
            sends, receives = send_bytes[: comm.size], receive_bytes[: comm.size]
            comm.alltoallv(
                _memory(send, sum(sends)), sends, _memory(receive, sum(receives)), receives
            )

        host = _struct.HostComm(
            rank=comm.rank,
            size=comm.size,
            allgather=_struct.Allgather(guarded(allgather)),
            alltoallv=_struct.Alltoallv(guarded(alltoallv)),
        )
        self._keep.append(host)
        return host

    def _call(self, name: str, *args: Any) -> None:
        """Calls a function of the library that returns a status. Raises UlyssesError."""
        with self._lock:
            self._failure = None
            try:
                _library.call(name, *args)
            except Exception as e:
                if self._failure is not None:
                    raise e from self._failure
                raise

    def _hold(self, memory: Any) -> None:
        """Keeps the memory of a request in progress until `_release`.

        MPI may access the memory until MPI_Finalize. The additional reference keeps it even if the
        context is deleted, or the interpreter ends, before `_release`.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        self._pending[id(memory)] = memory

    def _release(self, memory: Any) -> None:
        """Ends what `_hold` began. Later calls do nothing."""
        if self._pending.pop(id(memory), None) is not None:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(memory))

    @property
    def handle(self) -> ctypes.c_void_p:
        """The library's handle. Raises InvalidArgument if the context is closed."""
        if not self._handle:
            raise InvalidArgument("ulysses.Context: the context is closed; make another context")
        return self._handle

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return not self._handle

    def plan(self, **options: Any) -> Plan:
        """Returns the plan for one kind of attention layer. Collective.

        The first call with these options makes the plan. The context keeps the 64 plans that were
        used last.

        Args:
            heads (int), kv_heads (int): query heads and key heads; kv_heads 0 = heads. Default: 0
            head_dim (int), v_dim (int): features of a key and of a value; v_dim 0 = head_dim.
                Default: 0
            dtype (int): a type number of ulysses._struct. Default: F32
            causal, window, scale: as in `attention`
            cross (bool): queries and keys have different lengths. Default: False
            softcap (float), dropout (float): as in `attention`. Default: 0
            sinks (bool), alibi (bool): calls have sinks, slopes. Default: False
            block (tuple of int, optional): as in `attention`. Default: None
            deterministic (bool): gradients are bitwise reproducible on a GPU. Default: False
            gather_keys (bool): as in `Context`. Default: the context's
            overlap (bool): as in `attention_layer`. Default: False

        Raises:
            InvalidArgument: the options are wrong, or differ between ranks
            Unsupported: no kernel has these options; the message names them
        """
        numbers = ("heads", "kv_heads", "head_dim", "v_dim", "dtype")
        return self._plan(**self._agree_on("ulysses.Context.plan", options, numbers))

    def delta_plan(self, **options: Any) -> DeltaPlan:
        """Returns the plan for one kind of gated delta rule layer. Collective.

        The first call with these options makes the plan. The context keeps the 64 plans that were
        used last.

        Args:
            qk_heads (int), v_heads (int): key heads and value heads
            qk_dim (int), v_dim (int): features of a key and of a value
            dtype (int): a type number of ulysses._struct. Default: F32
            strategy (str), scale (float, optional): as in `chunk_gated_delta_rule`
            tokens (int): tokens of a batch over all ranks, for which strategy "auto" chooses.
                Default: 0
            l2norm (bool): normalize q and k. Default: False
            chunk (int): tokens of a chunk at most; 0 = the device chooses. Default: 0
            states (bool): calls may have initial states and return final states. Default: False
            conv_width (int), gated_norm (bool): of `gated_delta_layer`; conv_width 0 = calls of the
                rule only. Default: 0, False

        Raises:
            InvalidArgument: the options are wrong, or differ between ranks
            Unsupported: no kernel has these options; the message names them
        """
        dims = ("qk_heads", "v_heads", "qk_dim", "v_dim", "dtype", "tokens", "chunk", "conv_width")
        return self._delta_plan(**self._agree_on("ulysses.Context.delta_plan", options, dims))

    def _agree_on(self, operation: str, options: dict[str, Any], numbers: tuple[str, ...]) -> dict:
        """Returns the options of a plan, checked on each rank and equal on all. Collective."""

        def prepare() -> tuple[dict[str, Any], tuple[int, ...], dict[str, Any]]:
            checked = plan_options(operation, options, numbers)
            return checked, (), checked

        return self.agree(operation, prepare)[0]

    def batch(self, sequences: Sequences) -> Batch:
        """Returns the batch for lengths and documents. Collective.

        The context keeps the 64 batches that were used last.

        Args:
            sequences: the lengths and documents, equal on all ranks

        Raises:
            InvalidArgument: the lengths are wrong, or differ between ranks
        """
        operation = "ulysses.Context.batch"
        self.agree(operation, lambda: ({"sequences": sequences_of(operation, sequences)}, (), None))
        return self._batch(sequences)

    # The following three are for calls whose ranks have already agreed on the arguments.

    def _plan(self, **options: Any) -> Plan:
        options = {"gather_keys": self.gather_keys, **options}
        return self._kept(self._plans, Plan, AttentionOptions(**options))

    def _delta_plan(self, **options: Any) -> DeltaPlan:
        return self._kept(self._plans, DeltaPlan, DeltaOptions(**options))

    def _batch(self, sequences: Sequences) -> Batch:
        return self._kept(self._batches, Batch, sequences)

    def _kept(self, kept: collections.OrderedDict, make: Callable[..., Any], key: Any) -> Any:
        found = kept.get(key)
        if found is None:
            found = kept[key] = make(self, key)
            if len(kept) > KEPT:
                # Calls that still need their backward pass own their plan and batch.
                kept.popitem(last=False)
        else:
            kept.move_to_end(key)
        return found

    def agree(self, operation: str, prepare: Callable[[], Any]) -> Any:
        """Runs `prepare` on each rank and compares the results. Collective.

        See `ulysses.agreement.agree`. A closed context and a forked child raise before they
        communicate.
        """
        self.handle  # noqa: B018
        _library.library()
        found = agree(self.communicator, operation, prepare)
        self.agreed += 1
        return found

    def use(self, sequences: Sequences | None) -> None:
        """Sets the lengths and documents of calls that give none. Not collective.

        `shard` and `loader` call this for each micro-batch. Attention in transformers models uses
        these lengths as well.

        Args:
            sequences: the lengths and documents, equal on all ranks; None = no default
        """
        self.sequences = sequences

    def check(self) -> None:
        """Raises the error of an asynchronous call on the GPU, if there is one. Not collective.

        check does not wait for the GPU. The error stays: later calls of check raise it again.

        Raises:
            DeviceError, CommError: a call that had already returned failed on the GPU
        """
        self._call("ulysses_context_async_error", self.handle)

    def abort(self, status: int) -> None:
        """Tells the other ranks that this rank has failed. Not collective.

        Over MPI, this ends the job.

        Args:
            status: a `Status`
        """
        with self._lock:
            _library.library().ulysses_context_abort(self.handle, int(status))

    def close(self) -> None:
        """Destroys the context with its plans and batches. Collective.

        Later calls with this context raise InvalidArgument. Closing again does nothing. On a thread
        where MPI forbids calls, it raises InvalidArgument, and closes only plans and batches.
        """
        global _current
        if _current is self:
            _current = None
        if not self._handle or not _library.usable():
            return
        with self._lock:
            for owned in list(self._owned):
                owned.close()
            self._plans.clear()
            self._batches.clear()
            _library.destroy_context(self._handle)
            for memory in list(self._pending.values()):
                self._release(memory)
            self._handle = ctypes.c_void_p()
            self._free_duplicate()

    def __reduce__(self) -> Any:
        """Raises Unsupported: a copy would be another rank of a group that the ranks have made."""
        raise Unsupported(
            "ulysses.Context: a context cannot be copied or pickled, nor a module or a call that "
            "refers to one; call ulysses.use(context), and leave it out of the module"
        )

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ulysses.Context(rank {self.rank} of {self.size}, {self.device})"


class _World:
    """Represents MPI_COMM_WORLD without mpi4py. It has the methods that `Context` calls."""

    rank, size = 0, 0

    def py2f(self) -> int:
        return -1

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 0


def _memory(address: int | None, n: int) -> memoryview:
    if not n or address is None:
        return memoryview(bytearray(0))
    return memoryview((ctypes.c_uint8 * n).from_address(address)).cast("B")


def use(context: Context | None) -> None:
    """Sets the context of calls that give none. Not collective.

    Args:
        context: the context; None = no default
    """
    global _current
    _current = context


def current(context: Context | None = None) -> Context:
    """Returns `context`, or the context that `use` has set if `context` is None.

    Raises:
        InvalidArgument: there is neither, or context is not a Context
    """
    found = context if context is not None else _current
    if found is None:
        raise InvalidArgument(
            "ulysses: no context; give context=, or call ulysses.use(ulysses.Context(comm)) once"
        )
    if not isinstance(found, Context):
        raise InvalidArgument(
            f"ulysses: context is of type {type(found).__name__}; give a ulysses.Context, which is "
            "made of a communicator once"
        )
    return found
