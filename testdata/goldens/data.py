"""The data sets of the goldens, written to data/, and the sequences that a job reads from them."""

import json
import pathlib

import torch
from reference import IGNORED, Document
from safetensors.torch import load_file, save_file
from transformers.utils.chat_template_utils import render_jinja_template

TEXTS = [
    "PROP. I. THEOR. I. Lights which differ in Colour, differ also in Degrees of Refrangibility.",
    "Short.",
    "The Colours of homogeneal Light cannot be changed by Refraction; \u00c6quations of the Times, \u03b3\u03c9\u03bd\u03af\u03b1, say so too.\nA second line.",
    "x",
    "Whiteness and all grey Colours between white and black, may be compounded of Colours, and the whiteness of the Sun's Light is "
    "compounded of all the primary Colours mix'd in a due Proportion.",
    "All the Colours in the Universe which are made by Light are either the Colours of homogeneal Lights, or compounded of these.",
    "Do not Bodies act upon Light at a distance, and by their action bend its Rays?",
    "Is not Fire a Body heated so hot as to emit Light copiously? For what else is a red hot Iron than Fire?",
    "Query.",
    "Do not all fix'd Bodies, when heated beyond a certain degree, emit Light and shine; and is not this Emission perform'd by the "
    "vibrating motions of their parts?",
] * 2


# A template for bytes as tokens: the end of a turn is a newline, which is trained.
TEMPLATE = """{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- 'Answer: ' }}
        {%- generation %}
            {{- m.content + '\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- (m.role | capitalize) + ': ' + m.content + '\n' }}
    {%- endif %}
{%- endfor %}
"""


def conversations() -> list[list[dict]]:
    """Returns conversations of one to three questions; the texts are the questions and answers."""
    out = []
    for i in range(12):
        m = [dict(role="system", content="Speak of Light.")] if i % 3 == 0 else []
        for k in range(i % 3 + 1):
            q, a = TEXTS[(5 * i + 2 * k) % len(TEXTS)], TEXTS[(3 * i + k + 1) % len(TEXTS)]
            m += [
                dict(role="user", content=q[:60]),
                dict(role="assistant", content=a[: 20 + 9 * i]),
            ]
        out.append(m)
    return out


def rendered(messages: list[dict]) -> tuple[list[int], list[int]]:
    """Returns the bytes of a conversation as ids, and the labels: bytes that an assistant wrote."""
    texts, spans = render_jinja_template(
        conversations=[messages], chat_template=TEMPLATE, return_assistant_tokens_mask=True
    )
    text, ids = texts[0], list(texts[0].encode())
    labels = [IGNORED] * len(ids)
    for a, b in spans[0]:
        lo, hi = len(text[:a].encode()), len(text[:b].encode())
        labels[lo:hi] = ids[lo:hi]
    return ids, labels


def tokens(sequences: int, n: int, seed: int) -> torch.Tensor:
    """Returns random ids [sequences, n] with unequal frequencies.

    Many ids are the previous id plus 7, so five steps can reduce the loss.
    """
    g = torch.Generator().manual_seed(seed)
    x = (torch.rand(sequences, n, generator=g, dtype=torch.float64) ** 2 * 256).long()
    follow = torch.rand(sequences, n, generator=g) < 0.4
    for t in range(1, n):
        x[:, t] = torch.where(follow[:, t], (x[:, t - 1] + 7) % 256, x[:, t])
    return x


