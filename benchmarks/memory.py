#!/usr/bin/env python3
"""Measures sequence length against memory, and the time that saving memory takes.

    make build
    benchmarks/memory.py longest    the longest sequence that trains in 256 MiB a rank on 1, 2 and 4
                                    ranks -> results/memory-longest.{json,md,svg}
    benchmarks/memory.py cost       the time of a step by ZeRO stage and by policy for saved
                                    activations -> results/memory-cost.{json,md}

`longest` uses the plan of a job: a job that does not fit is refused before it allocates memory. The
longest sequence that fits trains one step, and the largest resident size of each process is
compared with the plan. `cost` runs all settings in turn for several rounds, each one directly after
a plain run. Its figures are the median over the rounds of (least step of the setting / least step
of this plain run). No result decides a test.
"""

import argparse
import json
import os
import pathlib
import re
import resource
import statistics
import subprocess
import sys
import tempfile

import run as benchmarks

HERE = pathlib.Path(__file__).resolve().parent
PROGRAM = HERE.parent / "bin" / "ulysses-mpi"
JOB = HERE / "memory.toml"
RESULTS = HERE / "results"


def child(folder: str, argv: list[str]) -> None:
    """Runs the program of one rank, and writes its largest resident size in bytes to the folder."""
    code = subprocess.run(argv).returncode
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    pathlib.Path(folder, os.environ.get("OMPI_COMM_WORLD_RANK", "0")).write_text(str(most))
    sys.exit(code)


def command(ranks: int, job: pathlib.Path, sets: dict, resident: str = "") -> list[str]:
    """Returns the command of a job on ranks of MPI.

    If `resident` is a folder, each rank writes its largest resident size to it.
    """
    argv = [str(PROGRAM), str(job)] + [x for k, v in sets.items() for x in ("--set", f"{k}={v}")]
    if resident:
        argv = [sys.executable, __file__, "child", resident, *argv]
    return [*benchmarks.MPI, "-n", str(ranks), *argv]


