#!/usr/bin/env python3
"""Compares the planned time of a step with the measured time.

    make build
    benchmarks/plan.py     -> results/plan.{json,md}

Each job is planned, and then run for some steps, in turn for several rounds. The figures are the
median over the rounds of (planned step / median step of the run directly after it). Tests compare
planned memory and bytes with runs. No result decides a test.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import statistics
import tempfile

import run as benchmarks

HERE = pathlib.Path(__file__).resolve().parent
PROGRAM = HERE.parent / "bin" / "ulysses-mpi"
EXAMPLES = HERE.parent / "examples"
CASES = [
    (name, job, ranks, sets)
    for name, job, sets in [
        ("quickstart", EXAMPLES / "quickstart.toml", []),
        ("quickstart, 8K tokens", EXAMPLES / "quickstart.toml", ["data.sequence=8192"]),
        ("quickstart, bf16", EXAMPLES / "quickstart.toml", ["device.dtype=bf16"]),
        ("hybrid", EXAMPLES / "hybrid.toml", []),
        ("Qwen3, 27M", HERE / "step-qwen3.toml", []),
        (
            "Qwen3, 27M, everything recomputed",
            HERE / "step-qwen3.toml",
            ["memory.attention=recompute", "memory.mlp=recompute"],
        ),
    ]
    for ranks in (1, 2, 4)
]


def sets_of(sets: list) -> list[str]:
    """Returns command-line options that set keys of the job."""
    return [
        x
        for s in ["parallel.ulysses=0", "output.model=false", "eval.split=0.0", *sets]
        for x in ("--set", s)
    ]


def planned(job: pathlib.Path, ranks: int, sets: list) -> float:
    """Returns the planned seconds of a step."""
    text = benchmarks.output([PROGRAM, "plan", job, "-n", ranks, *sets_of(sets)])
    return float(re.search(r"a step\s+([\d.]+)", text)[1])


def measured(job: pathlib.Path, ranks: int, sets: list, steps: int) -> float:
    """Runs a job, and returns the median seconds of its steps, without the first step."""
    with tempfile.TemporaryDirectory() as out:
        sets = [*sets, f"output.dir='{out}'", f"train.steps={steps}"]
        benchmarks.output([*benchmarks.MPI, "-n", ranks, PROGRAM, job, *sets_of(sets)])
        return statistics.median(x["seconds"] for x in benchmarks.metrics(out)[1:])


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument(
        "--note", default="", help="a note about the machine for the results, such as its load"
    )
    a = p.parse_args()
    rows = {}
    for _ in range(a.rounds):
        for name, job, ranks, sets in CASES:
            x, y = planned(job, ranks, sets), measured(job, ranks, sets, a.steps)
            row = rows.setdefault(f"{name}|{ranks}", dict(planned=[], measured=[], ratio=[]))
            for key, value in (("planned", x), ("measured", y), ("ratio", x / y)):
                row[key].append(value)
    head = (
        f"date {datetime.date.today()}, rounds {a.rounds}, cpu {benchmarks.cpu()}, "
        f"{len(os.sched_getaffinity(0))} cores{', ' + a.note if a.note else ''}"
    )
    text = [
        "# Planned and measured steps",
        "",
        head,
        "",
        "The ratio is the median over the rounds of (planned step / median step of the run directly",
        "after it).",
        "",
    ]
    mid = statistics.median
    body = [
        [
            *name.split("|"),
            f"{mid(row['planned']):.3f}",
            f"{mid(row['measured']):.3f}",
            f"{mid(row['ratio']):.2f}",
        ]
        for name, row in rows.items()
    ]
    text += benchmarks.table(["job", "ranks", "planned, s", "measured, s", "ratio"], body)
    (HERE / "results" / "plan.md").write_text("\n".join(text) + "\n")
    (HERE / "results" / "plan.json").write_text(
        json.dumps(dict(head=head, rows=rows), indent=1) + "\n"
    )
    print("\n".join(text))


if __name__ == "__main__":
    main()
