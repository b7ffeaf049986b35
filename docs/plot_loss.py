#!/usr/bin/env python3
"""Draws the loss of one run or several: plot_loss.py out.svg metrics.jsonl ... Needs matplotlib."""
import json
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

fig, ax = plt.subplots(figsize=(7, 3.2))
for path in sys.argv[2:]:
    rows = [json.loads(line) for line in open(path)]
    steps = [r for r in rows if "loss" in r]
    ax.plot([r["step"] for r in steps], [r["loss"] for r in steps], lw=0.8, color="#3572a5", label="training, a sequence of 2048 bytes a step")
    for r in rows:
        if "eval_loss" in r:
            ax.plot(r["step"], r["eval_loss"], "o", color="#c0392b", label=f"held-out part of the book: {r['eval_loss']:.2f}")
for y, what in ((2.45, "bigram table"), (2.00, "trigram table")):
    ax.axhline(y, lw=0.7, ls="--", color="gray")
    ax.text(0.995, y + 0.04, what, fontsize=7, color="gray", ha="right", transform=ax.get_yaxis_transform())
ax.set(xlabel="optimizer step", ylabel="loss, nats a byte", ylim=(0.9, 6.3))
ax.legend(frameon=False, fontsize=8)
ax.spines[["top", "right"]].set_visible(False)
fig.tight_layout()
fig.savefig(sys.argv[1], metadata={"Date": None})