def planned(ranks: int, sets: dict) -> float | None:
    """Returns the planned MiB if they are too many, and None if the job fits.

    If the job fits, the run is ended as soon as it prints its plan.
    """
    p = subprocess.Popen(
        command(ranks, JOB, sets),
        env=benchmarks.ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for line in p.stdout:
            if m := re.search(r"([\d.]+) MiB are planned", line):
                return float(m[1])
            if re.search(r"^\s*(memory|parameters|weights)", line):
                return None
        sys.exit(f"{ranks} ranks, {sets}: no plan in the output, exit {p.wait()}")
    finally:
        p.terminate()
        p.wait()


def longest(_) -> None:
    """Finds the longest sequence on 1, 2 and 4 ranks, trains a step, and writes the results."""
    rows = []
    for ranks in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            sets = {"device.threads": 1, "output.dir": folder + "/out", "parallel.ulysses": ranks}
            step = 64 * ranks  # tokens
            low, high = 0, (1 << 17) // step
            while high - low > 1:  # in units of step: low fits, high does not
                middle = (low + high) // 2
                if planned(ranks, sets | {"data.sequence": middle * step}) is None:
                    low = middle
                else:
                    high = middle
            tokens = low * step
            print(f"{ranks} ranks: {tokens} tokens; one step", file=sys.stderr, flush=True)
            benchmarks.output(command(ranks, JOB, sets | {"data.sequence": tokens}, folder))
            record = benchmarks.metrics(folder + "/out")[-1]
            resident = [int(pathlib.Path(folder, str(i)).read_text()) for i in range(ranks)]
            rows.append(
                dict(
                    ranks=ranks,
                    tokens=tokens,
                    planned_bytes=record["peak_bytes"],
                    resident_bytes=resident,
                    loss=record["loss"],
                    seconds=record["seconds"],
                )
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    (RESULTS / "memory-longest.json").write_text(
        json.dumps(dict(job=JOB.name, cpu=benchmarks.cpu(), cases=rows), indent=1) + "\n"
    )
    mib = lambda b: f"{b / 2**20:.1f}"
    text = [
        "# The longest sequence that trains in 256 MiB a rank",
        "",
        "Ten million parameters, f32, AdamW, ZeRO stage 3 (`benchmarks/memory.toml`; `memory.device =",
        "0.25`, the planner chooses). Sequences are tried in steps of 64 tokens a rank, and the longest",
        'that fits trains one step. "Resident" is the largest resident memory of the ranks\' processes,',
        'including the program, MPI and scratch memory. "Bound" is the plan plus 5 % plus 200 MiB.',
        "",
    ]
    head = [
        "ranks",
        "tokens",
        "ratio to one rank",
        "planned, MiB a rank",
        "resident, MiB",
        "bound, MiB",
        "step, s",
    ]
    body = [
        [
            f"{r['ranks']}",
            f"{r['tokens']}",
            f"{r['tokens'] / rows[0]['tokens']:.2f}",
            mib(r["planned_bytes"]),
            mib(max(r["resident_bytes"])),
            mib(r["planned_bytes"] * 1.05 + (200 << 20)),
            f"{r['seconds']:.1f}",
        ]
        for r in rows
    ]
    text += [*benchmarks.table(head, body), "", "![tokens by ranks](memory-longest.svg)"]
    (RESULTS / "memory-longest.md").write_text("\n".join(text) + "\n")
    (RESULTS / "memory-longest.svg").write_text(figure(rows))
    print("\n".join(text))


def figure(rows: list[dict]) -> str:
    """Draws bars of tokens, and the line of exact doubling, as SVG."""
    width, height, left, bottom = 480, 300, 70, 40
    top = max(r["tokens"] for r in rows) * 1.1
    y = lambda v: height - bottom - v / top * (height - bottom - 20)
    x = lambda i: left + 30 + i * 130
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i, r in enumerate(rows):
        bar, middle = y(r["tokens"]), x(i) + 40
        label = f"{r['ranks']} rank{'s' if r['ranks'] > 1 else ''}"
        out += [
            f'<rect x="{x(i)}" y="{bar:.1f}" width="80" height="{height - bottom - bar:.1f}" '
            'fill="#4c78a8"/>',
            f'<text x="{middle}" y="{bar - 5:.1f}" text-anchor="middle">{r["tokens"]:,}</text>',
            f'<text x="{middle}" y="{height - bottom + 16}" text-anchor="middle">{label}</text>',
        ]
    line = " ".join(
        f"{x(i) + 40},{y(rows[0]['tokens'] * r['ranks']):.1f}" for i, r in enumerate(rows)
    )
    out.append(f'<polyline points="{line}" fill="none" stroke="#e45756" stroke-dasharray="5 4"/>')
    out += [
        f'<text x="{left + 20}" y="16">Longest sequence in 256 MiB a rank, 10 million parameters; '
        "dashed: doubling with the ranks</text>",
        f'<line x1="{left}" y1="{height - bottom}" x2="{width - 10}" y2="{height - bottom}" '
        'stroke="black"/>',
        f'<text x="14" y="{height / 2}" transform="rotate(-90 14 {height / 2})" '
        'text-anchor="middle">tokens</text></svg>',
    ]
    return "\n".join(out) + "\n"


CATEGORIES = ("block_input", "attention", "qkv", "mlp")  # of saved activations
KEEP = {f"memory.{k}": "keep" for k in CATEGORIES}
SETTINGS = {"plain: stage 0, everything kept": KEEP}
SETTINGS |= {f"ZeRO stage {i}": KEEP | {"parallel.zero": i} for i in (1, 2, 3)}
SETTINGS |= {f"recompute {k}": KEEP | {f"memory.{k}": "recompute"} for k in ("mlp", "qkv")}
SETTINGS["recompute attention and qkv"] = KEEP | {
    "memory.attention": "recompute",
    "memory.qkv": "recompute",
}
SETTINGS["recompute all except block inputs"] = {f"memory.{k}": "recompute" for k in CATEGORIES} | {
    "memory.block_input": "keep"
}
SETTINGS["recompute all, segments of 2"] = {f"memory.{k}": "recompute" for k in CATEGORIES} | {
    "memory.segment": 2
}
SETTINGS["offload all"] = {f"memory.{k}": "offload" for k in CATEGORIES} | {"memory.host": 2}
SETTINGS["recompute all except block inputs, offload block inputs"] = {
    f"memory.{k}": "recompute" for k in CATEGORIES
} | {"memory.block_input": "offload", "memory.host": 2}
SETTINGS["stage 3, recompute all, segments of 2"] = SETTINGS["recompute all, segments of 2"] | {
    "parallel.zero": 3
}


def cost(a) -> None:
    """Measures all settings in turn, and writes the results."""
    job = HERE.parent / "examples" / "quickstart.toml"
    rows = {name: dict(seconds=[], ratios=[], peak_bytes=0) for name in SETTINGS}
    plain = 0.0
    for i in range(a.rounds):
        for name, sets in [x for pair in SETTINGS.items() for x in (("", KEEP), pair)]:
            with tempfile.TemporaryDirectory() as folder:
                common = {
                    "parallel.ulysses": 2,
                    "train.steps": 7,
                    "eval.split": 0.0,
                    "output.model": "false",
                    "output.dir": folder,
                    "device.threads": 1,
                }
                benchmarks.output(command(2, job, common | sets))
                records = benchmarks.metrics(folder)[2:]  # the first two are a warm-up
            seconds = min(x["seconds"] for x in records)
            if not name:
                plain = seconds
                continue
            rows[name]["seconds"].append(seconds)
            rows[name]["ratios"].append(seconds / plain)
            rows[name]["peak_bytes"] = records[-1]["peak_bytes"]
        print(f"round {i + 1} of {a.rounds}", file=sys.stderr, flush=True)
    info = dict(job=job.name, ranks=2, threads=1, rounds=a.rounds, cpu=benchmarks.cpu())
    (RESULTS / "memory-cost.json").write_text(json.dumps(dict(info, cases=rows), indent=1) + "\n")
    text = [
        "# The time that saving memory takes",
        "",
        ", ".join(f"{k} {v}" for k, v in info.items()),
        "",
        "Time is the median over the rounds of (least step / least step of a plain run directly before).",
        "The first line is a plain run after a plain run.",
        "",
    ]
    body = [
        [name, f"{r['peak_bytes'] / 2**20:.1f}", f"{statistics.median(r['ratios']):.2f}"]
        for name, r in rows.items()
    ]
    text += benchmarks.table(["setting", "planned, MiB a rank", "time / plain"], body)
    (RESULTS / "memory-cost.md").write_text("\n".join(text) + "\n")
    print("\n".join(text))


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], sys.argv[3:])
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("what", choices=("longest", "cost"))
    p.add_argument("--rounds", type=benchmarks.positive, default=5)
    a = p.parse_args()
    {"longest": longest, "cost": cost}[a.what](a)


if __name__ == "__main__":
    main()
