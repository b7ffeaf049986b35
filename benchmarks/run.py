#!/usr/bin/env python3
"""Runs our benchmarks and their peers in turn and writes the ratios to results/.

    make bench               # builds our programs; PyTorch and the peers' requirements go into .venv
    benchmarks/run.py attention attention-bf16 gemm gemm-bf16 gdn ulysses a2a step step-bf16

Ours and each peer are whole processes run A B C A B C ..., so that a machine whose speed drifts does so for all. A case's ratio is the median
over the rounds of (peer's least time / our least time) of that round: above 1 we are faster. The share of the peak is of the rate of multiply-adds
measured in the same round, for BF16 that of its products by pairs where the set has them. Nothing here decides a test.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
BENCH = ROOT / "bin" / "ulysses-bench"
PEERS = HERE / "peers"
MPI = ["mpirun", "--oversubscribe", "--bind-to", "none"]
ENV = dict(
    os.environ,
    OMPI_ALLOW_RUN_AS_ROOT="1",
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    OMPI_MCA_btl_vader_single_copy_mechanism="none",
    OMPI_MCA_rmaps_base_oversubscribe="1",
    OMPI_MCA_hwloc_base_binding_policy="none",
)


def lines(argv: list, **env) -> list[dict]:
    """The JSON lines a program prints."""
    r = subprocess.run([str(a) for a in argv], env=ENV | env, capture_output=True, text=True)
    if r.returncode:
        sys.exit(f"{' '.join(map(str, argv))}: exit {r.returncode}\n{r.stderr[-2000:]}")
    return [json.loads(x) for x in r.stdout.splitlines() if x.startswith("{")]


def peak(threads: int, isa: str, dtype: str) -> float:
    return max(
        x["gflops"]
        for x in lines([BENCH, "peak", "--threads", threads, "--dtype", dtype])
        if x["kernels"] == isa
    )


class Suite:
    """Programs that time the same cases. ours and peers map a name to a function that runs one round and returns its lines."""

    def __init__(self, name: str, ours, peers: dict, peak=None):
        self.name, self.ours, self.peers, self.peak = name, ours, peers, peak

    def run(self, rounds: int) -> dict:
        out: dict = {}
        for i in range(rounds):
            limit = self.peak() if self.peak else None
            mine = {x["case"]: x for x in self.ours()}
            theirs = {p: {x["case"]: x for x in f()} for p, f in self.peers.items()}
            for case, x in mine.items():
                row = out.setdefault(
                    case,
                    dict(
                        seconds=[],
                        median_seconds=[],
                        gflops=[],
                        share=[],
                        ratios={p: [] for p in theirs},
                    ),
                )
                row["seconds"].append(x["min_s"])
                row["median_seconds"].append(x["median_s"])
                if "gflops" in x:
                    row["gflops"].append(x["gflops"])
                    if limit:
                        row["share"].append(x["gflops"] / limit)
                for p, t in theirs.items():
                    if (other := x.get("beside", case)) in t:
                        row["ratios"][p].append(t[other]["min_s"] / x["min_s"])
            print(f"{self.name}: round {i + 1} of {rounds}", file=sys.stderr, flush=True)
        return out


def suites(a) -> dict:
    py = a.python
    fair = [PEERS / "unhandicapped.sh"]

    def torch(script, *args, n=a.threads):
        command = [py, PEERS / script, "--threads", n, "--repeat", a.repeat, *args]
        return {
            "PyTorch": lambda: lines(command),
            "PyTorch unhandicapped": lambda: lines([*fair, *command]),
        }

    def bench(kind, *args, **env):
        return lambda: lines(
            [BENCH, kind, "--threads", a.threads, "--repeat", a.repeat, *args], **env
        )

    def under_mpi(n, kind):
        return lambda: lines(
            [*MPI, "-n", n, BENCH, kind, "--threads", a.threads, "--repeat", a.repeat]
        )

    made = {}
    for isa in a.isa.split(","):

        def add(kind, dtype, isa=isa):
            name = kind if dtype == "f32" else f"{kind}-{dtype}"
            top = lambda: peak(a.threads, isa, dtype)
            made[f"{name}-{isa}"] = Suite(
                name,
                bench(kind, "--dtype", dtype, ULYSSES_ISA=isa),
                torch(f"{kind}.py", "--dtype", dtype),
                top,
            )

        if isa != "avx512bf16":  # whose kernels of F32 are those of avx512
            add("attention", "f32")
            add("gdn", "f32")
            add("gemm", "f32")
        add("attention", "bf16")
        add("gemm", "bf16")
    made["ulysses"] = Suite(
        "ulysses", under_mpi(2, "ulysses"), torch("ulysses_gloo.py", "--ranks", 2)
    )
    for n in (2, 4):
        made[f"a2a-{n}"] = Suite(
            "a2a",
            under_mpi(n, "a2a"),
            {"MPI_Alltoall": lambda n=n: lines([*MPI, "-n", n, ROOT / "bin" / "alltoall"])},
        )
    jobs = [ROOT / "examples" / "quickstart.toml", HERE / "step-qwen3.toml"]
    for dtype in ("f32", "bf16"):
        both = [torch("train_step.py", job, "--dtype", dtype) for job in jobs]
        peers = {p: lambda p=p, both=both: [x for f in both for x in f[p]()] for p in both[0]}
        if dtype == "bf16":
            pure = [
                torch("train_step.py", job, "--bf16-weights")["PyTorch unhandicapped"]
                for job in jobs
            ]
            peers["PyTorch unhandicapped, weights in BF16"] = lambda pure=pure: [
                x for f in pure for x in f()
            ]
        name = "step" if dtype == "f32" else f"step-{dtype}"
        made[name] = Suite(
            name, lambda dtype=dtype: [x for job in jobs for x in step(a, job, dtype)], peers
        )
    return made


def step(a, job, dtype) -> list[dict]:
    """A training step on one rank with the peer's threads, on as many ranks of one thread, and on four ranks."""
    out = []
    for ranks in sorted({1, a.threads, 4}):
        folder = ROOT / "out" / f"bench-step-{ranks}"
        sets = [
            f"output.dir={folder}",
            "output.overwrite=true",
            "output.model=false",
            f"train.steps={a.repeat + 2}",
            "eval.split=0.0",
            f"parallel.ulysses={ranks}",
            f"device.dtype={dtype}",
        ]
        argv = [ROOT / "bin" / "ulysses-mpi", job] + [x for s in sets for x in ("--set", s)]
        if ranks > 1:
            argv = [*MPI, "-n", ranks, *argv]
        else:
            argv += ["--set", f"device.threads={a.threads}"]
        lines(argv)
        seconds = [
            json.loads(x)["seconds"] for x in (folder / "metrics.jsonl").read_text().splitlines()
        ][2:]
        out.append(
            dict(
                case=f"{job.stem}-{ranks}-ranks",
                beside=job.stem,
                min_s=min(seconds),
                median_s=statistics.median(seconds),
            )
        )
    return out


