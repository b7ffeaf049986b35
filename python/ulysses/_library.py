"""Finds libulysses.so, opens it, and turns statuses into exceptions.

The library is opened at the first call, not at import, with RTLD_LOCAL: nothing of it becomes visible to other libraries. It holds a Go
runtime, whose threads do not survive fork(): a forked child (a DataLoader's worker) lives on, but its calls are refused here.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import threading
from typing import Any

from . import _struct
from .errors import DeviceError, InternalError, error_of

NAME = "libulysses.so"
_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_pid = 0  # of the process that opened it


def candidates() -> list[str]:
    """Where the library is looked for, in order: ULYSSES_LIBRARY (a file or a folder, and then nothing else), beside the package,
    lib/ of the source tree, the loader's own path."""
    given = os.environ.get("ULYSSES_LIBRARY")
    if given:
        return [os.path.join(given, NAME) if os.path.isdir(given) else given]
    here = pathlib.Path(__file__).resolve().parent
    files = [here / NAME, here / "lib" / NAME, here.parent.parent / "lib" / NAME]
    return [str(f) for f in files if f.exists()] + [NAME, NAME + ".0"]


def check_version(found: int) -> None:
    """Refuses a library whose structs may differ from this package's."""
    major, minor = found // 10000, found // 100 % 100
    ours = _struct.VERSION
    if major != ours // 10000 or minor < ours // 100 % 100:
        raise DeviceError(
            f"ulysses: the library has version {major}.{minor}, this package needs {ours // 10000}.{ours // 100 % 100} or newer of "
            f"that major: install both from one source, or set ULYSSES_LIBRARY"
        )


def _open() -> ctypes.CDLL:
    tried = []
    for path in candidates():
        try:
            lib = ctypes.CDLL(path, mode=os.RTLD_LOCAL | os.RTLD_NOW)
        except OSError as e:
            tried.append(str(e))
            continue
        for name, (result, args) in _struct.FUNCTIONS.items():
            f = _symbol(lib, name, path)
            f.argtypes, f.restype = args, result
        check_version(lib.ulysses_version())
        return lib
    raise DeviceError(
        "ulysses: no libulysses.so: "
        + "; ".join(tried)
        + ": build it (make lib), or set ULYSSES_LIBRARY to the file"
    )


def _symbol(lib: ctypes.CDLL, name: str, path: str) -> Any:
    try:
        return getattr(lib, name)
    except AttributeError:
        raise DeviceError(
            f"ulysses: {path} has no {name}: it is older than this package; build or install both from one source"
        ) from None


def usable() -> bool:
    """Whether calls may be made here: false in a child forked after the library was opened."""
    return _pid in (0, os.getpid())


def library() -> ctypes.CDLL:
    """The library, opened at the first call."""
    global _library, _pid
    if not usable():
        raise InternalError(
            f"ulysses: called in a process forked from {_pid}, whose library does not survive fork: call in the parent, or start "
            "workers by spawn"
        )
    if _library is None:
        with _lock:
            if _library is None:
                _library, _pid = _open(), os.getpid()
    return _library


def call(name: str, *args: Any) -> None:
    """Calls a function that returns a status; raises what it says unless it is OK."""
    lib = library()
    status = getattr(lib, name)(*args)
    if status:
        text = lib.ulysses_last_error() or lib.ulysses_status_string(status) or b""
        raise error_of(status, text.decode(errors="replace") or f"{name}: status {status}")


def version() -> str:
    """The library's version, "major.minor.patch"."""
    n = library().ulysses_version()
    return f"{n // 10000}.{n // 100 % 100}.{n % 100}"


def build_info() -> dict:
    """What the library was built with: devices, MPI."""
    import json

    return json.loads(library().ulysses_build_info() or b"{}")
