"""Contexts: one rank of one sequence-parallel group, with the plans and batches made on it."""

from __future__ import annotations

import collections
import ctypes
import threading
import weakref
from typing import Any, Callable

from . import _library, _struct
from .agreement import agree
from .communicator import Alone, Communicator, TorchGroup, communicator
from .errors import InvalidArgument
from .library_ranks import LibraryRanks
from .plan import Batch, DeltaPlan, Plan, Sequences
from .tensors import current_gpu

DEVICES = {"cpu": _struct.CPU, "cuda": _struct.CUDA, None: 0}
WAYS = {
    "auto": _struct.COMM_AUTO,
    "host": _struct.COMM_HOST,
    "nccl": _struct.COMM_NCCL,
    "ipc": _struct.COMM_IPC,
}
BATCHES = 64  # lengths and documents remembered; the same on all ranks, as making one is collective
_current: Context | None = None


class Context:
    """One rank of one sequence-parallel group. Collective: all ranks of `comm` make it, and close it.

    comm     None = this process alone; an mpi4py communicator (duplicated by the library, no callbacks); a torch.distributed process group
             of gloo; any object with rank, size, allgather and alltoallv (ulysses.Communicator)
    device   "cpu" or "cuda"; ordinal which GPU, None = PyTorch's current one where it is imported, else 0
    way      how tensors of a GPU travel: "auto", "host" (through host memory), "nccl", "ipc" (each other's memory, on one machine)
    threads  of the CPU's kernels, 0 = the cores that this process may use
    ulysses, ring  the mesh: their product is the ranks; 0 = the library chooses
    timeout  seconds until a late peer is an error; 0 = wait as the communicator does. Others are refused by libraries that have it not built
    callbacks  True = use an mpi4py communicator through callbacks, for an MPI that the library was not built for

    Errors: InvalidArgument, Unsupported (named), CommError (ranks disagree: all of them get it).

        with ulysses.Context(MPI.COMM_WORLD) as ctx:
            out = ulysses.attention(q, k, v, causal=True, seq=4096, context=ctx)

    One thread at a time calls with a context. Not usable in a forked child.
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
        timeout: int = 0,
        callbacks: bool = False,
        log: Callable[[int, str], None] | None = None,
    ):
        self._handle = ctypes.c_void_p()
        self.communicator: Communicator = communicator(comm)

        def prepare() -> tuple[dict[str, Any], tuple[int, ...], _struct.Options]:
            if device not in DEVICES:
                raise InvalidArgument(f"ulysses.Context: device {device!r}: give 'cpu' or 'cuda'")
            if way not in WAYS:
                raise InvalidArgument(
                    f"ulysses.Context: way {way!r}: give one of {', '.join(WAYS)}"
                )
            gpu = ordinal if ordinal is not None else current_gpu() if device == "cuda" else 0
            made = _struct.Options(
                device=DEVICES[device],
                ordinal=gpu,
                threads=threads,
                ulysses=ulysses,
                ring=ring,
                timeout=timeout,
                comm=WAYS[way],
            )
            _library.library()
            return (
                {
                    "device": device,
                    "way": way,
                    "ulysses": ulysses,
                    "ring": ring,
                    "timeout": timeout,
                },
                (),
                made,
            )

        # The communicator of MPI_COMM_WORLD is not there before the library has made it.
        options = (
            prepare()[2]
            if isinstance(comm, _World)
            else agree(self.communicator, "ulysses.Context", prepare)[0]
        )
        self._lock = threading.RLock()
        self._failure: BaseException | None = (
            None  # of a callback, to be the cause of the call's error
        )
        self._plans: dict[
            Any, Any
        ] = {}  # by what they were made of: the sixth value is a bool for attention, text for the gated delta rule
        self._batches: collections.OrderedDict[Any, Batch] = collections.OrderedDict()
        self._pending: dict[int, Any] = {}  # memory of requests under way
        self._made: weakref.WeakSet = weakref.WeakSet()
        self.sequences: Sequences | None = None  # what `use` set
        self._keep: list[Any] = [options]
        if log is not None:
            options.log = _struct.Log(
                lambda user, level, line: log(level, (line or b"").decode(errors="replace"))
            )
        out = ctypes.byref(self._handle)
        if isinstance(self.communicator, Alone):
            self._call("ulysses_context_create_local", ctypes.byref(options), out)
        elif hasattr(comm, "py2f") and not callbacks:
            self._call("ulysses_context_create_mpi", comm.py2f(), ctypes.byref(options), out)
        else:
            host = self._host()
            self._call(
                "ulysses_context_create_host", ctypes.byref(host), ctypes.byref(options), out
            )
        info = _struct.ContextInfo()
        self._call("ulysses_context_query", self._handle, ctypes.byref(info))
        self.rank, self.size, self.ulysses, self.ring = (
            info.rank,
            info.size,
            info.ulysses,
            info.ring,
        )
        self.device = "cuda" if info.device == _struct.CUDA else "cpu"
        self.ordinal = info.ordinal

    @classmethod
    def torch(cls, group: Any = None, **options: Any) -> Context:
        """A context on a torch.distributed process group; None = the default group."""
        return cls(TorchGroup(group), **options)

    @classmethod
    def world(cls, **options: Any) -> Context:
        """A context on MPI_COMM_WORLD without mpi4py: the library initialises MPI if nobody did, and finalises it then."""
        self = cls.__new__(cls)
        Context.__init__(self, _World(), **options)
        self.communicator = LibraryRanks(self) if self.size > 1 else Alone()
        return self

    def _host(self) -> _struct.HostComm:
        comm = self.communicator

        def guarded(f: Callable[..., None]) -> Callable[..., int]:
            def run(*args: Any) -> int:
                try:
                    f(*args)
                    return 0
                except BaseException as e:  # it must not cross C
                    self._failure = e
                    return 1

            return run

        def allgather(user: int, send: int, receive: int, n: int) -> None:
            comm.allgather(_memory(send, n), _memory(receive, n * comm.size))

        def alltoallv(
            user: int, send: int, send_bytes: Any, receive: int, receive_bytes: Any
        ) -> None:
            out, back = (
                [send_bytes[i] for i in range(comm.size)],
                [receive_bytes[i] for i in range(comm.size)],
            )
            comm.alltoallv(_memory(send, sum(out)), out, _memory(receive, sum(back)), back)

        host = _struct.HostComm(
            rank=comm.rank,
            size=comm.size,
            allgather=_struct.Allgather(guarded(allgather)),
            alltoallv=_struct.Alltoallv(guarded(alltoallv)),
        )
        self._keep.append(host)
        return host

    def _call(self, name: str, *args: Any) -> None:
        with self._lock:
            self._failure = None
            try:
                _library.call(name, *args)
            except Exception as e:
                if self._failure is not None:
                    raise e from self._failure
                raise

    @property
    def handle(self) -> ctypes.c_void_p:
        if not self._handle:
            raise InvalidArgument("ulysses: the context is closed: make another")
        return self._handle

    def plan(self, **options: Any) -> Plan:
        """The plan for a kind of layer. Collective; made at the first call with these options, and kept.

        heads, head_dim, kv_heads (0 = heads), v_dim (0 = head_dim), dtype, causal, scale, cross and
        softcap mean what they mean in attention; window = (left, right) keys, -1 unbounded; deterministic =
        gradients are bitwise reproducible on a GPU too, or the plan is refused (Unsupported)."""
        self.agree("ulysses.Context.plan", lambda: (options, (), None))
        return self._plan(**options)

    def delta_plan(self, **options: Any) -> DeltaPlan:
        """The plan for a kind of layer of the gated delta rule. Collective; made at the first call
        with these options, and kept.

        qk_heads, v_heads, qk_dim, v_dim, dtype, strategy and scale mean what they mean in
        chunk_gated_delta_rule; tokens = of a batch in all, by which "auto" chooses; l2norm; chunk 0 =
        the device's choice; states = calls may bring states and want them."""
        self.agree("ulysses.Context.delta_plan", lambda: (options, (), None))
        return self._delta_plan(**options)

    def batch(self, sequences: Sequences) -> Batch:
        """The batch for lengths and documents. Collective; the last 64 are kept."""
        self.agree("ulysses.Context.batch", lambda: ({"sequences": sequences}, (), None))
        return self._batch(sequences)

    # What calls use that have agreed on their arguments.

    def _plan(
        self,
        *,
        heads: int,
        head_dim: int,
        kv_heads: int = 0,
        v_dim: int = 0,
        dtype: int = _struct.F32,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        scale: float | None = None,
        cross: bool = False,
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> Plan:
        key = (
            heads,
            head_dim,
            kv_heads or heads,
            v_dim or head_dim,
            dtype,
            causal,
            window,
            scale,
            cross,
            softcap,
            deterministic,
        )
        return self._planned(Plan, key)

    def _delta_plan(
        self,
        *,
        qk_heads: int,
        v_heads: int,
        qk_dim: int,
        v_dim: int,
        dtype: int = _struct.F32,
        strategy: str = "auto",
        tokens: int = 0,
        scale: float | None = None,
        l2norm: bool = False,
        chunk: int = 0,
        states: bool = False,
    ) -> DeltaPlan:
        key = (
            qk_heads,
            v_heads,
            qk_dim,
            v_dim,
            dtype,
            strategy,
            tokens,
            scale,
            l2norm,
            chunk,
            states,
        )
        return self._planned(DeltaPlan, key)

    def _planned(self, kind: type, key: tuple) -> Any:
        if key not in self._plans:
            self._plans[key] = kind(self, *key)
            self._plans[key].key = key
        return self._plans[key]

    def _batch(self, sequences: Sequences) -> Batch:
        found = self._batches.get(sequences)
        if found is None:
            found = self._batches[sequences] = Batch(self, sequences)
            if len(self._batches) > BATCHES:
                self._batches.popitem(last=False)  # destroyed when no backward needs it
        else:
            self._batches.move_to_end(sequences)
        return found

    def agree(self, operation: str, prepare: Callable[[], Any]) -> Any:
        """agreement.agree over the ranks of this context. Collective."""
        (
            self.handle,
            _library.library(),
        )  # a closed context and a forked child are refused before they communicate
        return agree(self.communicator, operation, prepare)

    def use(self, sequences: Sequences | None) -> None:
        """Sets the lengths and documents of calls that name none: the transformers attention, attention without seq. `shard` does this."""
        self.sequences = sequences

    def check(self) -> None:
        """Raises what has gone wrong on the GPU after a call had returned (DeviceError, CommError). It does not wait, and is sticky."""
        self._call("ulysses_context_async_error", self.handle)

    def abort(self, status: int) -> None:
        """Tells the peers that this rank failed alone. Over MPI this ends the job."""
        with self._lock:
            _library.library().ulysses_context_abort(self.handle, int(status))

    def close(self) -> None:
        """Destroys plans, batches and the context. Collective. Calls afterwards raise InvalidArgument."""
        global _current
        if _current is self:
            _current = None
        if not self._handle or not _library.usable():
            return
        with self._lock:
            for made in list(self._made):
                made.close()
            self._plans.clear()
            self._batches.clear()
            self._pending.clear()
            _library.library().ulysses_context_destroy(self._handle)
            self._handle = ctypes.c_void_p()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ulysses.Context(rank {self.rank} of {self.size}, {self.device})"


class _World:
    """Stands for MPI_COMM_WORLD where no mpi4py is."""

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
    """Makes a context the one that calls use where none is given."""
    global _current
    _current = context


def current(context: Context | None = None) -> Context:
    """`context`, or what `use` set; InvalidArgument where there is neither."""
    found = context if context is not None else _current
    if found is None:
        raise InvalidArgument(
            "ulysses: no context: give context=, or set one for all calls with ulysses.use(ulysses.Context(comm))"
        )
    return found