def report(name: str, rows: dict, a) -> None:
    mid = statistics.median
    info = dict(
        suite=name,
        date=datetime.date.today().isoformat(),
        cpu=cpu(),
        threads=a.threads,
        rounds=a.rounds,
        repeat=a.repeat,
        system=platform.platform(terse=True),
    )
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / f"{name}.json").write_text(
        json.dumps(dict(info, cases=rows), indent=1) + "\n"
    )
    peers = list(next(iter(rows.values()))["ratios"])
    share = any(r["share"] for r in rows.values())
    head = (
        ["case", "ms"]
        + (["GF/s"] if share else [])
        + (["of peak"] if share else [])
        + [f"{p} / ours" for p in peers]
    )
    text = [
        f"# {name}",
        "",
        ", ".join(f"{k} {v}" for k, v in info.items() if k != "suite"),
        "",
        "|".join(["", *head, ""]),
        "|".join(["", *["---"] * len(head), ""]),
    ]
    for case, r in rows.items():
        cells = [case, f"{1e3 * mid(r['seconds']):.3f}"]
        if share:
            cells += [f"{mid(r['gflops']):.0f}", f"{mid(r['share']):.2f}"]
        cells += [f"{mid(r['ratios'][p]):.2f}" if r["ratios"][p] else "-" for p in peers]
        text.append("|".join(["", *cells, ""]))
    for p in peers:
        ratios = [mid(r["ratios"][p]) for r in rows.values() if r["ratios"][p]]
        if ratios:
            text += [
                "",
                f"{p} / ours: geometric mean {statistics.geometric_mean(ratios):.2f}, least {min(ratios):.2f}",
            ]
    (HERE / "results" / f"{name}.md").write_text("\n".join(text) + "\n")
    print("\n".join(text), flush=True)


def cpu() -> str:
    info = pathlib.Path("/proc/cpuinfo").read_text()
    field = lambda k: next(
        (x.split(":")[1].strip() for x in info.splitlines() if x.startswith(k)), "?"
    )
    return f"{field('model name')} family {field('cpu family')} model {field('model	')}"


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "suite",
        nargs="+",
        help="attention, attention-bf16, gemm, gemm-bf16, gdn, ulysses, a2a, step, or a full name such as attention-avx2",
    )
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--repeat", type=int, default=5)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--isa", default="avx512bf16,avx512,avx2", help="instruction sets of ours")
    p.add_argument(
        "--python",
        default=str(ROOT / ".venv" / "bin" / "python"),
        help="a Python with peers/requirements.txt",
    )
    a = p.parse_args()
    if not BENCH.exists():
        sys.exit(f"{BENCH.relative_to(ROOT)} is missing: run `make bench` first")
    for name, s in suites(a).items():
        if name in a.suite or s.name in a.suite:
            report(name, s.run(a.rounds), a)


if __name__ == "__main__":
    main()
