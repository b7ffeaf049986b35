#!/usr/bin/env python3
"""Runs our benchmarks and their peers in turn, and writes the ratios to results/.

    make bench    # builds our programs, and installs PyTorch and the peers' requirements into .venv
    benchmarks/run.py attention attention-bf16 gemm gemm-bf16 gdn ulysses a2a step step-bf16

Ours and each peer are separate processes, run in the order A B C A B C ..., so a change of the
machine's speed affects all of them. The ratio of a case is the median over the rounds of (least
time of the peer / our least time in the same round). We are faster if it is above 1. The share of
the peak is relative to the rate of multiply-adds measured in the same round; for BF16, to the rate
of products of pairs if the instruction set has them. No result decides a test.
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


def output(argv: list, **env) -> str:
    """Runs a program, and returns its standard output. Ends this program if it fails."""
    r = subprocess.run([str(a) for a in argv], env=ENV | env, capture_output=True, text=True)
    if r.returncode:
        sys.exit(f"{' '.join(map(str, argv))}: exit {r.returncode}\n{r.stderr[-2000:]}")
    return r.stdout


def lines(argv: list, **env) -> list[dict]:
    """Runs a program, and returns the JSON lines that it prints."""
    return [json.loads(x) for x in output(argv, **env).splitlines() if x.startswith("{")]


def metrics(folder: str | pathlib.Path) -> list[dict]:
    """Returns the lines of metrics.jsonl in the output folder of a run."""
    return [json.loads(x) for x in pathlib.Path(folder, "metrics.jsonl").read_text().splitlines()]


def positive(text: str) -> int:
    """Returns the number of a command-line option, which must be at least 1."""
    if (n := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{n}: must be at least 1")
    return n


def markdown(row: list[str]) -> str:
    """Returns a line of a table."""
    return "|".join(["", *row, ""])


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Returns the lines of a table."""
    return [markdown(row) for row in (head, ["---"] * len(head), *rows)]


def peaks(threads: int, dtype: str) -> dict[str, float]:
    """Measures the rate of multiply-adds of each instruction set of the processor, in GF/s."""
    measured = lines([BENCH, "peak", "--threads", threads, "--dtype", dtype])
    return {x["kernels"]: x["gflops"] for x in measured}


class Suite:
    """Programs that time the same cases.

    Attributes:
        ours: runs one round of our program, and returns its lines
        peers: the same for each peer, by name
        peak: measures the peak in GF/s, or None
    """

    def __init__(self, name: str, ours, peers: dict, peak=None):
        self.name, self.ours, self.peers, self.peak = name, ours, peers, peak

    def run(self, rounds: int) -> dict:
        """Returns the times, rates and ratios of each case in each round."""
        out: dict = {}
        for i in range(rounds):
            limit = self.peak() if self.peak else None
            ours = {x["case"]: x for x in self.ours()}
            peers = {p: {x["case"]: x for x in f()} for p, f in self.peers.items()}
            for case, x in ours.items():
                row = out.setdefault(
                    case,
                    dict(
                        seconds=[],
                        median_seconds=[],
                        gflops=[],
                        share=[],
                        ratios={p: [] for p in peers},
                    ),
                )
                row["seconds"].append(x["min_s"])
                row["median_seconds"].append(x["median_s"])
                if "gflops" in x:
                    row["gflops"].append(x["gflops"])
                    if limit:
                        row["share"].append(x["gflops"] / limit)
                for p, of_peer in peers.items():
                    if (same := x.get("peer_case", case)) in of_peer:
                        row["ratios"][p].append(of_peer[same]["min_s"] / x["min_s"])
            print(f"{self.name}: round {i + 1} of {rounds}", file=sys.stderr, flush=True)
        return out


