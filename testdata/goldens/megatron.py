"""Indexed data sets in the format of Megatron-LM (megatron/core/datasets/indexed_dataset.py).

Only numpy and struct are used. documents.json lists the documents of each data set; a document is a
list of sequences of token ids.
"""

import json
import pathlib
import struct

import numpy

CODES = {
    "uint8": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float64": 6,
    "float32": 7,
    "uint16": 8,
}


def write(
    path: pathlib.Path, documents: list[list[list[int]]], dtype: str, modes: bool = False
) -> None:
    """Writes path.bin with the tokens, and path.idx with the index and, if modes, the modes."""
    kind = numpy.dtype(dtype).newbyteorder("<")
    lengths, pointers, indices, at = [], [], [0], 0
    with open(path.with_suffix(".bin"), "wb") as f:
        for sequences in documents:
            for s in sequences:
                f.write(numpy.array(s, dtype=kind).tobytes(order="C"))
                lengths.append(len(s))
                pointers.append(at)
                at += len(s) * kind.itemsize
            indices.append(len(lengths))
    with open(path.with_suffix(".idx"), "wb") as f:
        f.write(b"MMIDIDX\x00\x00")
        f.write(struct.pack("<Q", 1))
        f.write(struct.pack("<B", CODES[dtype]))
        f.write(struct.pack("<Q", len(lengths)))
        f.write(struct.pack("<Q", len(indices)))
        f.write(numpy.array(lengths, dtype="<i4").tobytes(order="C"))
        f.write(numpy.array(pointers, dtype="<i8").tobytes(order="C"))
        f.write(numpy.array(indices, dtype="<i8").tobytes(order="C"))
        if modes:
            f.write(numpy.zeros(len(lengths), dtype="i1").tobytes(order="C"))


def random_documents(seed: int, n: int, top: int) -> list[list[list[int]]]:
    """Returns documents of 0 to 4 sequences of 0 to 40 tokens."""
    g = numpy.random.default_rng(seed)
    return [
        [g.integers(0, top, g.integers(0, 40)).tolist() for _ in range(g.integers(0, 5))]
        for _ in range(n)
    ]


def write_all(root: pathlib.Path) -> None:
    """Writes the data sets and documents.json to a folder, and deletes its old files."""
    root.mkdir(parents=True, exist_ok=True)
    for old in root.iterdir():
        old.unlink()
    sets = {}
    for i, dtype in enumerate(("uint8", "int8", "int16", "uint16", "int32", "int64", "float32")):
        sets[dtype] = random_documents(
            i, 30, min(60000, numpy.iinfo(dtype).max + 1) if dtype != "float32" else 9
        )
        write(root / dtype, sets[dtype], dtype, modes=dtype == "int16")
    sets["one"] = [[[5, 6, 7, 8, 9, 10, 11]]]
    write(root / "one", sets["one"], "uint16")
    sets["none"] = []
    write(root / "none", sets["none"], "int32")
    (root / "documents.json").write_text(json.dumps(sets) + "\n")


if __name__ == "__main__":
    write_all(pathlib.Path(__file__).resolve().parent / "megatron")
