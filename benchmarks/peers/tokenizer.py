#!/usr/bin/env python3
"""Text to tokens: our tokenizer compared with the package `tokenizers`, with one thread each.

    benchmarks/peers/tokenizer.py FOLDER [NAME=TOKENIZER.JSON ...]

Run it in the root of the repository, with a Python that has testdata/goldens/requirements.txt. It
trains vocabularies of 32,000 tokens into FOLDER (a minute), or copies the named files there,
encodes a text in documents of about 4 KB with the package and with our benchmark, checks that the
ids are equal, and prints a table.
"""

import hashlib
import json
import os
import pathlib
import re
import struct
import subprocess
import sys

import common

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "testdata" / "goldens"))
import vocabularies  # noqa: E402
from tokenizers import Tokenizer, trainers  # noqa: E402

FAMILIES = ["gpt2", "llama3", "qwen2", "qwen3_5", "o200k", "deepseek", "llama2", "mistral", "gemma"]
PASSES = 5


def text() -> str:
    root = HERE.parents[1]
    files = [
        root / "examples/data/opticks.txt",
        *sorted(root.glob("**/*.go")),
        *sorted(root.glob("**/*.md")),
    ]
    return "".join(f.read_text() for f in files)


def documents(s: str) -> list[str]:
    """Splits a text into documents of whole lines with 4096 bytes or a little more.

    documents() in data/tokenizer/laws_test.go does the same.
    """
    out, size, start, at = [], 0, 0, 0
    for line in s.splitlines(True) if "\r" not in s else re.findall("[^\n]*\n|[^\n]+", s):
        at += len(line)
        size += len(line.encode())
        if size >= 4096:
            out.append(s[start:at])
            start, size = at, 0
    return out + ([s[start:]] if start < len(s) else [])


def trained(tok, size, special=(), alphabet=(), **kw):
    tok.train_from_iterator(
        TEXT.splitlines(True),
        trainers.BpeTrainer(
            vocab_size=32000,
            special_tokens=list(special),
            initial_alphabet=list(alphabet),
            show_progress=False,
            **kw,
        ),
    )
    return tok


def main() -> None:
    global TEXT
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    TEXT = (
        text()
        .replace("\u2028", " ")
        .replace("\x0b", " ")
        .replace("\x0c", " ")
        .replace("\x85", " ")
        .replace("\x1c", " ")
        .replace("\x1d", " ")
        .replace("\x1e", " ")
        .replace("\u2029", " ")
    )
    (folder / "text.txt").write_text(TEXT)
    docs, total = documents(TEXT), len(TEXT.encode())
    vocabularies.trained = trained
    given = dict(word.split("=", 1) for word in sys.argv[2:])
    if given:
        made = {name: json.loads(pathlib.Path(path).read_text()) for name, path in given.items()}
    else:
        made = vocabularies.tokenizers()
    rows = {}
    for name in given or FAMILIES:
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "tokenizer.json").write_text(json.dumps(made[name]))
        tok = Tokenizer.from_str(json.dumps(made[name]))

        def encode():
            nonlocal ids
            ids = [e.ids for e in (tok.encode(d, add_special_tokens=False) for d in docs)]

        ids = []
        times = common.seconds(encode, PASSES)
        count = sum(map(len, ids))
        h = hashlib.sha256(b"".join(struct.pack(f"<{len(i)}i", *i) for i in ids)).hexdigest()[:16]
        rows[name] = dict(
            first=total / times[0] / 1e6, later=total / min(times) / 1e6, ids=count, hash=h
        )
    env = dict(os.environ, ULYSSES_TOKENIZER_GOLDENS=str(folder), GOMAXPROCS="1")
    out = ""
    for benchtime in ("1x", "2s"):
        out += subprocess.run(
            [
                "go",
                "test",
                "./data/tokenizer",
                "-run",
                "^$",
                "-bench",
                "Encode",
                "-benchtime",
                benchtime,
                "-count",
                "1",
            ],
            env=env,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    print(f"{total / 1e6:.2f} MB in {len(docs)} documents\n")
    print(
        "| pipeline | tokens | bytes/token | `tokenizers`, first pass | later | ours, first pass "
        "| later | ratio, first | later |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    for name, r in rows.items():
        found = re.findall(
            rf"Encode/{name}\S*\s.*?([\d.]+) MB/s.*?(\d+) hash32.*?(\d+) tokens", out
        )
        (a, x, n), (b, y, _) = found
        assert int(n) == r["ids"] and int(x) == int(y) == int(r["hash"][:8], 16), (name, found, r)
        a, b = float(a), float(b)
        print(
            f"| {name} | {n} | {total / r['ids']:.2f} | {r['first']:.1f} | {r['later']:.1f} "
            f"| {a:.1f} | {b:.1f} | {a / r['first']:.1f} | {b / r['later']:.1f} |"
        )


if __name__ == "__main__":
    main()
