#!/usr/bin/env python3
"""Planned steps compared with measured steps.

    make build
    benchmarks/plan.py     -> results/plan.{json,md}

Each job is planned and run for some steps, in turn, several rounds; a figure is the median over the rounds of (planned step / that run's median step). Memory and
bytes are held against runs by tests. Nothing here decides a test.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
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
    return [
        x
        for s in ["parallel.ulysses=0", "output.model=false", "eval.split=0.0", *sets]
        for x in ("--set", s)
    ]


def planned(job: pathlib.Path, ranks: int, sets: list) -> float:
    argv = [PROGRAM, "plan", job, "-n", ranks, *sets_of(sets)]
    r = subprocess.run([str(a) for a in argv], capture_output=True, text=True)
    if r.returncode:
        sys.exit(f"{argv}: exit {r.returncode}\n{r.stderr}")
    return float(re.search(r"a step\s+([\d.]+)", r.stdout)[1])


def measured(job: pathlib.Path, ranks: int, sets: list, steps: int) -> float:
    with tempfile.TemporaryDirectory() as out:
        argv = [
            *benchmarks.MPI,
            "-n",
            ranks,
            PROGRAM,
            job,
            *sets_of([*sets, f"output.dir='{out}'", f"train.steps={steps}"]),
        ]
        r = subprocess.run(
            [str(a) for a in argv], env=benchmarks.ENV, capture_output=True, text=True
        )
        if r.returncode:
            sys.exit(f"{argv}: exit {r.returncode}\n{r.stderr[-2000:]}")
        steps_of = [
            json.loads(x) for x in (pathlib.Path(out) / "metrics.jsonl").read_text().splitlines()
        ]
    return statistics.median(x["seconds"] for x in steps_of[1:])


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument(
        "--note", default="", help="what else is to be known of the machine, such as its load"
    )
    a = p.parse_args()
    rows = {}
    for _ in range(a.rounds):
        for name, job, ranks, sets in CASES:
            x, y = planned(job, ranks, sets), measured(job, ranks, sets, a.steps)
            row = rows.setdefault(f"{name}|{ranks}", dict(planned=[], measured=[], ratio=[]))
            for key, value in (("planned", x), ("measured", y), ("ratio", x / y)):
                row[key].append(value)
    head = f"date {datetime.date.today()}, rounds {a.rounds}, cpu {benchmarks.cpu()}, {len(os.sched_getaffinity(0))} cores{', ' + a.note if a.note else ''}"
    text = [
        "# Planned and measured steps",
        "",
        head,
        "",
        "The ratio is the median over the rounds of (planned step / median step of the run directly",
        "after it).",
        "",
        "|job|ranks|planned, s|measured, s|ratio|",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        text.append(
            f"|{name}|{statistics.median(row['planned']):.3f}|{statistics.median(row['measured']):.3f}|{statistics.median(row['ratio']):.2f}|"
        )
    (HERE / "results" / "plan.md").write_text("\n".join(text) + "\n")
    (HERE / "results" / "plan.json").write_text(
        json.dumps(dict(head=head, rows=rows), indent=1) + "\n"
    )
    print("\n".join(text))


if __name__ == "__main__":
    main()
