"""Small tokenizers of the common families, and the ids of difficult texts.

The package `tokenizers` trains each tokenizer and gives the ids. Each is a folder in tokenizers/
with tokenizer.json and expected.json: the ids of each text of tokenizers/texts.json, and the text
that they decode to. make.py runs this program. With a folder and a number as arguments, it writes
that many random texts and their ids into the folder, for
ULYSSES_TOKENIZER_GOLDENS=folder go test ./data/tokenizer -run Goldens.
"""

import base64
import hashlib
import json
import pathlib
import random
import struct
import sys

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

ROOT = pathlib.Path(__file__).resolve().parent
LONG = 16  # with more ids than this, a count and a hash replace the list

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN3_5 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
DEEPSEEK = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

TEXTS = [
    "",
    " ",
    "a",
    "\n",
    "\0",
    "\ufeff",
    "\ufeffBOM first",
    "\ufffd",
    "\u2028",
    "a\u2028b\u2029c",
    "\r",
    "\r\n",
    "a\rb\r\nc\n\rd",
    "\r\r\n\n",
    "\t\ttab\t",
    " \t \n",
    "Hello, world!",
    "  two  spaces  ",
    "trailing   ",
    "   leading",
    "I'm you're he'll we've it's I'd don't",
    "I'M YOU'RE HE'LL WE'VE IT'S I'D DON'T",
    "I\u2019m it\u2019s",
    "x'\u017f '\u212a 'S'T'Re'vE'lL",
    "'s't're",
    "''s '' s",
    "ﬁﬂﬃﬆ ß ẞ",
    "the quick brown fox jumps over the lazy dog",
    "The Quick BROWN fOx",
    "0 1 12 123 1234 12345 1234567890",
    "3.14159 1,000,000 0x1F 1e-9",
    "½ ² ³ Ⅷ ① ٣٤٥ ๓๔ 〇一二三 𝟙𝟚 १२३",
    "a1b2c3",
    "1st 2nd",
    "x=y+z; // comment\nif (a<b) { return c[i]; }\n\n\n\tend",
    "def f(x):\n    return x**2\n\n\nclass A:\n        pass\n",
    "path/to/file.txt\\n C:\\dir",
    "<html>&amp;</html>",
    "https://example.org/a?b=c&d=e#f",
    "user@example.org",
    "#hashtag @at $5.00 100%",
    "👍",
    "👍🏽",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "🇩🇪🇫🇷",
    "☺️☺︎",
    "a👍b 👍🏿👍🏻",
    "1️⃣",
    "今天天气很好。",
    "我爱北京天安门",
    "こんにちは、世界！",
    "カタカナ ﾊﾝｶｸ ゛゜",
    "안녕하세요 세계",
    "한국어",
    "ᄒ",
    "각각",
    "\uac00\u11a7\u11a8 \u1100\u1161\u11c3",
    "ภาษาไทยไม่มีช่องว่าง",
    "العربية مِنْ اليَمِين",
    "עִבְרִית שלום",
    "हिन्दी में",
    "தமிழ்",
    "ខ្មែរ",
    "Ελληνικά Άρης ΰ",
    "Русский язык",
    "ქართული",
    "İstanbul ıI",
    "Ǆ ǅ ǆ",
    "café naïve résumé",
    "café naïve résumé",
    "Å Å Å",
    "q̣̇ q̣̇ ạ̀",
    "é́́",
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳",
    "a" + "\u0301" * 40,
    "a" + "\u0323\u0301" * 35 + "b",
    "\u0301",
    " \u0301x",
    "\u0344\u0323",
    "\u0958 \u0929 \u2126 \u212b",
    "ﷺ ﷽ ㍿ ㌀ ℻ № ™ ｶﾞ",
    "\u1e9b\u0323",
    "\u0898\u0301\u0323",
    "a\U0001e4ec\u0323",
    "\U00011938 \U00011935\U00011930",
    "\ua7f2 \u32ff",
    "\u1c89\u1c8a \ua7cb \U00010d50\U00010d70",
    "\U000323b0 \U0002ebf0 \U00031350",
    "\u0378 \U000e0fff \U0010ffff \U0010fffd",
    "\ue000\uf8ff\U000f0000",
    "\ufdd0 \ufffe \uffff",
    "".join(map(chr, range(1, 32))),
    "\x7f\x80\x85\x9f",
    "a\x00b\x00\x00c",
    "\u00a0\u1680\u2000\u2003\u200a\u202f\u205f\u3000",
    "a\u00a0b \u3000 c",
    "\u200b\u200c\u200d\u2060\u00ad",
    "\u202eRTL\u202c",
    "a\x0bb\x0cc",
    "x \u0085 y\u0085\n",
    "<|endoftext|>",
    "a<|endoftext|>b",
    "<|endoftext|><|endoftext|>",
    " <|endoftext|> \n",
    "<|endoftext",
    "<|endof<|endoftext|>text|>",
    "<s>",
    "</s>",
    "<s>Hello</s>",
    " <s> </s> ",
    "<unk>",
    "a <unk>b",
    "<0x41><0x0A>",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<think>\n\n</think>",
    "<｜begin▁of▁sentence｜>x<｜end▁of▁sentence｜>",
    "<tool>",
    "<TOOL>",
    "xx word xx",
    "keyword word words word",
    "aword word",
    "_word_ word.",
    "é word́ word",
    "left   strip   RIGHT   strip",
    "RIGHT RIGHT   RIGHT",
    "  RIGHT  left  ",
    "RIGHT \n\nnl",
    "Éclair éclair ECLAIR",
    "  [MASK]  [MASK]",
    "▁",
    "▁▁a ▁b",
    "a▁b",
    "▁ ▁",
    "Ġ Ċ ĉ",
    "Ġthe",
    "Ã©",
    "\n\n\n\n\n",
    "   \n   \n",
    "a\n\n\nb",
    " \n",
    "\n ",
    "  \n\n  x",
    "x  \n\n  ",
    "x \r\n\r\n y",
    "aaaa",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!!???...---===",
    "!\n\n!",
    "...\r\n\r\n",
    "a/b//c\n//d/\n",
    "$$$ €€€ ¥100 ₿",
    "(a) [b] {c} «d» “e” ‘f’",
    "a—b–c−d",
    "© ® ™ ° µ",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋",
    "αβγ ΑΒΓ ὰ ᾳ ᾼ",
    "x² + y² = z²",
    "ＦＵＬＬ　ｗｉｄｔｈ　１２３",
    "𝕳𝖊𝖑𝖑𝖔 𝒲",
    "ᾀ ͅ",
    "ͅι",
    "sſS kK\u212a",
    "ÀÉ'S ÀÉ'ſ",
]
LONG_TEXTS = [
    (" ", 5000),
    ("\n", 3000),
    ("\t", 1000),
    (" \n", 1500),
    ("a", 6000),
    ("A", 6000),
    ("ab", 5000),
    ("word ", 2000),
    ("1", 4000),
    ("!", 4000),
    ("é", 3000),
    ("e\u0301", 3000),
    ("天", 3000),
    ("👍", 1500),
    ("\u0301", 2000),
    ("\0", 2000),
    ("<", 2000),
    ("▁", 2000),
    ("각", 1500),
    ("'s", 2000),
    ("\r", 2000),
    (" a", 3000),
]
BROKEN = [
    b"\xff",
    b"a\xffb",
    b"\xc3",
    b"\xe2\x82",
    b"\xe2\x82x",
    b"\xf0\x9f\x98",
    b"\xf0\x9f\x98\xff",
    b"\xed\xa0\x80",
    b"\xc0\x80",
    b"\xf4\x90\x80\x80",
    b"\xf0\x80\x80\x80",
    b"\xe0\x80\x80",
    b"\x80\x80",
    b"ok \xe4\xbd then",
    b"\xf8\x88\x80\x80\x80",
    b"\xe4\xbd\xa0\xe5",
]


