"""Finds and opens libulysses.so, and converts statuses to exceptions.

The library is opened at the first call, not at import. RTLD_LOCAL hides its symbols from other
libraries. The library contains a Go runtime, whose threads do not survive fork(). A forked child,
such as a DataLoader worker, may continue, but `library` refuses its calls.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import threading
from typing import Any

from . import _struct
from .errors import DeviceError, InternalError, InvalidArgument, error_of

NAME = "libulysses.so"
_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_pid = 0  # of the process that opened the library; 0 = not opened


def candidates() -> list[str]:
    """Returns the paths at which the library is searched, in order.

    ULYSSES_LIBRARY, a file or a folder, is the only one if it is set. Otherwise: the folder of the
    package, lib/ of the source tree, and the search path of the dynamic linker.
    """
    given = os.environ.get("ULYSSES_LIBRARY")
    if given:
        return [os.path.join(given, NAME) if os.path.isdir(given) else given]
    here = pathlib.Path(__file__).resolve().parent
    files = [here / NAME, here / "lib" / NAME, here.parent.parent / "lib" / NAME]
    return [str(f) for f in files if f.exists()] + [NAME, NAME + ".0"]


def check_version(found: int) -> None:
    """Raises DeviceError if the structs of a library may differ from those in _struct.py.

    found is the library's version: major * 10000 + minor * 100 + patch.
    """
    major, minor = found // 10000, found // 100 % 100
    ours = _struct.VERSION
    if major != ours // 10000 or minor < ours // 100 % 100:
        raise DeviceError(
            f"ulysses: libulysses.so has version {major}.{minor}, this package needs "
            f"{ours // 10000}.{ours // 100 % 100} or a newer minor version; install both from one "
            "source, or set ULYSSES_LIBRARY"
        )


def _open() -> ctypes.CDLL:
    tried: list[str] = []
    broken: list[str] = []
    for path in candidates():
        try:
            lib = ctypes.CDLL(path, mode=os.RTLD_LOCAL | os.RTLD_NOW)
        except OSError as e:
            (broken if os.path.exists(path) else tried).append(str(e))
            continue
        for name, (result, args) in _struct.FUNCTIONS.items():
            f = _symbol(lib, name, path)
            f.argtypes, f.restype = args, result
        check_version(lib.ulysses_version())
        return lib
    if broken:
        raise DeviceError(
            f"ulysses: libulysses.so was found and cannot be loaded: {', '.join(broken)}; install "
            "a library that was built for this machine, in a file system without noexec"
        )
    raise DeviceError(
        f"ulysses: libulysses.so was not found: {', '.join(tried)}; run make lib in the source "
        "tree, or set ULYSSES_LIBRARY to the file"
    )


def _symbol(lib: ctypes.CDLL, name: str, path: str) -> Any:
    try:
        return getattr(lib, name)
    except AttributeError:
        raise DeviceError(
            f"ulysses: {path} has no function {name}, so it is older than this package; install "
            "both from one source"
        ) from None


def usable() -> bool:
    """Reports whether this process may call: false in a child forked after the library opened."""
    return _pid in (0, os.getpid())


def library() -> ctypes.CDLL:
    """Returns the library, which the first call opens.

    Raises:
        DeviceError: the library was not found, or its version does not match
        InternalError: this process was forked after the library was opened
    """
    global _library, _pid
    if not usable():
        raise InternalError(
            f"ulysses: this process was forked from process {_pid} after it opened libulysses.so, "
            "which does not survive fork; call in the parent, or start workers with spawn"
        )
    if _library is None:
        with _lock:
            if _library is None:
                _library, _pid = _open(), os.getpid()
    return _library


def call(name: str, *args: Any) -> None:
    """Calls a function of the library that returns a status.

    Raises:
        UlyssesError: the subclass for a status other than OK, with the library's message
    """
    lib = library()
    status = getattr(lib, name)(*args)
    if status:
        text = lib.ulysses_last_error() or lib.ulysses_status_string(status) or b""
        raise error_of(status, text.decode(errors="replace") or f"{name}: status {status}")


def destroy_context(handle: ctypes.c_void_p) -> None:
    """Destroys a context.

    Raises:
        InvalidArgument: the library could not destroy the context, which is still valid
    """
    lib, info = library(), _struct.ContextInfo()
    lib.ulysses_context_destroy(handle)
    text = lib.ulysses_last_error()
    if text and not lib.ulysses_context_query(handle, ctypes.byref(info)):
        raise InvalidArgument(text.decode(errors="replace"))


def version() -> str:
    """Returns the version of libulysses.so as "major.minor.patch"."""
    n = library().ulysses_version()
    return f"{n // 10000}.{n // 100 % 100}.{n % 100}"


def build_info() -> dict:
    """Describes libulysses.so. Not collective.

    Returns:
        A dictionary. `version` and `commit` name the build. `devices` are the devices that can be
        used here, `unusable` has the reasons for the others, and `cuda` is the path of the CUDA
        plug-in. `mpi` is the MPI library that was opened. `unbuilt` are options that are not
        implemented.
    """
    import json

    return json.loads(library().ulysses_build_info() or b"{}")
