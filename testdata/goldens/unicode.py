"""Writes data/tokenizer/classes.txt and normal.txt: the Unicode tables of the package `tokenizers`.

The tables are read from the package itself, code point by code point. Its regex engine, its
character tests and its normalizers use different versions of Unicode (16, that of its compiler, and
9), so Go's tables differ from them. Run the program after an update of the package:
`.venv/bin/python testdata/goldens/unicode.py` takes about two minutes.
"""

import pathlib
import unicodedata

import tokenizers
from tokenizers import Regex
from tokenizers import normalizers as norm
from tokenizers import pre_tokenizers as pre

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "data" / "tokenizer"
POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
TEXT = "".join(map(chr, POINTS))
CATEGORIES = (
    "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co".split()
)
PROPERTY = r"\p{%s}+"
SCRIPTS = "Han Hiragana Katakana Hangul Thai Latin Cyrillic Greek Arabic Hebrew Devanagari".split()


def ranges(points) -> str:
    """Formats sorted code points as ranges first-last in hexadecimal."""
    out, start, last = [], None, None
    for c in sorted(points):
        if last is not None and c == last + 1:
            last = c
            continue
        if start is not None:
            out.append((start, last))
        start = last = c
    if start is not None:
        out.append((start, last))
    return " ".join(f"{a:x}" if a == b else f"{a:x}-{b:x}" for a, b in out)


def removed(splitter) -> list[int]:
    """Returns the code points that a splitter removes from a text that has all of them."""
    left = bytearray(len(TEXT))
    for _, (s, e) in splitter.pre_tokenize_str(TEXT):
        left[s:e] = b"\1" * (e - s)
    return [c for c, kept in zip(POINTS, left) if not kept]


def pattern(p: str) -> list[int]:
    """Returns the code points that match a regular expression."""
    return removed(pre.Split(Regex(p), "removed"))


def words() -> list[int]:
    """Returns the code points of \\w in the package's second regex engine.

    Added tokens find the boundaries of words with this engine.
    """
    w = pre.Whitespace()
    return [c for c in POINTS if [x for x, _ in w.pre_tokenize_str("a" + chr(c))] == ["a" + chr(c)]]


def classes() -> None:
    """Writes classes.txt: the code points of each category, script and class of the package."""
    lines = [f"# of tokenizers {tokenizers.__version__}, by testdata/goldens/unicode.py"]
    for k in CATEGORIES:
        lines.append(f"{k} {ranges(pattern(PROPERTY % k))}")
    lines.append("regex_word " + ranges(pattern(r"\w+")))
    # Without ², ½ and similar characters: inside brackets, the engine uses another table.
    lines.append("regex_set_word " + ranges(pattern(r"[\w]+")))
    for k in SCRIPTS:
        lines.append(f"{k} {ranges(pattern(PROPERTY % k))}")
    lines.append(f"word {ranges(words())}")
    lines.append(f"space {ranges(removed(pre.WhitespaceSplit()))}")
    lines.append(f"punctuation {ranges(removed(pre.Punctuation(behavior='removed')))}")
    digits = pre.Digits(individual_digits=True)
    lines.append(
        f"numeric {ranges(c for c in POINTS if len(digits.pre_tokenize_str('a' + chr(c))) == 2)}"
    )
    (FOLDER / "classes.txt").write_text("\n".join(lines) + "\n")


def mapped(table: dict[int, str]) -> str:
    """Formats a table from code points to strings."""
    return " ".join(
        f"{c:x}:" + "+".join(f"{ord(x):x}" for x in s) for c, s in sorted(table.items())
    )


def normal() -> None:
    """Writes normal.txt: decompositions, compositions, lower case and accents of the package."""
    low, nfd, nfkd, nfc = norm.Lowercase(), norm.NFD(), norm.NFKD(), norm.NFC()
    lower, accents, canonical, compatible, compose, ccc = {}, [], {}, {}, {}, {}
    strip = norm.StripAccents()
    for c in POINTS:
        x = chr(c)
        if (y := low.normalize_str(x)) != x:
            lower[c] = y
        if strip.normalize_str("a" + x) == "a":
            accents.append(c)
        if 0xAC00 <= c <= 0xD7A3:  # Hangul syllables are computed
            continue
        d, k = nfd.normalize_str(x), nfkd.normalize_str(x)
        if d != x:
            canonical[c] = d
            if nfc.normalize_str(x) == x:
                a, b = unicodedata.decomposition(x).split()
                compose[c] = chr(int(a, 16)) + chr(int(b, 16))
        if k != d:
            compatible[c] = k
        # A mark moves before a lower class and after a higher one. Classes are stable over
        # versions.
        if d == x and (
            nfd.normalize_str("a" + x + "\u0334") != "a" + x + "\u0334"
            or nfd.normalize_str("a\u0301" + x) != "a\u0301" + x
        ):
            ccc.setdefault(unicodedata.combining(x), []).append(c)
    ccc.setdefault(230, []).append(0x301)
    ccc.setdefault(230, []).sort()
    lines = [f"# of tokenizers {tokenizers.__version__}, by testdata/goldens/unicode.py"]
    for k, v in sorted(ccc.items()):
        if k == 0:
            raise SystemExit(f"unicode.py: no combining class of {ranges(v)}; use a newer Python")
        lines.append(f"ccc{k} {ranges(set(v))}")
    lines += [
        f"canonical {mapped(canonical)}",
        f"compatible {mapped(compatible)}",
        f"compose {mapped(compose)}",
        f"lower {mapped(lower)}",
        f"accent {ranges(accents)}",
    ]
    (FOLDER / "normal.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    classes()
    normal()
