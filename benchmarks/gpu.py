#!/usr/bin/env python3
"""Attention and a decoder layer on the GPU, ours beside PyTorch's flash and cuDNN backends, in one run.

Ours and the peer run in turn, whole processes, so that both see the same clocks. Results go to results/<name of the GPU>.{md,json}: medians over the
rounds, and the ratios (peer's time / ours; above 1 we are faster). Without a GPU it says so and exits with 77.

    benchmarks/gpu.py [--rounds 3] [--ulysses bin/ulysses-bench] [--python python3]
"""

import argparse
import datetime
import json
import pathlib
import re
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
SUITES = ("gpu_attention", "gpu_layer")


def lines(argv: list[str]) -> list[dict]:
    r = subprocess.run([str(a) for a in argv], capture_output=True, text=True)
    for line in r.stderr.splitlines():
        print(f"  {line}", file=sys.stderr)
    if r.returncode:
        print(f"{argv[0]} ended with {r.returncode}", file=sys.stderr)
        if r.returncode in (6, 77):
            sys.exit(77)
    return [json.loads(x) for x in r.stdout.splitlines() if x.startswith("{")]


def smi(query: str) -> str:
    try:
        return subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True).stdout.strip().splitlines()[0]
    except (OSError, IndexError):
        return "?"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--repeat", type=int, default=7)
    p.add_argument("--cases", default="")
    p.add_argument("--suites", default=",".join(SUITES))
    p.add_argument("--ulysses", default=str(HERE.parent / "bin" / "ulysses-bench"))
    p.add_argument("--python", default="python3", help="one with torch (and transformers for the layer)")
    p.add_argument("--out", default=str(HERE / "results"))
    a = p.parse_args()

    device, times, rates = {}, {}, {}  # times[case, op][who] = a list of seconds, one a round
    for r in range(a.rounds):
        for suite in a.suites.split(","):
            print(f"round {r + 1} of {a.rounds}: {suite}", file=sys.stderr, flush=True)
            more = ["--repeat", a.repeat, "--cases", a.cases]
            ours = lines([a.ulysses, suite, *more])
            peer = lines([a.python, HERE / "peers" / "torch_gpu.py", "--suite", suite, *more])
            for x in ours + peer:
                if x["case"] == "device" or x["peer"] == "device":
                    device[x["peer"]] = x
                    continue
                key = x["case"], x["op"]
                times.setdefault(key, {}).setdefault(x["peer"], []).append(x["median_s"])
                if x["peer"] == "ulysses":
                    rates[key] = x["gflops"] * x["min_s"] / 1e3  # TFLOP of the case
    if not times:
        print("nothing was measured", file=sys.stderr)
        sys.exit(77)

    mid = statistics.median
    name, driver = smi("name"), smi("driver_version")
    info = dict(gpu=name, driver=driver, date=datetime.date.today().isoformat(), rounds=a.rounds, repeat=a.repeat, ours=device.get("ulysses"), peer=device.get("device"))
    rows, table = {}, ["|case|op|ms|TFLOP/s|flash / ours|cuDNN / ours|", "|---|---|---|---|---|---|"]
    for (case, op), who in times.items():
        if "ulysses" not in who:
            continue
        ratio = lambda peer: mid(b / c for b, c in zip(who[peer], who["ulysses"])) if peer in who else None
        t, flash, cudnn = mid(who["ulysses"]), ratio("flash"), ratio("cudnn")
        rows[f"{case} {op}"] = dict(seconds=who, tflops=rates[case, op] / t, flash_over_ours=flash, cudnn_over_ours=cudnn)
        show = lambda x: "-" if x is None else f"{x:.2f}"
        table.append(f"|{case}|{op}|{1e3 * t:.3f}|{rates[case, op] / t:.0f}|{show(flash)}|{show(cudnn)}|")
    head = [f"# {name}", "", f"driver {driver}, {info['date']}, {a.rounds} rounds of {a.repeat}; {(info['ours'] or {}).get('kernels')}; "
            f"torch {(info['peer'] or {}).get('torch')}, cuDNN {(info['peer'] or {}).get('cudnn')}; bf16", ""]
    out = pathlib.Path(a.out)
    out.mkdir(parents=True, exist_ok=True)
    stem = out / ("gpu-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"))
    stem.with_suffix(".json").write_text(json.dumps(dict(info, cases=rows), indent=1) + "\n")
    stem.with_suffix(".md").write_text("\n".join(head + table) + "\n")
    print("\n".join(head + table))


if __name__ == "__main__":
    main()
