#!/usr/bin/env python3
"""Benchmarks on a GPU, ours compared with PyTorch's flash and cuDNN backends.

    gpu_attention  attention, forward and backward, 8K to 128K tokens
    gpu_masks      attention with a window, soft cap, sinks, slopes, a block mask, and reproducible,
                   for which cuDNN has no kernels, compared with FlexAttention
    gpu_wgmma      attention with the kernels `wgmma`, which no call chooses yet
    gpu_layer      a decoder layer of Llama-8B, forward + backward, 32K to 512K tokens
    gpu_ops        operations bound by memory bandwidth, compared with a copy; products of the
                   layer, compared with torch.mm
    gpu_delta      the gated delta rule and the other operations of its layer, compared with
                   flash-linear-attention if it is installed, otherwise with transformers and
                   compiled PyTorch
    gpu_hybrid     a layer of linear attention of Qwen3.5's shape, forward + backward
    gpu_loss       head and loss, forward and backward, compared with the same in chunks
    gpu_step       three steps of gpu-step.toml, a model of the shape of Qwen3-4B with 128K tokens
                   and the optimizer's states in host memory
    ranks          the layer with 64K tokens on one rank, and on four ranks that share the GPU, as
                   threads and as processes
    gpu_host       the time in which the host enqueues a layer, compared with the layer's time

Each suite begins with a copy and a large matrix product. From their rates and the bytes and FLOP of
an operation follows the least time in which this GPU can do it (the floor). expected.json has the
share of it that an operation is expected to reach, and why; --expected prints the floors and
expected times for an H200 and measures nothing (docs/gpu-performance.md).

Ours and the peer run in turn as separate processes, so that both run at the same clocks. The
results are medians over the rounds and ratios (time of the peer / ours; above 1 we are faster).
They are written to gpu-<name of the GPU>.{md,json} after each suite, in $OUT if it is set, or in
results. Earlier results of other suites, in that file or in results, are kept. With --cases, the
results of other cases of a suite are kept as well.

A round starts only if --minutes allow another one; the first always runs. A program that exceeds
--minutes is ended, and the lines that it has printed count. A case is called less often than
--repeat says if that would exceed --longest. If a case fails, the others continue, and the exit
status is 1. A case that does not fit into the memory of the GPU is named and skipped. Without a
GPU, the exit status is 77.

    benchmarks/gpu.py [--suites gpu_ops,gpu_layer] [--cases 32k] [--rounds 3] [--minutes 8]
                      [--ulysses scripts/gpu-run.sh] [--python python3]
"""

import argparse
import datetime
import glob
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import gpu_report as report
import run as benchmarks

HERE = pathlib.Path(__file__).resolve().parent
SUITES = (
    "gpu_ops",
    "gpu_layer",
    "gpu_attention",
    "gpu_masks",
    "gpu_wgmma",
    "gpu_delta",
    "gpu_hybrid",
    "gpu_loss",
    "gpu_step",
    "ranks",
    "gpu_host",
)
# Settings of the program for a suite.
ENVIRONMENT = {
    "gpu_wgmma": {"ULYSSES_KERNEL": "attention_forward=wgmma,attention_backward=wgmma"},
}
mid = statistics.median
TIMEOUT = "the end of --minutes"  # in place of an exit status
failed = []  # programs that ended with an error


def has_gpu() -> bool:
    return smi("name") != "?" or bool(glob.glob("/dev/nvidia[0-9]*"))


def run(argv: list, seconds: float, **env: str) -> list[dict]:
    """Runs a program, and returns the JSON lines that it printed.

    A peer's exit status 77 means that there is no PyTorch with a GPU, which is no failure.
    """
    try:
        r = subprocess.run(
            [str(a) for a in argv],
            capture_output=True,
            text=True,
            timeout=max(1, seconds),
            env=dict(os.environ, **env),
        )
        out, err, code = r.stdout, r.stderr, r.returncode
    except subprocess.TimeoutExpired as e:
        out, err, code = (
            (e.stdout or b"").decode(),
            (e.stderr or b"").decode(),
            TIMEOUT,
        )
    for line in err.splitlines():
        print(f"  {line}", file=sys.stderr)
    if code:
        print(f"{' '.join(str(a) for a in argv)} ended with {code}", file=sys.stderr)
        if code in (6, 77) and not has_gpu():
            print("gpu-bench: no GPU on this machine; nothing was measured (77)", file=sys.stderr)
            sys.exit(77)
        if code not in (77, TIMEOUT):
            failed.append(f"{' '.join(pathlib.Path(str(x)).name for x in argv[:2])} ({code})")
    return [json.loads(x) for x in out.splitlines() if x.startswith("{") and x.endswith("}")]


