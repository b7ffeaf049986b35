#!/usr/bin/env python3
"""The GPU's suites, ours beside PyTorch's flash and cuDNN backends, in one run.

    gpu_attention  attention forward and backward, 8K to 128K tokens
    gpu_layer      a decoder layer of Llama-8B's shape, forward + backward, 32K to 128K tokens
    gpu_ops        operations that wait for memory, as shares of what a copy does; products of the layer beside torch.matmul's
    ranks          the layer at 64K tokens on one rank and on four that share the GPU, as threads and as processes
    gpu_host       what the host does to enqueue a layer, against the layer's time

Ours and the peer run in turn, whole processes, so that both see the same clocks. Results go to results/<name of the GPU>.{md,json}: medians over the
rounds, and the ratios (peer's time / ours; above 1 we are faster), written after each suite. Rounds are begun while --minutes allow, one at least; a program
that runs past them is ended, and what it printed counts. Where a program fails the others go on, and the exit status is 1. Without a GPU it says so and exits
with 77.

    benchmarks/gpu.py [--suites gpu_ops,gpu_layer] [--cases 32k] [--rounds 3] [--minutes 9] [--ulysses scripts/gpu-run.sh] [--python python3]
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
import time

HERE = pathlib.Path(__file__).resolve().parent
SUITES = ("gpu_attention", "gpu_layer", "gpu_ops", "ranks", "gpu_host")
mid = statistics.median
failed = []  # programs that ended with an error


def gpus() -> bool:
    return smi("name") != "?" or bool(glob.glob("/dev/nvidia[0-9]*"))


def run(argv: list, seconds: float, **env: str) -> list[dict]:
    """The lines that a program printed. One of PyTorch's that ends with 77 has no PyTorch with a GPU, which is no failure."""
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
            "the end of --minutes",
        )
    for line in err.splitlines():
        print(f"  {line}", file=sys.stderr)
    if code:
        print(f"{' '.join(str(a) for a in argv)} ended with {code}", file=sys.stderr)
        if code in (6, 77) and not gpus():
            print("gpu-bench: no GPU on this machine: nothing was measured (77)", file=sys.stderr)
            sys.exit(77)
        if code not in (77, "the end of --minutes"):
            failed.append(f"{' '.join(pathlib.Path(str(x)).name for x in argv[:2])} ({code})")
    return [json.loads(x) for x in out.splitlines() if x.startswith("{") and x.endswith("}")]