def trained(tok: Tokenizer, size: int, special=(), alphabet=(), **kw) -> Tokenizer:
    """Trains a tokenizer on all texts and on the first 150,000 characters of the book."""
    texts = (
        [p for p in TEXTS if p]
        + [s * 5 for s, _ in LONG_TEXTS]
        + (ROOT.parents[1] / "examples" / "data" / "opticks.txt")
        .read_text()[:150000]
        .splitlines(True)
    )
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(special),
            initial_alphabet=list(alphabet),
            show_progress=False,
            **kw,
        ),
    )
    return tok


def byte_level(
    split, size=1600, normalizer=None, added=(), special=("<|endoftext|>",), model=None
) -> dict:
    tok = Tokenizer(models.BPE(**(model or {})))
    if normalizer is not None:
        tok.normalizer = normalizer
    tok.pre_tokenizer, tok.decoder = split, decoders.ByteLevel()
    trained(tok, size, special, sorted(pre_tokenizers.ByteLevel.alphabet()))
    tok.add_tokens(list(added))
    return json.loads(tok.to_str())


def splitter(*patterns, byte=True):
    """Returns a pre-tokenizer that splits by patterns, and then converts to bytes."""
    steps = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    return pre_tokenizers.Sequence(
        steps
        + ([pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)] if byte else [])
    )


