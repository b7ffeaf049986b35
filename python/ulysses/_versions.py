"""Refuses versions of transformers and Accelerate that are too old for `ulysses.trainer`."""

from __future__ import annotations

from typing import Any

import transformers

from .errors import Unsupported


def check_versions(operation: str, accelerator: Any) -> None:
    """Raises Unsupported for a transformers or an Accelerate that is too old for the Trainer."""
    if not hasattr(transformers.Trainer, "_get_num_items_in_batch"):
        raise Unsupported(
            f"{operation}: the Trainer of transformers {transformers.__version__} does not count "
            "the labels of an evaluation; install transformers 4.57 or newer"
        )
    check_accelerate(operation, accelerator)


def check_accelerate(operation: str, accelerator: Any) -> None:
    """Raises Unsupported for an Accelerate whose loaders do not know the axis "cp"."""
    if not hasattr(accelerator.state, "device_mesh"):
        import accelerate  # type: ignore[import-not-found]

        raise Unsupported(
            f"{operation}: Accelerate {accelerate.__version__} cannot load the same batches on all "
            "ranks of a group; install accelerate 1.10 or newer"
        )