def smi(query: str) -> str:
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
    """Calls save after each suite with times[suite, case, op][who] = a list of seconds, one a round; the last line of each case, by the same keys and who; and
    who ran on what."""
    times, lines, devices, began, longest = {}, {}, {}, time.time(), 0.0
    left = lambda: 60 * a.minutes - (time.time() - began)
    for r in range(a.rounds):
        if r > 0 and left() < 1.1 * longest:
            print(
                f"{r} rounds of {a.rounds}: another would not end within {a.minutes:g} minutes",
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
            more = ["--repeat", a.repeat, "--cases", a.cases]
            if suite == "ranks":
                more[-1] = a.cases or "64k"
                rank = lambda *flags, **env: run(
                    [a.ulysses, "gpu_layer", *more, *flags], left(), **env
                )
                sets = dict(ulysses=rank(), threads=rank("--ranks", "4"), processes=rank(RANKS="4"))
            else:
                sets = dict(ulysses=run([a.ulysses, suite, *more], left()))
                if suite != "gpu_host":
                    sets["peer"] = run(
                        [a.python, HERE / "peers" / "torch_gpu.py", "--suite", suite, *more], left()
                    )
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


def rows_of(times: dict, lines: dict) -> dict:
    """What each case comes to: seconds of all, our rate, and the ratios to each peer of the same round."""
    rows = {}
    for key, who in times.items():
        if "ulysses" not in who:
            continue
        x, t = lines[key]["ulysses"], mid(who["ulysses"])
        row = dict(seconds=who, median_s=t)
        for rate, name, unit in (("gflops", "tflops", 1e3), ("gbs", "gbs", 1)):
            if rate in x:
                row[name] = x[rate] * x["min_s"] / unit / t
        for peer in who:
            if peer != "ulysses":
                row[f"{peer}_over_ours"] = mid(b / c for b, c in zip(who[peer], who["ulysses"]))
        rows[key] = row | {
            k: x[k] for k in ("calls_a_pass", "allocations_a_pass", "comm") if k in x
        }
    return rows


def show(x: float | None, digits: int = 2) -> str:
    return "-" if x is None else f"{x:.{digits}f}"


def tables(rows: dict) -> list[str]:
    of = lambda suite, op=None: [
        (k, r) for k, r in rows.items() if k[0] == suite and (op is None or k[2] == op)
    ]
    text = []

    def table(head: list[str], body: list[list[str]]) -> None:
        if body:
            text.extend(
                [
                    "|".join(["", *head, ""]),
                    "|".join(["", *["---"] * len(head), ""]),
                    *("|".join(["", *r, ""]) for r in body),
                    "",
                ]
            )

    table(
        ["case", "op", "ms", "TFLOP/s", "flash / ours", "cuDNN / ours"],
        [
            [
                k[1],
                k[2],
                show(1e3 * r["median_s"], 3),
                show(r.get("tflops"), 0),
                show(r.get("flash_over_ours")),
                show(r.get("cudnn_over_ours")),
            ]
            for suite in ("gpu_attention", "gpu_layer")
            for k, r in of(suite)
        ],
    )
    copy = next((r["gbs"] for k, r in of("gpu_ops", "memory") if k[1] == "copy"), None)
    table(
        ["operation", "ms", "GB/s", "of a copy"],
        [
            [k[1], show(1e3 * r["median_s"], 3), show(r["gbs"], 0), show(copy and r["gbs"] / copy)]
            for k, r in of("gpu_ops", "memory")
        ],
    )
    table(
        ["product", "ms", "TFLOP/s", "torch / ours"],
        [
            [
                k[1],
                show(1e3 * r["median_s"], 3),
                show(r["tflops"], 0),
                show(r.get("torch_over_ours")),
            ]
            for k, r in of("gpu_ops", "product")
        ],
    )
    table(
        ["case", "op", "one rank, ms", "4 threads / one rank", "4 processes / one rank"],
        [
            [
                k[1],
                k[2],
                show(1e3 * r["median_s"], 1),
                show(r.get("threads_over_ours"), 3),
                show(r.get("processes_over_ours"), 3),
            ]
            for k, r in of("ranks")
        ],
    )
    layer = next((r["median_s"] for k, r in of("gpu_layer", "forward+backward")), None)
    for k, r in of("gpu_host"):
        share = f", {100 * r['median_s'] / layer:.2f} % of the first layer above" if layer else ""
        text += [
            f"The host takes {1e6 * r['median_s']:.0f} µs to {k[1]}, forward and backward{share}; a pass is {r['calls_a_pass']:.0f} calls into C, "
            f"{r['allocations_a_pass']:.0f} allocations.",
            "",
        ]
    return text


def write(a: argparse.Namespace, times: dict, lines: dict, devices: dict) -> str:
    """Writes what there is so far, and returns it as text."""
    rows = rows_of(times, lines)
    if not rows:
        return ""
    name, driver = smi("name"), smi("driver_version")
    ours, peer = devices.get("ulysses", {}), devices.get("device", {})
    info = dict(
        gpu=name,
        driver=driver,
        date=datetime.date.today().isoformat(),
        rounds=max(len(r["seconds"]["ulysses"]) for r in rows.values()),
        repeat=a.repeat,
        clocks=smi("clocks.sm,clocks.mem,power.draw,temperature.gpu"),
        ours=ours,
        peer=peer,
    )
    head = [
        f"# {name}",
        "",
        f"driver {driver}, {info['date']}, {info['rounds']} rounds of {a.repeat}; {ours.get('kernels')}; torch {peer.get('torch')}, "
        f"cuDNN {peer.get('cudnn')}; bf16; at the end {info['clocks']}",
        "",
    ]
    out = pathlib.Path(a.out)
    out.mkdir(parents=True, exist_ok=True)
    stem = out / ("gpu-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"))
    stem.with_suffix(".json").write_text(
        json.dumps(dict(info, cases={" ".join(k): r for k, r in rows.items()}), indent=1) + "\n"
    )
    text = "\n".join(head + tables(rows))
    stem.with_suffix(".md").write_text(text)
    return text


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--repeat", type=int, default=7)
    p.add_argument("--minutes", type=float, default=9)
    p.add_argument("--cases", default="")
    p.add_argument("--suites", default=",".join(SUITES))
    p.add_argument(
        "--ulysses",
        default=str(HERE.parent / "scripts" / "gpu-run.sh"),
        help="starts ulysses-bench, on RANKS processes where that is set",
    )
    p.add_argument(
        "--python", default="python3", help="one with torch (and transformers for the layer)"
    )
    p.add_argument("--out", default=str(HERE / "results"))
    a = p.parse_args()
    if unknown := set(a.suites.split(",")) - set(SUITES):
        p.error(f"--suites {','.join(sorted(unknown))}: of {', '.join(SUITES)}")

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
