#!/usr/bin/env python3
"""Compares the planned time of a step, and of operator jobs, with the measured time.

    make build
    benchmarks/plan.py     -> results/plan.{json,md}

Each job is planned, and then run for some steps, in turn for several rounds. The figures are the
median over the rounds of (planned step / median step of the run directly after it). An operator job
runs forward and backward once; its time is that of rank 0. Tests compare planned memory
and bytes with runs. No result decides a test.
"""

import argparse
import array
import datetime
import json
import math
import os
import pathlib
import random
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
        (
            "quickstart, 8K tokens",
            EXAMPLES / "quickstart.toml",
            ["data.sequence=8192", "model.new.max_position_embeddings=8192"],
        ),
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
TOKENS = 8192
# Operator jobs: the shape of each input after the axis of tokens.
OPERATORS = {
    "attention": dict(q=[8, 128], k=[2, 128], v=[2, 128], dout=[8, 128]),
    "gdn": dict(q=[8, 128], k=[8, 128], v=[16, 128], g=[16], beta=[16], dout=[16, 128]),
}


def sets_of(sets: list) -> list[str]:
    """Returns command-line options that set keys of the job."""
    return [
        x
        for s in ["parallel.ulysses=0", "output.model=false", "eval.split=0.0", *sets]
        for x in ("--set", s)
    ]


def planned(job: pathlib.Path, ranks: int, options: list) -> float:
    """Returns the planned seconds of a step, or of the run of an operator."""
    text = benchmarks.output([PROGRAM, "plan", job, "-n", ranks, *options])
    return float(re.search(r"a (?:step|run)\s+([\d.]+)", text)[1])


def measured(job: pathlib.Path, ranks: int, sets: list, steps: int) -> float:
    """Runs a job, and returns the median seconds of its steps, without the first step."""
    with tempfile.TemporaryDirectory() as out:
        sets = [*sets, f"output.dir='{out}'", f"train.steps={steps}"]
        benchmarks.output([*benchmarks.MPI, "-n", ranks, PROGRAM, job, *sets_of(sets)])
        return statistics.median(x["seconds"] for x in benchmarks.metrics(out)[1:])


def random_file(path: pathlib.Path, shapes: dict[str, list]) -> None:
    """Writes a safetensors file of random F32 inputs of an operator, with shapes [TOKENS, ...].

    Values are in [0, 1) for beta, (-1, 0] for g and [-1, 1) otherwise. They repeat after 2^16.
    """
    header, data = {}, []
    for name, shape in shapes.items():
        lo, hi = dict(beta=(0, 1), g=(-1, 0)).get(name, (-1, 1))
        values = array.array("f", (random.uniform(lo, hi) for _ in range(1 << 16))).tobytes()
        size = 4 * TOKENS * math.prod(shape)
        at = header[previous]["data_offsets"][1] if (previous := next(reversed(header), "")) else 0
        header[name] = dict(dtype="F32", shape=[TOKENS, *shape], data_offsets=[at, at + size])
        data.append((values * -(-size // len(values)))[:size])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))


def operators(rounds: int) -> dict[str, dict]:
    """Compares plans of operator jobs with their runs. Returns the figures of each case."""
    rows: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        at = pathlib.Path(folder)
        for kind, shapes in OPERATORS.items():
            random_file(at / f"{kind}.in", shapes)
            (at / f"{kind}.toml").write_text(
                f'kind = "{kind}"\n[output]\noverwrite = true\n'
                f'[{kind}]\ninput = "{kind}.in"\noutput = "{kind}.out"\n'
            )
        for _ in range(rounds):
            for kind in OPERATORS:
                for ranks in (1, 2, 4):
                    job = at / f"{kind}.toml"
                    x = planned(job, ranks, [])
                    text = benchmarks.output([*benchmarks.MPI, "-n", ranks, PROGRAM, job])
                    y = float(re.search(r"seconds\s+([\d.]+)", text)[1])
                    add(rows, f"{kind}, {TOKENS} tokens|{ranks}", x, y)
    return rows


def add(rows: dict[str, dict], case: str, x: float, y: float) -> None:
    """Adds planned and measured seconds to the figures of a case."""
    row = rows.setdefault(case, dict(planned=[], measured=[], ratio=[]))
    for key, value in (("planned", x), ("measured", y), ("ratio", x / y)):
        row[key].append(value)


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rounds", type=benchmarks.positive, default=3)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument(
        "--note", default="", help="a note about the machine for the results, such as its load"
    )
    a = p.parse_args()
    rows = {}
    for _ in range(a.rounds):
        for name, job, ranks, sets in CASES:
            x, y = planned(job, ranks, sets_of(sets)), measured(job, ranks, sets, a.steps)
            add(rows, f"{name}|{ranks}", x, y)
    rows |= operators(a.rounds)
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
        "after it). An operator runs forward and backward once; its time is that of rank 0.",
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
