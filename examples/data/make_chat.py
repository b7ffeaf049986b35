#!/usr/bin/env python3
"""Writes chat.jsonl, the conversations of examples/chat.toml, from opticks.txt.

Each conversation asks one to three times for a sentence of the book about a word, and the answer
begins with "Newton writes:".
"""

import json
import pathlib
import re

HERE = pathlib.Path(__file__).resolve().parent
WORDS = """angle axis blue bodies body circle colour colours crystal distance eye fire force glass glasses
image lens light lights line lines medium motion object paper plate point prism prisms ray rays
reflexion refraction rings shadow space spectrum speculum sun surface violet water white""".split()


def sentences() -> list[str]:
    """Returns the short sentences of the book."""
    text = re.sub(r"\[[^\]]*\]|_", "", (HERE / "opticks.txt").read_text(encoding="utf-8"))
    text = re.sub(r"\s+", " ", text)
    found = re.findall(r"(?<=[.?!] )[A-Z][a-z][^.?!]{30,160}[.?!](?= )", text)
    return [s for s in dict.fromkeys(found) if s.isascii()]


def main() -> None:
    """Writes the file."""
    by_word = {w: [] for w in WORDS}
    for s in sentences():
        for w in dict.fromkeys(re.findall(r"[a-z]+", s.lower())):
            if w in by_word:
                by_word[w].append(s)
    asked, conversation, out = 0, [], []
    while any(by_word.values()):
        for w in WORDS:
            if not by_word[w]:
                continue
            conversation += [
                {"role": "user", "content": f"A sentence about {w}?"},
                {"role": "assistant", "content": f"Newton writes: {by_word[w].pop(0)}"},
            ]
            asked += 1
            if len(conversation) >= 2 * (1 + len(out) % 3):
                out.append({"messages": conversation})
                conversation = []
            if asked == 2400:
                by_word = {}
                break
    lines = "".join(json.dumps(c) + "\n" for c in out)
    (HERE / "chat.jsonl").write_text(lines, encoding="utf-8")
    print(f"{len(out)} conversations, {len(lines)} bytes")


if __name__ == "__main__":
    main()