def suites(a) -> dict:
    """Returns all suites by full name, such as attention-avx2."""

    def torch(script, *args, n=a.threads):
        command = [a.python, PEERS / script, "--threads", n, "--repeat", a.repeat, *args]
        return {
            "PyTorch": lambda: lines(command),
            "PyTorch unhandicapped": lambda: lines([PEERS / "unhandicapped.sh", *command]),
        }

    def bench(kind, *args, **env):
        return lambda: lines(
            [BENCH, kind, "--threads", a.threads, "--repeat", a.repeat, *args], **env
        )

    def under_mpi(n, kind, *args):
        return lambda: lines(
            [*MPI, "-n", n, BENCH, kind, "--threads", a.threads, "--repeat", a.repeat, *args]
        )

    made = {}
    for isa in a.isa:

        def add(kind, dtype, isa=isa):
            name = kind if dtype == "f32" else f"{kind}-{dtype}"
            made[f"{name}-{isa}"] = Suite(
                name,
                bench(kind, "--dtype", dtype, ULYSSES_ISA=isa),
                torch(f"{kind}.py", "--dtype", dtype),
                lambda: peaks(a.threads, dtype)[isa],
            )

        if isa != "avx512bf16":  # its F32 kernels equal the kernels of avx512
            add("attention", "f32")
            made[f"masks-{isa}"] = Suite(
                "masks",
                bench("masks", ULYSSES_ISA=isa),
                torch("flex.py"),
                lambda isa=isa: peaks(a.threads, "f32")[isa],
            )
            add("gdn", "f32")
            add("gemm", "f32")
        add("attention", "bf16")
        add("gemm", "bf16")
    made["ulysses"] = Suite(
        "ulysses", under_mpi(2, "ulysses"), torch("ulysses_gloo.py", "--ranks", 2)
    )
    for n, rings in ((2, [2]), (4, [2, 4])):
        for r in rings:
            peers = torch("ring_gloo.py", "--ranks", n)
            if n == 2:  # it cannot divide two key heads over four ranks
                peers["Ulysses on gloo"] = torch("ulysses_gloo.py", "--ranks", n)["PyTorch"]
            peers["our Ulysses"] = under_mpi(n, "ulysses")
            made[f"ring-{n // r}x{r}"] = Suite("ring", under_mpi(n, "ulysses", "--ring", r), peers)
    for n in (2, 4):
        made[f"a2a-{n}"] = Suite(
            "a2a",
            under_mpi(n, "a2a"),
            {"MPI_Alltoall": lambda n=n: lines([*MPI, "-n", n, ROOT / "bin" / "alltoall"])},
        )
    jobs = [ROOT / "examples" / "quickstart.toml", HERE / "step-qwen3.toml"]
    for dtype in ("f32", "bf16"):
        each = [torch("train_step.py", job, "--dtype", dtype) for job in jobs]
        peers = {p: lambda p=p, each=each: [x for f in each for x in f[p]()] for p in each[0]}
        if dtype == "bf16":
            weights = [
                torch("train_step.py", job, "--bf16-weights")["PyTorch unhandicapped"]
                for job in jobs
            ]
            peers["PyTorch unhandicapped, weights in BF16"] = lambda weights=weights: [
                x for f in weights for x in f()
            ]
        name = "step" if dtype == "f32" else f"step-{dtype}"
        made[name] = Suite(
            name, lambda dtype=dtype: [x for job in jobs for x in step(a, job, dtype)], peers
        )
    qwen, experts = HERE / "step-qwen3.toml", ROOT / "examples" / "moe.toml"
    made["lora"] = Suite(
        "lora",
        lambda: step(a, qwen, "f32", adapters_of(qwen)),
        torch("train_step.py", qwen, "--lora", RANK),
    )
    made["moe"] = Suite(
        "moe", lambda: step(a, experts, "f32", divided=True), torch("train_step.py", experts)
    )
    latent = HERE / "step-deepseek.toml"
    made["latent"] = Suite(
        "latent", lambda: step(a, latent, "f32", divided=True), torch("train_step.py", latent)
    )
    return made


RANK = 16  # of adapters


def adapters_of(job) -> list[str]:
    """Writes the model of a job as a folder. Returns the keys of a job with adapters beside it."""
    folder = ROOT / "out" / "bench-lora-base"
    sets = [f"output.dir={folder}", "output.overwrite=true", "train.steps=1", "eval.split=0.0"]
    sets += ["parallel.ulysses=1"]
    output([ROOT / "bin" / "ulysses-mpi", job] + [x for s in sets for x in ("--set", s)])
    return ["model.new={}", f"model.path={folder / 'model'}", f"lora.rank={RANK}"]