def step(a: argparse.Namespace, seconds: float) -> list[dict]:
    """Runs the job of the suite gpu_step, and returns a line for the steps after the first."""
    with tempfile.TemporaryDirectory() as out:
        run(
            [a.ulysses, "run", a.job, "--set", f"output.dir={out}/run"],
            seconds,
            PROGRAM="ulysses-mpi",
        )
        metrics = pathlib.Path(out, "run", "metrics.jsonl")
        steps = (
            [json.loads(x) for x in metrics.read_text().splitlines()] if metrics.exists() else []
        )
    steps = [x for x in steps if x["step"] > 1]
    if not steps:
        return []
    best = min(steps, key=lambda x: x["seconds"])
    flops = best["model_tflops"] * 1e12 * best["seconds"]
    return [
        dict(
            peer="ulysses",
            case=pathlib.Path(a.job).stem,
            op="step",
            min_s=best["seconds"],
            median_s=mid(x["seconds"] for x in steps),
            gflops=best["model_tflops"] * 1e3,
            flops=flops,
            bytes=0,
            tokens=best["tokens"],
            peak_gib=best["peak_bytes"] / 2**30,
        )
    ]


def smi(query: str) -> str:
    """Returns a property of the first GPU by nvidia-smi, or "?"."""
    try:
        return (
            subprocess.run(
                ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
                capture_output=True,
                text=True,
            )
            .stdout.strip()
            .splitlines()[0]
        )
    except (OSError, IndexError):
        return "?"


def measure(a: argparse.Namespace, save) -> None:
    """Runs the suites, and calls save(times, lines, devices) after each one.

    times[suite, case, op][program] is a list of seconds, one for each round. lines has the last
    line of each case by the same keys. devices has the line about the device of each program.
    """
    times, lines, devices, began, longest = {}, {}, {}, time.time(), 0.0
    left = lambda: 60 * a.minutes - (time.time() - began)
    for r in range(a.rounds):
        if r > 0 and left() < 1.1 * longest:
            print(
                f"{r} rounds of {a.rounds}: there is no time for another in {a.minutes:g} minutes",
                file=sys.stderr,
            )
            break
        start = time.time()
        for suite in a.suites.split(","):
            print(
                f"round {r + 1} of {a.rounds}, {left():.0f} s left: {suite}",
                file=sys.stderr,
                flush=True,
            )
            cases = a.cases or ("64k" if suite == "ranks" else "")
            more = ["--repeat", a.repeat, "--cases", cases, "--longest"]
            ours = lambda name, *flags, **env: run(
                [a.ulysses, name, *more, f"{a.longest}s", *flags], left(), **env
            )
            if suite == "gpu_step":
                sets = dict(ulysses=step(a, left()))
            elif suite == "ranks":
                sets = dict(
                    ulysses=ours("gpu_layer"),
                    threads=ours("gpu_layer", "--ranks", "4"),
                    processes=ours("gpu_layer", RANKS="4"),
                )
            else:
                sets = dict(ulysses=ours(suite, **ENVIRONMENT.get(suite, {})))
                if suite != "gpu_host":
                    peer = [a.python, HERE / "peers" / "torch_gpu.py", "--suite", suite]
                    sets["peer"] = run([*peer, *more, a.longest], left())
            for who, x in (
                (x["peer"] if s == "peer" else s, x) for s, all in sets.items() for x in all
            ):
                if "device" in (x["case"], who):
                    devices[who] = x
                    continue
                key = suite, x["case"], x["op"]
                times.setdefault(key, {}).setdefault(who, []).append(x["median_s"])
                lines.setdefault(key, {})[who] = x
            save(times, lines, devices)
        longest = max(longest, time.time() - start)


def earlier(files: list[pathlib.Path], now: dict[str, str], measured: dict, some: bool) -> dict:
    """Returns the content of the first file there is, without what the present run replaces.

    now has the name of the present run of each suite. A run of all cases replaces a suite. A run of
    some cases replaces what it has measured, and the results of the last run of the same cases.
    """
    text = next((f.read_text() for f in files if f.exists()), '{"runs": {}, "cases": {}}')
    kept, rows = json.loads(text), {}
    for name, row in kept["cases"].items():
        suite, *case, op = name.split(" ")
        key = suite, " ".join(case), op
        row.setdefault("run", suite)
        other = some and key not in measured and row["run"] != now.get(suite)
        if suite not in now or other:
            rows[key] = row
    of = {row["run"] for row in rows.values()}
    return dict(runs={n: run for n, run in kept["runs"].items() if n in of}, cases=rows)


