#!/usr/bin/env python3
"""What memory buys and what saving it costs.

    make build
    benchmarks/memory.py longest     the longest sequence that trains in 256 MiB a rank, on 1, 2 and 4 ranks   -> results/memory-longest.{json,md,svg}
    benchmarks/memory.py cost        a step's time by ZeRO stage and by what becomes of activations            -> results/memory-cost.{json,md}

longest asks the plan: a job that does not fit is refused before it allocates anything. The longest that fits then trains one step, and each process's
largest resident size is held against the plan. cost runs all settings in turn, several rounds, each right after a plain run; a figure is the median over
the rounds of (setting's least step / that plain run's). Nothing here decides a test.
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
    """A rank: runs the program and leaves its largest resident size, in bytes."""
    code = subprocess.run(argv).returncode
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    pathlib.Path(folder, os.environ.get("OMPI_COMM_WORLD_RANK", "0")).write_text(str(most))
    sys.exit(code)


def command(ranks: int, job: pathlib.Path, sets: dict, wrapped: str = "") -> list[str]:
    argv = [str(PROGRAM), str(job)] + [x for k, v in sets.items() for x in ("--set", f"{k}={v}")]
    if wrapped:
        argv = [sys.executable, __file__, "child", wrapped, *argv]
    return [*benchmarks.MPI, "-n", str(ranks), *argv]


def planned(ranks: int, sets: dict) -> float | None:
    """MiB planned where they are too many, else None: the run is ended when it has said that it fits."""
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
        sys.exit(f"{ranks} ranks, {sets}: the run said nothing of memory, exit {p.wait()}")
    finally:
        p.terminate()
        p.wait()


def longest(_) -> None:
    rows = []
    for ranks in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            sets = {"device.threads": 1, "output.dir": folder + "/out", "parallel.ulysses": ranks}
            step = 64 * ranks  # tokens
            low, high = 0, (1 << 17) // step
            while high - low > 1:  # in steps: low fits, high does not
                middle = (low + high) // 2
                if planned(ranks, sets | {"data.sequence": middle * step}) is None:
                    low = middle
                else:
                    high = middle
            tokens = low * step
            print(f"{ranks} ranks: {tokens} tokens; one step", file=sys.stderr, flush=True)
            r = subprocess.run(
                command(ranks, JOB, sets | {"data.sequence": tokens}, folder),
                env=benchmarks.ENV,
                capture_output=True,
                text=True,
            )
            if r.returncode:
                sys.exit(f"{r.args}: exit {r.returncode}\n{r.stderr[-2000:]}")
            record = json.loads(
                pathlib.Path(folder, "out", "metrics.jsonl").read_text().splitlines()[-1]
            )
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
        "|ranks|tokens|ratio to one rank|planned, MiB a rank|resident, MiB|bound, MiB|step, s|",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        bound = r["planned_bytes"] * 1.05 + (200 << 20)
        text.append(
            f"|{r['ranks']}|{r['tokens']}|{r['tokens'] / rows[0]['tokens']:.2f}|{mib(r['planned_bytes'])}|{mib(max(r['resident_bytes']))}|{mib(bound)}|{r['seconds']:.1f}|"
        )
    text += ["", "![tokens by ranks](memory-longest.svg)"]
    (RESULTS / "memory-longest.md").write_text("\n".join(text) + "\n")
    (RESULTS / "memory-longest.svg").write_text(figure(rows))
    print("\n".join(text))


def figure(rows: list[dict]) -> str:
    """Bars of tokens, and the line of exact doubling from one rank's."""
    width, height, left, bottom = 480, 300, 70, 40
    top = max(r["tokens"] for r in rows) * 1.1
    y = lambda v: height - bottom - v / top * (height - bottom - 20)
    x = lambda i: left + 30 + i * 130
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i, r in enumerate(rows):
        out.append(
            f'<rect x="{x(i)}" y="{y(r["tokens"]):.1f}" width="80" height="{height - bottom - y(r["tokens"]):.1f}" fill="#4c78a8"/>'
        )
        out.append(
            f'<text x="{x(i) + 40}" y="{y(r["tokens"]) - 5:.1f}" text-anchor="middle">{r["tokens"]:,}</text>'
        )
        out.append(
            f'<text x="{x(i) + 40}" y="{height - bottom + 16}" text-anchor="middle">{r["ranks"]} rank{"s" if r["ranks"] > 1 else ""}</text>'
        )
    line = " ".join(
        f"{x(i) + 40},{y(rows[0]['tokens'] * r['ranks']):.1f}" for i, r in enumerate(rows)
    )
    out.append(f'<polyline points="{line}" fill="none" stroke="#e45756" stroke-dasharray="5 4"/>')
    out.append(
        f'<text x="{left + 20}" y="16">Longest sequence in 256 MiB a rank, 10 million parameters; dashed: doubling with the ranks</text>'
    )
    out.append(
        f'<line x1="{left}" y1="{height - bottom}" x2="{width - 10}" y2="{height - bottom}" stroke="black"/>'
    )
    out.append(
        f'<text x="14" y="{height / 2}" transform="rotate(-90 14 {height / 2})" text-anchor="middle">tokens</text></svg>'
    )
    return "\n".join(out) + "\n"