def sentence_piece(size=1600, special=("<unk>", "<s>", "</s>"), trim=None) -> dict:
    """Returns a tokenizer as if converted from SentencePiece.

    It has bytes for unknown characters, and words that begin with ▁.
    """
    tok = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    trained(tok, size, list(special) + [f"<0x{b:02X}>" for b in range(256)], limit_alphabet=200)
    f = json.loads(tok.to_str())
    f["added_tokens"] = [t for t in f["added_tokens"] if not t["content"].startswith("<0x")]
    f["pre_tokenizer"] = None
    f["decoder"] = dict(
        type="Sequence",
        decoders=[
            dict(type="Replace", pattern=dict(String="▁"), content=" "),
            dict(type="ByteFallback"),
            dict(type="Fuse"),
            dict(type="Strip", content=" ", start=1, stop=0),
        ],
    )
    return f


def tokenizers() -> dict:
    """Returns the tokenizers by name, each as the object of its tokenizer.json."""
    out = {}
    out["gpt2"] = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    out["llama3"] = f = byte_level(
        splitter(LLAMA3), special=("<|begin_of_text|>", "<|end_of_text|>", "<|endoftext|>")
    )
    # A word that is a token is found, even if no merge produces it.
    f["model"]["ignore_merges"] = True
    f["model"]["merges"] = [m for i, m in enumerate(f["model"]["merges"]) if i % 7 != 6]
    out["qwen2"] = byte_level(
        splitter(QWEN2),
        normalizer=normalizers.NFC(),
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        added=[AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)],
    )
    out["qwen3_5"] = f = byte_level(
        splitter(QWEN3_5),
        normalizer=normalizers.NFC(),
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    )
    f["model"]["merges"] = [" ".join(m) for m in f["model"]["merges"]]
    out["o200k"] = byte_level(splitter(O200K))
    out["cl100k"] = byte_level(splitter(CL100K))
    out["deepseek"] = byte_level(
        splitter(r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK),
        special=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        added=[AddedToken("<｜User｜>", normalized=False)],
    )
    out["llama2"] = f = sentence_piece()
    f["normalizer"] = dict(
        type="Sequence",
        normalizers=[
            dict(type="Prepend", prepend="▁"),
            dict(type="Replace", pattern=dict(String=" "), content="▁"),
        ],
    )
    f["model"]["merges"] = [" ".join(m) for m in f["model"]["merges"]]
    out["mistral"] = f = sentence_piece()
    f["pre_tokenizer"] = dict(
        type="Metaspace", replacement="▁", prepend_scheme="first", split=False
    )
    out["gemma"] = f = sentence_piece(special=("<pad>", "<eos>", "<bos>", "<unk>"))
    f["normalizer"] = dict(type="Replace", pattern=dict(String=" "), content="▁")
    f["pre_tokenizer"] = dict(
        type="Split", pattern=dict(String=" "), behavior="MergedWithPrevious", invert=False
    )
    f["decoder"]["decoders"].pop()
    plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)
    f["added_tokens"] += [
        dict(id=len(f["model"]["vocab"]) + i, content=c, **plain)
        for i, c in enumerate(["\n\n", "\n\n\n", "▁▁", "▁▁▁", "[multimodal]"])
    ]
    # Some bytes are missing, so unknown characters follow bytes.
    out["unknown"] = f = sentence_piece()
    f["model"]["vocab"] = {
        k: v
        for k, v in f["model"]["vocab"].items()
        if not k.startswith("<0xE") and not k.startswith("<0x9")
    }
    f["model"]["fuse_unk"] = False
    f["pre_tokenizer"] = dict(
        type="Metaspace", replacement="▁", prepend_scheme="always", split=True
    )
    f["decoder"] = dict(type="Metaspace", replacement="▁", prepend_scheme="always", split=True)
    out["odd"] = all_steps()
    out["affixes"] = affixes()
    quotes = r"'(?i:[sdmt]|ll|ve|re)|\s++$|\d{1,3}+|.??x"
    out["pieces1"] = character_tokenizer([split(r"[\w]+|(?<=\s)\S{1,2}?|\p{N}", "Isolated")])
    out["pieces2"] = character_tokenizer([split(quotes, "MergedWithPrevious")])
    out["pieces3"] = character_tokenizer(
        [
            split(r"a|\p{^L}\P{N}", "MergedWithNext"),
            split(r"(?>ab|a)b*?$|(?<!\d\d|l)\s", "MergedWithNext", True),
        ]
    )
    out["pieces4"] = character_tokenizer(
        [split(r"[^\W_]+(?!\S)|^\p{Lu}", "Contiguous"), split(r"[b-dx-z]", "Contiguous", True)]
    )
    out["pieces5"] = character_tokenizer([split("", "Isolated")])
    begins = dict(type="Metaspace", replacement="▁", prepend_scheme="first", split=True)
    steps = [
        dict(type="Strip", strip_left=True, strip_right=False),
        dict(type="Replace", pattern=dict(Regex="[Hh]+"), content="(("),
    ]
    out["first1"] = character_tokenizer(
        [split(r"\(|e", "Isolated"), begins], [*steps, dict(type="Prepend", prepend="(a")]
    )
    out["first2"] = character_tokenizer(
        [split(r"\p{M}|i", "Isolated"), begins],
        [
            *steps[1:],
            dict(type="Lowercase"),
            dict(type="StripAccents"),
            dict(type="Replace", pattern=dict(String="("), content=""),
        ],
    )
    return out