def write(a: argparse.Namespace, times: dict, lines: dict, devices: dict) -> str:
    """Writes the results so far, and returns the Markdown text."""
    rows = report.rows_of(times, lines)
    if not rows:
        return ""
    name = smi("name")
    ours, peer = devices.get("ulysses", {}), devices.get("device", {})
    info = dict(
        driver=smi("driver_version"),
        date=datetime.date.today().isoformat(),
        rounds=max(len(r["seconds"]["ulysses"]) for r in rows.values()),
        repeat=a.repeat,
        clocks=smi("clocks.sm,clocks.mem,power.draw,temperature.gpu"),
        kernels=ours.get("kernels"),
        torch=peer.get("torch"),
        cudnn=peer.get("cudnn"),
    )
    now = {k[0]: f"{k[0]} {a.cases}".strip() for k in rows}
    for key, row in rows.items():
        row["run"] = now[key[0]]
    out, file = pathlib.Path(a.out), "gpu-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    out.mkdir(parents=True, exist_ok=True)
    stem = out / file
    files = [stem.with_suffix(".json"), HERE / "results" / f"{file}.json"]
    kept = earlier(files, now, rows, bool(a.cases))
    runs, rows = kept["runs"] | dict.fromkeys(now.values(), info), kept["cases"] | rows
    runs = {n: runs[n] for n in sorted(runs, key=lambda n: SUITES.index(n.split(" ")[0]))}
    stem.with_suffix(".json").write_text(
        json.dumps(
            dict(gpu=name, runs=runs, cases={" ".join(k): r for k, r in rows.items()}), indent=1
        )
        + "\n"
    )
    text = "\n".join([f"# {name}", "", *report.conditions(runs), "", *report.tables(rows)])
    stem.with_suffix(".md").write_text(text)
    return text


def expected_table(a: argparse.Namespace) -> list[str]:
    """Returns the table of docs/gpu-performance.md: every operation with its expected time.

    The program prints bytes and FLOP without running kernels, on the emulated plug-in.
    """
    plugin = HERE.parent / "build" / "cuda" / "libulysses_cuda_emulated.so"
    env = dict(
        ULYSSES_CUDA_PLUGIN=os.environ.get("ULYSSES_CUDA_PLUGIN", str(plugin)),
        ULYSSES_EMULATED_SKIP="1",
        ULYSSES_EMULATED_MEMORY=str(200 << 30),
    )
    rates, body = report.EXPECTED["rates"], []
    for suite in (s for s in a.suites.split(",") if s not in ("gpu_step", "ranks", "gpu_host")):
        argv = [a.ulysses, suite, "--expected", "--cases", a.cases]
        lines = run(argv, 60 * a.minutes, **env, **ENVIRONMENT.get(suite, {}))
        halves = ("forward", "backward") if suite in ("gpu_layer", "gpu_hybrid") else ()
        for x in (x for x in lines if x.get("op") not in (None, "roof", *halves)):
            key = suite, x["case"], x["op"]
            r = report.roofline(key, x, rates["copy"], rates["product"])
            if not r:
                raise SystemExit(f"expected.json has no row for {' '.join(key)}")
            body.append(
                [
                    suite.removeprefix("gpu_"),
                    x["case"],
                    x["op"],
                    report.show(x["bytes"] / 1e9) if x["bytes"] else "-",
                    report.show(x["flops"] / 1e12) if x["flops"] else "-",
                    report.show(1e3 * r["floor_s"], 3),
                    report.show(1e3 * r["expected_s"], 2),
                    report.expectation(*key)["why"],
                ]
            )
    head = ["suite", "case", "op", "GB", "TFLOP", "floor, ms", "expected, ms", "reason"]
    return benchmarks.table(head, body)


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--repeat", type=int, default=7)
    p.add_argument("--job", default=str(HERE / "gpu-step.toml"), help="the job of gpu_step")
    p.add_argument("--minutes", type=float, default=8)
    p.add_argument(
        "--longest", type=float, default=30, help="seconds that the calls of a case may take"
    )
    p.add_argument("--cases", default="")
    p.add_argument("--suites", default=",".join(SUITES))
    p.add_argument(
        "--ulysses",
        default=str(HERE.parent / "scripts" / "gpu-run.sh"),
        help="the program that starts ulysses-bench, on RANKS processes if RANKS is set",
    )
    p.add_argument(
        "--python",
        default="python3",
        help="an interpreter with torch, and transformers for the layer",
    )
    p.add_argument("--out", default=os.environ.get("OUT") or str(HERE / "results"))
    p.add_argument("--expected", action="store_true", help="print expected times for an H200")
    a = p.parse_args()
    if unknown := set(a.suites.split(",")) - set(SUITES):
        p.error(f"--suites {','.join(sorted(unknown))}; give some of {', '.join(SUITES)}")

    if a.expected:
        print("\n".join(expected_table(a)))
        sys.exit(1 if failed else 0)
    text = []
    measure(a, lambda *measured: text.append(write(a, *measured)))
    if not any(text):
        print("gpu-bench: nothing was measured", file=sys.stderr)
        sys.exit(1)
    print(text[-1])
    if failed:
        print(f"gpu-bench: {len(failed)} programs failed: {', '.join(failed)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
