"""Functions that the peers share: arguments, cases, timing, and one JSON line for each case."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import time
from collections.abc import Iterable
from typing import Callable

CASES = pathlib.Path(__file__).resolve().parent.parent / "cases.json"


def parser(doc: str) -> argparse.ArgumentParser:
    """Returns a parser with the options of every peer on the CPU."""
    p = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--threads", type=int, default=2, help="threads of a process")
    p.add_argument(
        "--repeat", type=int, default=5, help="timed calls of a case, after one untimed call"
    )
    p.add_argument(
        "--cases",
        default="",
        help="run only cases whose name contains one of these words, separated by commas",
    )
    p.add_argument(
        "--dtype",
        choices=("f32", "bf16"),
        default="f32",
        help="type of matrices and activations, if the peer has both",
    )
    return p


def dtype(a: argparse.Namespace):
    """Returns PyTorch's type for --dtype."""
    import torch

    return {"f32": torch.float32, "bf16": torch.bfloat16}[a.dtype]


def cases(kind: str, words: str = "") -> dict[str, dict]:
    """Returns the cases of a kind in ../cases.json by name.

    words selects cases whose name contains one of the words, separated by commas; "" selects all.
    """
    wanted = words.split(",")
    found = json.loads(CASES.read_text())[kind]
    return {c["name"]: c for c in found if any(w in c["name"] for w in wanted)}


def seconds(
    f: Callable[[], object], repeat: int, before: Callable[[], object] = lambda: None
) -> list[float]:
    """Calls f `repeat` times, and returns the seconds of each call. before() runs untimed."""
    times = []
    for _ in range(repeat):
        before()
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return times


def summary(times: Iterable[float]) -> dict:
    """Returns the least and the median of times in seconds, and their number."""
    times = list(times)
    return dict(min_s=min(times), median_s=statistics.median(times), repeat=len(times))


def measure(f: Callable[[], object], repeat: int) -> dict:
    """Returns the summary of `repeat` calls of f, after one untimed call."""
    f()
    return summary(seconds(f, repeat))


def passes(forward: Callable, inputs: list, dout) -> tuple[Callable, Callable]:
    """Returns two functions to time: forward without a graph, and forward and backward.

    inputs are the tensors that get gradients, and dout is the gradient of the output.
    """
    import torch

    def forward_only():
        with torch.no_grad():
            forward()

    def both():
        for x in inputs:
            x.grad = None
        forward().backward(dout)

    return forward_only, both


def emit_plain(peer: str, case: str, **figures) -> None:
    """Prints the JSON line of a case."""
    print(json.dumps(dict(peer=peer, case=case, **figures)), flush=True)


def emit(peer: str, case: str, **figures) -> None:
    """Prints the JSON line of a case on the CPU, with PyTorch's version and instruction set."""
    import torch

    emit_plain(
        peer,
        case,
        unhandicapped=bool(os.environ.get("PEERS_UNHANDICAPPED")),
        torch=torch.__version__,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        **figures,
    )
