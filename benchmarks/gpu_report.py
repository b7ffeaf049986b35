"""The rows and tables that gpu.py writes: medians, ratios to peers, floors and expected times."""

import json
import pathlib
import statistics

import run as benchmarks

EXPECTED = json.loads((pathlib.Path(__file__).resolve().parent / "expected.json").read_text())
mid = statistics.median


def rows_of(times: dict, lines: dict) -> dict:
    """Returns for each case the seconds of all programs, our rate, and the ratio to each peer."""
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
            k: x[k]
            for k in "flops,bytes,calls_a_pass,allocations_a_pass,comm,tokens,peak_gib".split(",")
            if k in x
        }
    for key, row in rows.items():
        of = lambda name, rate: rows.get((key[0], name, "roof"), {}).get(rate)
        row.update(roofline(key, row, of("copy", "gbs"), of("product", "tflops")))
    return rows


def expectation(suite: str, case: str, op: str) -> dict:
    """Returns the first row of expected.json that fits an operation, or {}."""
    for row in EXPECTED["rows"]:
        if row["suite"] == suite and row.get("op", op) == op and row.get("case", "") in case:
            return row
    return {}


def roofline(key: tuple, row: dict, copy: float | None, product: float | None) -> dict:
    """Returns the floor of an operation and the expected time, in seconds.

    copy is the rate of the memory in GB/s, product the rate of matrix products in TFLOP/s.
    """
    expected = expectation(key[0], key[1], key[2])
    if not (copy and product and expected):
        return {}
    floor = max(row.get("bytes", 0) / copy / 1e9, row.get("flops", 0) / product / 1e12)
    return dict(floor_s=floor, expected_s=floor / expected["share"])


def show(x: float | None, digits: int = 2) -> str:
    return "-" if x is None else f"{x:.{digits}f}"


def tables(rows: dict) -> list[str]:
    """Returns the lines of the Markdown tables."""
    of = lambda suite, op=None: [
        (k, r) for k, r in rows.items() if k[0] == suite and (op is None or k[2] == op)
    ]
    text = []

    def table(head: list[str], body: list[list[str]]) -> None:
        if body:
            text.extend([*benchmarks.table(head, body), ""])

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
            if k[2] != "roof"
        ],
    )
    peers = lambda r: [k for k in r if k.endswith("_over_ours")]
    table(
        ["case", "op", "ms", "TFLOP/s", "peer", "peer / ours"],
        [
            [
                k[1],
                k[2],
                show(1e3 * r["median_s"], 3),
                show(r.get("tflops"), 0),
                ", ".join(p.removesuffix("_over_ours") for p in peers(r)) or "-",
                ", ".join(show(r[p]) for p in peers(r)) or "-",
            ]
            for suite in ("gpu_masks", "gpu_wgmma", "gpu_delta", "gpu_hybrid", "gpu_loss")
            for k, r in of(suite)
            if k[2] not in ("memory", "roof")
        ],
    )
    for suite in ("gpu_ops", "gpu_delta"):
        copy = next((r["gbs"] for k, r in of(suite, "memory") if k[1] == "copy"), None)
        table(
            ["operation", "ms", "GB/s", "of a copy", "peer", "peer / ours"],
            [
                [
                    k[1],
                    show(1e3 * r["median_s"], 3),
                    show(r["gbs"], 0),
                    show(copy and r["gbs"] / copy),
                    ", ".join(p.removesuffix("_over_ours") for p in peers(r)) or "-",
                    ", ".join(show(r[p]) for p in peers(r)) or "-",
                ]
                for k, r in of(suite, "memory")
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
    table(
        ["job", "s a step", "tokens/s", "causal model TFLOP/s", "GiB of the GPU"],
        [
            [
                k[1],
                show(r["median_s"]),
                show(r["tokens"] / r["median_s"], 0),
                show(r["tflops"], 0),
                show(r["peak_gib"], 1),
            ]
            for k, r in of("gpu_step")
        ],
    )
    roof = lambda k, name, rate: rows.get((k[0], name, "roof"), {}).get(rate)
    over = lambda a, b: None if not a or not b else a / b
    table(
        "suite,case,op,GB,TFLOP,ms,GB/s,TFLOP/s,of a copy,of a product,floor ms,expected ms,"
        "measured / expected".split(","),
        [
            [
                k[0].removeprefix("gpu_"),
                k[1],
                k[2],
                show(r["bytes"] / 1e9),
                show(r["flops"] / 1e12),
                show(1e3 * r["median_s"], 3),
                show(r["bytes"] / r["median_s"] / 1e9, 0),
                show(r["flops"] / r["median_s"] / 1e12, 0),
                show(over(r["bytes"] / r["median_s"] / 1e9, roof(k, "copy", "gbs"))),
                show(over(r["flops"] / r["median_s"] / 1e12, roof(k, "product", "tflops"))),
                show(1e3 * r["floor_s"], 3),
                show(1e3 * r["expected_s"], 3),
                show(r["median_s"] / r["expected_s"]),
            ]
            for k, r in rows.items()
            if "expected_s" in r
        ],
    )
    for k, r in rows.items():
        if k[2] == "roof":
            rate = f"{r['gbs']:.0f} GB/s" if "gbs" in r else f"{r['tflops']:.0f} TFLOP/s"
            text += [f"{k[0]}: a {k[1]} ran at {rate}.", ""]
    layer = next((r["median_s"] for k, r in of("gpu_layer", "forward+backward")), None)
    for k, r in of("gpu_host"):
        share = f", {100 * r['median_s'] / layer:.2f} % of the first layer above" if layer else ""
        text += [
            f"The host takes {1e6 * r['median_s']:.0f} µs to {k[1]}, forward and backward{share}; "
            f"a pass is {r['calls_a_pass']:.0f} calls into C, {r['allocations_a_pass']:.0f} "
            "allocations.",
            "",
        ]
    return text


def conditions(runs: dict) -> list[str]:
    """Returns lines with the conditions of runs, the same ones once."""
    suites: dict[str, list[str]] = {}
    for suite, x in runs.items():
        text = (
            f"driver {x['driver']}, {x['date']}, {x['rounds']} round{'s' * (x['rounds'] > 1)} "
            f"of {x['repeat']}; {x['kernels']}; torch {x['torch']}, cuDNN {x['cudnn']}; bf16; at the end {x['clocks']}"
        )
        suites.setdefault(text, []).append(suite)
    return [f"- {', '.join(names)}: {text}" for text, names in suites.items()]
