"""Shared by the peers: arguments, timing, one JSON line per case."""

import argparse
import json
import os
import statistics
import time


def parser(doc: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--threads", type=int, default=2, help="threads of a process")
    p.add_argument(
        "--repeat",
        type=int,
        default=5,
        help="timed repetitions of a case, after one that is not timed",
    )
    p.add_argument(
        "--cases",
        default="",
        help="only cases whose name contains one of these words, comma-separated",
    )
    p.add_argument(
        "--dtype",
        choices=("f32", "bf16"),
        default="f32",
        help="type of matrices and activations, where the program knows both",
    )
    return p


def dtype(a: argparse.Namespace):
    import torch

    return {"f32": torch.float32, "bf16": torch.bfloat16}[a.dtype]


def chosen(names: list[str], words: str) -> list[str]:
    return [n for n in names if not words or any(w in n for w in words.split(","))]


def measure(f, repeat: int) -> dict:
    """Seconds, least and median, of f called back to back."""
    f()
    times = []
    for _ in range(repeat):
        t = time.perf_counter()
        f()
        times.append(time.perf_counter() - t)
    return dict(min_s=min(times), median_s=statistics.median(times), repeat=repeat)


def emit(peer: str, case: str, **figures) -> None:
    import torch

    print(
        json.dumps(
            dict(
                peer=peer,
                case=case,
                unhandicapped=bool(os.environ.get("PEERS_UNHANDICAPPED")),
                torch=torch.__version__,
                cpu_capability=torch.backends.cpu.get_cpu_capability(),
                **figures,
            )
        ),
        flush=True,
    )