def step(a, job, dtype, more=(), divided=False) -> list[dict]:
    """Measures a training step on one rank with --threads threads, and on several ranks.

    The others are --threads ranks and four ranks, with one thread each. more are further keys. With
    divided, several ranks also divide the experts of a layer.
    """
    out = []
    meshes = [(ranks, False) for ranks in sorted({1, a.threads, 4})]
    meshes += [(ranks, True) for ranks, _ in meshes if divided and ranks > 1]
    for ranks, experts in meshes:
        folder = ROOT / "out" / f"bench-step-{ranks}"
        sets = [
            f"output.dir={folder}",
            "output.overwrite=true",
            "output.model=false",
            f"train.steps={a.repeat + 2}",
            "eval.split=0.0",
            f"parallel.ulysses={ranks}",
            f"device.dtype={dtype}",
            *more,
        ]
        if experts:
            sets.append(f"parallel.experts={ranks}")
        argv = [ROOT / "bin" / "ulysses-mpi", job] + [x for s in sets for x in ("--set", s)]
        if ranks > 1:
            argv = [*MPI, "-n", ranks, *argv]
        else:
            argv += ["--set", f"device.threads={a.threads}"]
        output(argv)
        seconds = [x["seconds"] for x in metrics(folder)][2:]  # the first two are a warm-up
        out.append(
            dict(
                case=f"{job.stem}-{ranks}-ranks" + ("-divided" if experts else ""),
                peer_case=job.stem,
                min_s=min(seconds),
                median_s=statistics.median(seconds),
            )
        )
    return out


def report(name: str, rows: dict, a) -> None:
    """Writes results/<name>.json and .md, and prints the table."""
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
    ]
    cells_of = []
    for case, r in rows.items():
        cells = [case, f"{1e3 * mid(r['seconds']):.3f}"]
        if share:
            cells += [f"{mid(r['gflops']):.0f}", f"{mid(r['share']):.2f}"]
        cells += [f"{mid(r['ratios'][p]):.2f}" if r["ratios"][p] else "-" for p in peers]
        cells_of.append(cells)
    text += table(head, cells_of)
    for p in peers:
        ratios = [mid(r["ratios"][p]) for r in rows.values() if r["ratios"][p]]
        if ratios:
            text += [
                "",
                f"{p} / ours: geometric mean {statistics.geometric_mean(ratios):.2f}, "
                f"least {min(ratios):.2f}",
            ]
    (HERE / "results" / f"{name}.md").write_text("\n".join(text) + "\n")
    print("\n".join(text), flush=True)


def cpu() -> str:
    """Returns the name of the processor."""
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
        help="attention, attention-bf16, masks, gemm, gemm-bf16, gdn, ulysses, ring, a2a, step, "
        "step-bf16, lora, moe, latent, or a "
        "full name such as attention-avx2",
    )
    p.add_argument("--rounds", type=positive, default=3)
    p.add_argument("--repeat", type=positive, default=5)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument(
        "--isa",
        default="avx512bf16,avx512,avx2",
        help="our instruction sets; those that the processor lacks are passed over",
    )
    p.add_argument(
        "--python",
        default=str(ROOT / ".venv" / "bin" / "python"),
        help="an interpreter with peers/requirements.txt",
    )
    a = p.parse_args()
    if not BENCH.exists():
        sys.exit(f"{BENCH.relative_to(ROOT)} is missing; run `make bench`")
    present = peaks(1, "bf16")
    lacking = [x for x in a.isa.split(",") if x not in present]
    if lacking:
        print("this processor lacks " + ", ".join(lacking), file=sys.stderr)
    a.isa = [x for x in a.isa.split(",") if x in present]
    chosen = {name: s for name, s in suites(a).items() if name in a.suite or s.name in a.suite}
    for x in a.suite:
        if not any(x in (name, s.name) for name, s in chosen.items()):
            sys.exit(f"no suite {x} on this processor")
    for name, s in chosen.items():
        report(name, s.run(a.rounds), a)


if __name__ == "__main__":
    main()