def write_data(root: pathlib.Path) -> None:
    """Writes the data sets to a folder, and deletes its old files."""
    root.mkdir(parents=True, exist_ok=True)
    for old in root.iterdir():
        old.unlink()
    # I64; 7 sequences: with two sequences a step, an epoch ends inside a step.
    save_file({"input_ids": tokens(7, 64, 1)}, root / "plain64.safetensors")

    # Labels (I32): some are ignored at random, unevenly between sequences; all of sequence 3 are
    # ignored; some differ from the inputs.
    ids = tokens(6, 61, 2)
    g = torch.Generator().manual_seed(3)
    labels = torch.where(
        torch.rand(6, 61, generator=g) < torch.linspace(0, 0.8, 6)[:, None], IGNORED, ids
    )
    labels[3] = IGNORED
    labels[:, 20:24] = torch.where(
        labels[:, 20:24] == IGNORED, IGNORED, (labels[:, 20:24] + 1) % 256
    )
    save_file({"input_ids": ids.int(), "labels": labels.int()}, root / "ignored61.safetensors")

    # Packed: a document starts where the position is 0, and at the start of each sequence, also if
    # its position is above 0. Other jumps start no document.
    ids = tokens(10, 64, 4)
    pos = torch.zeros(10, 64, dtype=torch.long)
    cuts = [
        [0, 64],
        [0, 1, 64],
        [0, 17, 18, 40, 64],
        [0, 63, 64],
        [0, 2, 4, 6, 8, 64],
        [0, 16, 32, 48, 64],
        [0, 33, 64],
        [0, 15, 50, 64],
        [0, 5, 64],
        [0, 60, 64],
    ]
    for r, c in enumerate(cuts):
        for a, b in zip(c, c[1:]):
            pos[r, a:b] = torch.arange(b - a)
    pos[0] += 100
    pos[7, 20:50] += 11
    pos[8, 30:64] -= 20
    labels = torch.where(torch.rand(10, 64, generator=g) < 0.15, IGNORED, ids)
    save_file(
        {"input_ids": ids, "labels": labels, "position_ids": pos}, root / "packed64.safetensors"
    )

    (root / "chat.jinja").write_text(TEMPLATE)
    (root / "chat.jsonl").write_text(
        "".join(json.dumps({"messages": m}, ensure_ascii=False) + "\n" for m in conversations())
    )
    (root / "texts.jsonl").write_text(
        "".join(
            json.dumps({"text": t}, ensure_ascii=i % 2 == 0) + "\n" for i, t in enumerate(TEXTS)
        )
    )


def documents(
    ids: torch.Tensor, labels: torch.Tensor, pos: torch.Tensor, starts: list[int]
) -> list[Document]:
    """Splits one sequence [n] into its documents.

    The target of position i is the label of i+1, if both are in the same document.
    """
    out = []
    for a, b in zip(starts, starts[1:] + [len(ids)]):
        targets = torch.full((b - a,), IGNORED)
        targets[:-1] = labels[a + 1 : b]
        out.append(Document(ids[a:b], targets, pos[a:b]))
    return out


def sequences_of(path: pathlib.Path, sequence: int, pack: bool) -> list[list[Document]]:
    """Returns the sequences of a file, each as its documents."""
    if path.suffix == ".jsonl":
        records = [json.loads(line) for line in path.read_text().splitlines()]
        if "messages" in records[0]:
            return text_sequences([rendered(r["messages"]) for r in records], sequence, pack)
        texts = [list(r["text"].encode()) for r in records]
        return text_sequences([(t, t) for t in texts], sequence, pack)
    t = {k: v.long() for k, v in load_file(path).items()}
    ids = t["input_ids"]
    labels = t.get("labels", ids)
    pos = t.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids))
    assert ids.shape[1] == sequence
    return [
        documents(
            ids[r], labels[r], pos[r], sorted({0} | set((pos[r] == 0).nonzero().flatten().tolist()))
        )
        for r in range(len(ids))
    ]


def text_sequences(
    texts: list[tuple[list[int], list[int]]], sequence: int, pack: bool
) -> list[list[Document]]:
    """Returns the sequences of texts, each as its documents. A text is its ids and its labels.

    With pack, the texts are concatenated, and the result is split at the sequence length. Without
    pack, each text is one sequence, truncated to the sequence length.
    """
    if not pack:
        truncated = [(torch.tensor(t[:sequence]), torch.tensor(y[:sequence])) for t, y in texts]
        return [documents(x, y, torch.arange(len(x)), [0]) for x, y in truncated]
    x = torch.tensor([i for t, _ in texts for i in t])
    y = torch.tensor([i for _, t in texts for i in t])
    first = {0}
    for t, _ in texts:
        first.add(max(first) + len(t))
    sequences = []
    for a in range(0, len(x), sequence):
        ids = x[a : a + sequence]
        starts = [0] + [f - a for f in sorted(first) if a < f < a + len(ids)]
        pos = torch.cat([torch.arange(e - s) for s, e in zip(starts, starts[1:] + [len(ids)])])
        sequences.append(documents(ids, y[a : a + sequence], pos, starts))
    return sequences
