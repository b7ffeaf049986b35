"""Checks that transformers loads a Hugging Face folder that our program wrote.

    check_hf.py FOLDER
        loads without missing or unexpected tensors; logits are finite
    check_hf.py FOLDER REFERENCE [--tol T]
        weights and logits also equal another folder's, or a .safetensors file of weights:
        max|difference| / max|reference| of each tensor is at most T (2e-5 by default)

Prints one line for each tensor out of tolerance, and a summary. The exit code is 1 if a check
fails.
"""

import argparse
import copy
import sys

import torch
import transformers
from safetensors.torch import load_file


def load(folder: str):
    """Returns the model of a folder, and what is missing or unexpected in its files."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    faults = [
        f"{kind}: {sorted(map(str, info[kind]))}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info.get(kind)
    ]
    return model.eval(), faults


def reference(path: str, model):
    """Returns the model of another folder, or a copy of `model` with weights of a file."""
    if not path.endswith(".safetensors"):
        return load(path)
    want = load_file(path)
    other = copy.deepcopy(model)
    names = {n for n, _ in other.named_parameters()}
    faults = [f"{path}: tensors differ: {sorted(names ^ set(want))}"] if names != set(want) else []
    other.load_state_dict(want, strict=False)
    return other, faults


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns max|got - want| / max|want|, or infinity for another shape, NaN or Inf."""
    if got.shape != want.shape or not torch.isfinite(got).all():
        return float("inf")
    return ((got - want).abs().max() / want.abs().max().clamp_min(1e-30)).item()


def logits(model) -> torch.Tensor:
    """Returns the logits of random tokens, which are the same for every model."""
    ids = torch.randint(
        0, model.config.vocab_size, (2, 97), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("folder")
    p.add_argument("reference", nargs="?")
    p.add_argument("--tol", type=float, default=2e-5)
    a = p.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, faults = load(a.folder)
    out = logits(model)
    if not torch.isfinite(out).all():
        faults.append("logits are not finite")
    worst = 0.0
    if a.reference:
        other, more = reference(a.reference, model)
        faults += more
        want = dict(other.named_parameters())
        pairs = {n: (w, want[n]) for n, w in model.named_parameters() if n in want}
        pairs["logits"] = (out, logits(other))
        for n, (got, ref) in pairs.items():
            e = error(got.detach(), ref.detach())
            worst = max(worst, e)
            if not e <= a.tol:
                faults.append(
                    f"{n}: error {e:.2e} > {a.tol:.0e}, shapes {list(got.shape)} {list(ref.shape)}"
                )
    for f in faults:
        print(f"{a.folder}: {f}")
    n = sum(w.numel() for w in model.parameters())
    print(
        f"{a.folder}: {type(model).__name__}, {n} parameters, worst error {worst:.2e}: "
        f"{'WRONG' if faults else 'ok'}"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