def split(regex: str, behavior: str, invert: bool = False) -> dict:
    """Returns a pre-tokenizer for tokenizer.json. An empty regex means the string "e"."""
    return dict(
        type="Split",
        pattern=dict(Regex=regex) if regex else dict(String="e"),
        behavior=behavior,
        invert=invert,
    )


def character_tokenizer(steps: list, normalizer=()) -> dict:
    """Returns a tokenizer of characters whose words begin with ▁. Its ids show where it splits."""
    if steps[-1]["type"] == "Split":
        steps = [
            *steps,
            dict(type="Metaspace", replacement="▁", prepend_scheme="always", split=False),
        ]
    letters = sorted({c for p in TEXTS for c in p if len(p) < 60} - {"▁"})[:260]
    return dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=[],
        normalizer=dict(type="Sequence", normalizers=list(normalizer)) if normalizer else None,
        pre_tokenizer=dict(type="Sequence", pretokenizers=steps),
        post_processor=None,
        decoder=dict(type="Fuse"),
        model=dict(
            type="BPE",
            dropout=None,
            unk_token="?unknown",
            continuing_subword_prefix=None,
            end_of_word_suffix=None,
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=False,
            vocab={c: i for i, c in enumerate(["?unknown", "▁", *letters])},
            merges=[],
        ),
    )


def all_steps() -> dict:
    """Returns a tokenizer with many normalizers, pre-tokenizers and kinds of added tokens."""
    tok = Tokenizer(models.BPE(unk_token="<unk>"))
    tok.normalizer = normalizers.Sequence(
        [
            normalizers.NFKD(),
            normalizers.Lowercase(),
            normalizers.StripAccents(),
            normalizers.Strip(),
            normalizers.Replace(Regex(r"\s{3,}"), " ~ "),
        ]
    )
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Punctuation("merged_with_next"),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split("a", "merged_with_previous"),
            pre_tokenizers.Split(Regex("[xyz]+"), "contiguous"),
            pre_tokenizers.Split("o", "merged_with_next", invert=True),
            pre_tokenizers.Metaspace(prepend_scheme="never"),
        ]
    )
    trained(tok, 900, ["<unk>", "<s>"], limit_alphabet=80)
    tok.add_tokens(
        [
            AddedToken("word", single_word=True),
            AddedToken("left", lstrip=True, normalized=False),
            AddedToken("RIGHT", rstrip=True, normalized=False),
            AddedToken("[MASK]", lstrip=True, rstrip=True, normalized=False, special=True),
            AddedToken("<tool>"),
            AddedToken("éclair"),
            AddedToken(" ", normalized=False, single_word=True),
            AddedToken("\n\n", normalized=False),
            AddedToken("quick", normalized=True),
            AddedToken("the quick", normalized=True),
            AddedToken("</s>", special=True, normalized=False),
        ]
    )
    return json.loads(tok.to_str())


def affixes() -> dict:
    """Returns a tokenizer with a prefix for subwords and a suffix for words."""
    tok = Tokenizer(
        models.BPE(
            unk_token="<unk>",
            continuing_subword_prefix="##",
            end_of_word_suffix="</w>",
            fuse_unk=True,
        )
    )
    tok.normalizer = normalizers.NFKC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Whitespace(),
            pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True),
        ]
    )
    tok.decoder = decoders.BPEDecoder()
    trained(tok, 1600, ["<unk>"], continuing_subword_prefix="##", end_of_word_suffix="</w>")
    return json.loads(tok.to_str())


