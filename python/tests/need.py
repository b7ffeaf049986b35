"""Decorators for tests that need a program, a package or a file which a machine may lack.

Such a test is skipped where it is missing, and fails where the environment variable CI is "true":
CI installs everything, so there a skip would hide that nothing was tested. The Go package
testkit/need has the same rule.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import unittest
from typing import Any, Callable


def in_ci() -> bool:
    """Reports whether a missing tool fails a test instead of skipping it."""
    return os.environ.get("CI") == "true"


def need(found: Any, missing: str, fix: str) -> Callable[[Any], Any]:
    """Returns a decorator for a test or a class of tests.

    Args:
        found: whether what the test needs is there
        missing: names what is missing
        fix: how to get it
    """
    if found:
        return lambda test: test
    if not in_ci():
        return unittest.skip(f"{missing}; {fix}")

    def fail(self: unittest.TestCase) -> None:
        self.fail(f"{missing}, and CI=true; {fix}")

    def failing(test: Any) -> Any:
        if isinstance(test, type):
            test.setUp = fail  # type: ignore[attr-defined]
            return test
        return functools.wraps(test)(fail)

    return failing


def packages(*names: str) -> bool:
    """Reports whether all packages can be imported."""
    return all(importlib.util.find_spec(name) for name in names)


need_torch = need(
    packages("torch", "transformers"),
    "no PyTorch or no transformers",
    "run make test-python TORCH=1, or give PYTHON=... that has them",
)
need_mpi = need(
    packages("mpi4py") and shutil.which("mpirun"),
    "no mpi4py or no mpirun",
    "run make deps and pip install mpi4py",
)
