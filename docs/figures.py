#!/usr/bin/env python3
"""Writes docs/figures.json, docs/quickstart.svg and docs/report.png, and copies the figures into
the documents.

    make figures    # takes some minutes; needs chromium

The program trains examples/hybrid.toml (as `make run` does) and examples/quickstart.toml on four
ranks, and counts tables of n-grams on the same text. README.md, examples/ and the picture quote
docs/figures.json. `go test ./job -run Figures` compares every number that they quote with it, and
counts the n-grams again.
"""

import hashlib
import json
import math
import pathlib
import shutil
import subprocess
import sys
import time
from collections import Counter

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "build/figures"
TEXT = "examples/data/opticks.txt"
HELD_OUT = 0.05  # [eval] split of both examples
SMOOTHING = 0.05  # added to every count
TABLES = ("bytes alone", "bigrams", "trigrams", "4-grams")


def ngrams(text, split, n):
    """Returns the loss on text[split:] of a table of n-grams on text[:split], in nats a byte."""
    training = text[:split]
    whole = Counter(training[i : i + n] for i in range(split - n + 1))
    context = Counter(training[i : i + n - 1] for i in range(split - n + 1))
    nats = 0.0
    for i in range(split, len(text)):
        gram = text[i - n + 1 : i + 1]
        nats -= math.log((whole[gram] + SMOOTHING) / (context[gram[:-1]] + 256 * SMOOTHING))
    return nats / (len(text) - split)


def train(example, launcher):
    """Trains an example, and returns its steps and the figures that the documents quote."""
    out = OUT / example
    command = [
        *launcher,
        "bin/ulysses-mpi",
        f"examples/{example}.toml",
        "--set",
        f"output.dir={out}",
    ]
    began = time.monotonic()
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    seconds = time.monotonic() - began
    rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    steps = [r for r in rows if "loss" in r]
    printed = ran.stdout.replace(str(out), "examples/out").strip("\n").split("\n")
    return steps, {
        "steps": len(steps),
        "loss": round(steps[-1]["loss"], 4),
        "held_out": round([r for r in rows if "eval_loss" in r][-1]["eval_loss"], 4),
        "seconds": round(seconds),
        "output": [line.rstrip() for line in printed],
    }


def screenshot(report):
    """Writes docs/report.png, a picture of the top of a report."""
    browser = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if not browser:
        sys.exit("docs/report.png: chromium was not found; install it, or keep the old picture")
    picture = ROOT / "docs/report.png"
    subprocess.run(
        [
            browser,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--virtual-time-budget=4000",
            "--window-size=1000,1130",
            f"--screenshot={picture}",
            report.as_uri(),
        ],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    Image.open(picture).convert("RGB").quantize(256).save(picture, optimize=True)


def draw(figures, curves):
    """Draws docs/quickstart.svg: the losses of both examples and of the tables."""
    fig, ax = plt.subplots(figsize=(7, 3.2))
    for name, colour, what in (
        ("quickstart", "#c7cdd4", "softmax attention alone"),
        ("hybrid", "#3572a5", "hybrid"),
    ):
        steps = curves[name]
        ax.plot(
            [r["step"] for r in steps],
            [r["loss"] for r in steps],
            lw=0.8,
            color=colour,
            label=f"{what}: training, 2048 bytes a step",
        )
    for name, colour, what in (
        ("quickstart", "#7a828c", "softmax attention alone"),
        ("hybrid", "#c0392b", "hybrid"),
    ):
        held = figures[name]["held_out"]
        ax.plot(
            curves[name][-1]["step"],
            held,
            "o",
            color=colour,
            label=f"{what}: held-out part of the book: {held:.2f}",
            clip_on=False,
        )
    for table in TABLES[1:]:
        y = figures["ngrams"][table]
        ax.axhline(y, lw=0.7, ls="--", color="gray")
        ax.text(
            1.005,
            y,
            f"{table}: {y:.2f}",
            fontsize=7,
            color="gray",
            va="center",
            transform=ax.get_yaxis_transform(),
        )
    fig.set_layout_engine("tight")
    ax.set(
        xlabel="optimizer step",
        ylabel="loss, nats a byte",
        xlim=(0, len(curves["hybrid"]) + 8),
        ylim=(0.9, 6.3),
    )
    ax.legend(frameon=False, fontsize=7)
    ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(ROOT / "docs/quickstart.svg", metadata={"Date": None})


def quote(old, new):
    """Replaces the old figures in the documents by the new ones.

    `go test ./job -run Figures` finds old figures that remain.
    """
    block = lambda figures: "\n".join(
        "    " + line if line else "" for line in figures["hybrid"]["output"]
    )
    pairs = [
        (block(old), block(new)),
        (f"in {old['hybrid']['seconds']} seconds", f"in {new['hybrid']['seconds']} seconds"),
    ]
    pairs += [
        (f"{old[run]['held_out']:.2f}", f"{new[run]['held_out']:.2f}")
        for run in ("hybrid", "quickstart")
    ]
    for name in (
        "README.md",
        "examples/hybrid.toml",
        "examples/quickstart.toml",
        "examples/data/README.md",
    ):
        path = ROOT / name
        text = path.read_text()
        for before, after in pairs:
            text = text.replace(before, after)
        path.write_text(text)


def main():
    text = (ROOT / TEXT).read_bytes()
    split = int(len(text) * (1 - HELD_OUT))
    figures = {
        "text": {
            "file": TEXT,
            "bytes": len(text),
            "sha256": hashlib.sha256(text).hexdigest(),
            "held_out_bytes": len(text) - split,
            "smoothing": SMOOTHING,
        },
        "ngrams": {table: round(ngrams(text, split, n + 1), 4) for n, table in enumerate(TABLES)},
    }
    curves, launcher = {}, sys.argv[1:]
    shutil.rmtree(OUT, ignore_errors=True)
    for example in ("hybrid", "quickstart"):
        curves[example], figures[example] = train(example, launcher)
    quoted = ROOT / "docs/figures.json"
    quote(json.loads(quoted.read_text()), figures)
    quoted.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n")
    draw(figures, curves)
    screenshot(OUT / "hybrid/report.html")


if __name__ == "__main__":
    main()