EVERYTHING = ("block_input", "attention", "qkv", "mlp")
KEEP = {f"memory.{k}": "keep" for k in EVERYTHING}
SETTINGS = {"plain: stage 0, everything kept": KEEP}
SETTINGS |= {f"ZeRO stage {i}": KEEP | {"parallel.zero": i} for i in (1, 2, 3)}
SETTINGS |= {f"recompute {k}": KEEP | {f"memory.{k}": "recompute"} for k in ("mlp", "qkv")}
SETTINGS["recompute attention and qkv"] = KEEP | {
    "memory.attention": "recompute",
    "memory.qkv": "recompute",
}
SETTINGS["recompute all except block inputs"] = {f"memory.{k}": "recompute" for k in EVERYTHING} | {
    "memory.block_input": "keep"
}
SETTINGS["recompute all, segments of 2"] = {f"memory.{k}": "recompute" for k in EVERYTHING} | {
    "memory.segment": 2
}
SETTINGS["offload all"] = {f"memory.{k}": "offload" for k in EVERYTHING} | {"memory.host": 2}
SETTINGS["recompute all except block inputs, offload block inputs"] = {
    f"memory.{k}": "recompute" for k in EVERYTHING
} | {"memory.block_input": "offload", "memory.host": 2}
SETTINGS["stage 3, recompute all, segments of 2"] = SETTINGS["recompute all, segments of 2"] | {
    "parallel.zero": 3
}


def cost(a) -> None:
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
                r = subprocess.run(
                    command(2, job, common | sets),
                    env=benchmarks.ENV,
                    capture_output=True,
                    text=True,
                )
                if r.returncode:
                    sys.exit(f"{name}: exit {r.returncode}\n{r.stderr[-1500:]}")
                records = [
                    json.loads(x)
                    for x in pathlib.Path(folder, "metrics.jsonl").read_text().splitlines()
                ][2:]
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
        "|setting|planned, MiB a rank|time / plain|",
        "|---|---|---|",
    ]
    text += [
        f"|{name}|{r['peak_bytes'] / 2**20:.1f}|{statistics.median(r['ratios']):.2f}|"
        for name, r in rows.items()
    ]
    (RESULTS / "memory-cost.md").write_text("\n".join(text) + "\n")
    print("\n".join(text))


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], sys.argv[3:])
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("what", choices=("longest", "cost"))
    p.add_argument("--rounds", type=int, default=5)
    a = p.parse_args()
    {"longest": longest, "cost": cost}[a.what](a)


if __name__ == "__main__":
    main()