def expected(tok: Tokenizer, text: str) -> dict:
    """Returns ids (or their count and hash), and the decoded text if it differs from the text."""
    ids = tok.encode(text, add_special_tokens=False).ids
    shown = tok.decode(ids, skip_special_tokens=False) if ids else ""
    if len(ids) <= LONG:
        return dict(ids=ids) | (dict(text=shown) if shown != text else {})
    out = dict(
        count=len(ids),
        ids_sha256=hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()[:16],
    )
    return out | (
        dict(text_sha256=hashlib.sha256(shown.encode()).hexdigest()[:16]) if shown != text else {}
    )


def write_json(path: pathlib.Path, x) -> None:
    path.write_text(json.dumps(x, ensure_ascii=False, separators=(",", ":")) + "\n")


def write(folder: pathlib.Path, files: dict, texts: list[dict]) -> None:
    """Writes texts.json, and tokenizer.json and expected.json of each tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "texts.json", texts)
    for name, f in files.items():
        to = folder / name
        to.mkdir(exist_ok=True)
        text = json.dumps(f, ensure_ascii=False, separators=(",", ":"))
        (to / "tokenizer.json").write_text(text + "\n")
        tok = Tokenizer.from_str(text)
        write_json(
            to / "expected.json",
            [
                expected(
                    tok, base64.b64decode(t["bytes"]).decode(errors="replace") * t.get("times", 1)
                )
                for t in texts
            ],
        )


def entry(text: bytes, times: int = 1) -> dict:
    """Returns an entry of texts.json: a text, and how often it is repeated."""
    return dict(bytes=base64.b64encode(text).decode()) | (dict(times=times) if times > 1 else {})


def make() -> None:
    """Writes the folder tokenizers/."""
    texts = (
        [entry(p.encode()) for p in TEXTS]
        + [entry(p.encode(), n) for p, n in LONG_TEXTS]
        + [entry(b) for b in BROKEN]
    )
    rng = random.Random(1)
    texts += [entry("".join(rng.choices(TEXTS, k=rng.randint(2, 8))).encode()) for _ in range(150)]
    texts += [entry(random_text(rng).encode()) for _ in range(300)]
    write(ROOT / "tokenizers", tokenizers(), texts)


def random_text(rng: random.Random) -> str:
    """Returns a text of random characters of all ranges, of repeated strings and of TEXTS."""
    blocks = [
        (0x20, 0x7F),
        (0, 0x20),
        (0x80, 0x250),
        (0x300, 0x370),
        (0x370, 0x600),
        (0x600, 0x700),
        (0x900, 0xE80),
        (0x1100, 0x1200),
        (0x1E00, 0x2000),
        (0x2000, 0x2100),
        (0x2100, 0x2C00),
        (0x3000, 0x3400),
        (0x4E00, 0x4F00),
        (0xAC00, 0xAD00),
        (0xA700, 0xA800),
        (0xF900, 0x10000),
        (0x10000, 0x12000),
        (0x1D000, 0x1D800),
        (0x1E000, 0x1F000),
        (0x1F000, 0x20000),
        (0x2F800, 0x2FA20),
        (0, 0xD800),
        (0xE000, 0x110000),
    ]
    out = []
    for _ in range(rng.randint(1, 20)):
        if rng.random() < 0.25:
            out.append(rng.choice(TEXTS))
        elif rng.random() < 0.3:
            out.append(
                rng.choice(
                    [
                        " ",
                        "\n",
                        "\r\n",
                        "'s",
                        "'LL",
                        "  ",
                        "\t",
                        "1",
                        "12",
                        ".",
                        "a",
                        "The",
                        "\u0301",
                        "\u0323",
                        "\u3099",
                        "\u1161",
                        "\u11a8",
                    ]
                )
                * rng.randint(1, 4)
            )
        else:
            lo, hi = rng.choice(blocks)
            out.append("".join(chr(rng.randrange(lo, hi)) for _ in range(rng.randint(1, 6))))
    return "".join(out)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        rng = random.Random(int(sys.argv[3]))
        files = {
            p.parent.name: json.loads(p.read_text())
            for p in sorted((ROOT / "tokenizers").glob("*/tokenizer.json"))
        }
        write(
            pathlib.Path(sys.argv[1]),
            files,
            [entry(random_text(rng).encode()) for _ in range(int(sys.argv[2]))],
        )
    else:
        make()
