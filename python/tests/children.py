"""Python processes that tests start."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

TESTS = pathlib.Path(__file__).resolve().parent


def environment(**more: str) -> dict[str, str]:
    """Returns the environment for a process that imports ulysses and the modules of the tests."""
    path = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **more}


def run(command: list[Any], **options: Any) -> subprocess.CompletedProcess:
    """Runs a command, and returns it with its output as text.

    Fails with this output if the exit status is not 0. A first word "python" is this interpreter.
    """
    if command[0] == "python":
        command = [sys.executable, *command[1:]]
    options = {"env": environment(), "timeout": 300, **options}
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True, **options)
    if done.returncode:
        shown = " ".join(str(x) for x in command)
        raise AssertionError(f"{shown}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done
