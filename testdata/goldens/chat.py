"""Renderings of chat templates, and the tokens that assistants wrote, by transformers; files of rows.

chat/templates has the templates. The templates of models, and the variants named training with
generation tags, are from the package trl 1.16.0 (Apache-2.0); mistral and forms were written here.
chat/conversations.json has the conversations; chat/expected.json has, for each template and
conversation, the rendering of apply_chat_template or the error. For templates with generation tags
and the two tokenizers of chat/, it also has the ranges of return_assistant_tokens_mask.
chat/variables.json has renderings with variables for all conversations (data.chat_variables).
"""

import datetime
import gzip
import json
import pathlib
import re

import pyarrow
import pyarrow.parquet
import zstandard
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

ROOT = pathlib.Path(__file__).resolve().parent
FOLDER = ROOT / "chat"
# What strftime_now shows.
NOW = datetime.datetime(2026, 3, 9, 8, 5, 7)

WEATHER = dict(
    type="function",
    function=dict(
        name="get_weather",
        description="The weather of a <city> & its region",
        parameters=dict(
            type="object",
            properties=dict(
                city=dict(type="string", description='Name, such as "Zürich"'),
                days=dict(type="integer", default=1),
                units=dict(type="string", enum=["celsius", "fahrenheit"]),
                tags=dict(type="array", items=dict(type="string")),
            ),
            required=["city"],
        ),
    ),
)
USER = dict(role="user", content="How warm is it?")
CALL = dict(
    role="assistant",
    content="",
    tool_calls=[
        dict(
            id="call00001",
            type="function",
            function=dict(
                name="get_weather",
                arguments=dict(
                    city='Zürich "HB"', days=2, ratio=0.5, big=1e20, tags=["a", "b"], far=None
                ),
            ),
        )
    ],
)
RESULT = dict(
    role="tool", name="get_weather", tool_call_id="call00001", content='{"celsius": 21.5}'
)
CONVERSATIONS = dict(
    plain=dict(messages=[USER, dict(role="assistant", content="It is 20 °C.")]),
    multi=dict(
        messages=[
            dict(role="system", content="Be brief.\nSpeak English."),
            dict(role="user", content=" Two  spaces, a tab\t and <b>tags</b> "),
            dict(role="assistant", content="First: naïve café 漢字 🎉\n\n- a\n- b\n"),
            dict(role="user", content="And\nthen?"),
            dict(role="assistant", content='  Second answer, it\'s "quoted".  '),
        ]
    ),
    prompt=dict(
        messages=[dict(role="system", content="S"), dict(role="user", content="U")],
        add_generation_prompt=True,
    ),
    thinking=dict(
        messages=[
            dict(role="user", content="2+2?"),
            dict(role="assistant", reasoning_content="Two and two\nis four.", content="4"),
            dict(role="user", content="3+3?"),
            dict(role="assistant", content="<think>\nThree twice\n</think>\n\n6"),
        ]
    ),
    tools=dict(
        messages=[
            dict(role="system", content="Use tools."),
            USER,
            CALL,
            RESULT,
            dict(role="assistant", content="21.5 °C"),
        ],
        tools=[WEATHER],
    ),
    call=dict(messages=[USER, CALL], tools=[WEATHER]),
    parts=dict(
        messages=[
            dict(
                role="user", content=[dict(type="text", text="One "), dict(type="text", text="two")]
            ),
            dict(role="assistant", content=[dict(type="text", text="Three")]),
        ]
    ),
    roles=dict(
        messages=[dict(role="assistant", content="I begin"), dict(role="robot", content="x")]
    ),
    empty=dict(messages=[dict(role="user", content=""), dict(role="assistant", content="")]),
    options=dict(
        messages=[USER, dict(role="assistant", content="A")],
        chat_template_kwargs=dict(enable_thinking=False, reasoning_effort="low"),
        add_generation_prompt=True,
    ),
)
BOS, EOS = "<s>", "</s>"

# Shows what a template sees of each variable.
SHOWN = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}
{% for v in [text, yes, no, whole, zero, one, real, large, small, list] %}
{{ v }} {{ v | tojson }} {{ v is string }} {{ v is number }} {{ v is boolean }} {{ v is iterable }}
{%- if v %} true{% endif %}

{% endfor %}
{{ one + whole }} {{ list | length }} {{ list[0] ~ list[-1][0] }} {{ text | upper }} {{ eos_token }}
{{ absent is defined }} {{ yes is defined }}
"""
# Templates with the variables that they are rendered with.
VARIABLES = [
    ("qwen3", dict(enable_thinking=False)),
    ("qwen3", dict(enable_thinking=True)),
    ("qwen3_5_think", dict(enable_thinking=False)),
    ("qwen3_5_think_training", dict(enable_thinking=True)),
    (
        "gptoss",
        dict(
            reasoning_effort="high",
            model_identity='You are "small" & kind.',
            builtin_tools=["browser", "python"],
        ),
    ),
    (
        "llama3_1",
        dict(
            date_string="09 Mar 2026",
            builtin_tools=["brave_search", "wolfram_alpha"],
            tools_in_user_message=False,
        ),
    ),
    (
        SHOWN,
        dict(
            text='a "b" {{ c }} <é>\n',
            yes=True,
            no=False,
            whole=-7,
            zero=0,
            one=1.0,
            real=0.1,
            large=1e22,
            small=-1e-7,
            list=["a'", 1, 2.0, True, [], ["x"]],
        ),
    ),
]


def tokenizer(base: str, special: list[str]) -> PreTrainedTokenizerFast:
    """Returns a small tokenizer of tokenizers/ with the special tokens of the templates."""
    t = PreTrainedTokenizerFast(tokenizer_file=str(ROOT / "tokenizers" / base / "tokenizer.json"))
    t.backend_tokenizer.add_special_tokens([AddedToken(s, special=True) for s in special])
    t.bos_token, t.eos_token = BOS, EOS
    return t


def ranges(mask: list[int]) -> list[list[int]]:
    """Returns the ranges of tokens whose mask is 1."""
    out = []
    for i, x in enumerate(mask):
        if x and out and out[-1][1] == i:
            out[-1][1] = i + 1
        elif x:
            out.append([i, i + 1])
    return out


def write_rows() -> None:
    """Writes the same records as rows.jsonl, .jsonl.gz, .jsonl.zst and .parquet.

    In the Parquet file, each row has the fields of all rows, and most of them are null. It has
    several row groups and pages, and lists that are empty or null.
    """
    rows = [dict(messages=CONVERSATIONS[c]["messages"]) for c in ("plain", "multi", "thinking")]
    call = json.loads(json.dumps(CALL))
    del call["tool_calls"][0]["function"]["arguments"][
        "far"
    ]  # a null that Parquet cannot tell from absent
    rows += [
        dict(
            messages=[USER, call, RESULT, dict(role="assistant", content="21.5 °C")],
            tools=[WEATHER],
        )
    ]
    for i in range(40):
        rows.append(
            dict(
                messages=[
                    dict(role="user", content=f"Question {i}: {'word ' * (i % 9)}"),
                    dict(role="assistant", content="Answer " + "x" * (i * 7 % 31)),
                ]
            )
        )
        rows.append(dict(text=f'Text {i} with "quotes" and\nnewlines\t\u2028é'))
        rows.append(dict(input_ids=[i % 50, 1, 2], labels=[-100, 1, i % 50]))
    lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode()
    (FOLDER / "rows.jsonl").write_bytes(lines)
    half = len(lines) // 2
    with open(FOLDER / "rows.jsonl.gz", "wb") as f:  # two members
        f.write(gzip.compress(lines[:half], mtime=0) + gzip.compress(lines[half:], mtime=0))
    z = zstandard.ZstdCompressor(level=3)
    (FOLDER / "rows.jsonl.zst").write_bytes(z.compress(lines[:half]) + z.compress(lines[half:]))
    table = pyarrow.Table.from_pylist([{k: r.get(k) for k in FIELDS} for r in rows])
    pyarrow.parquet.write_table(
        table, FOLDER / "rows.parquet", row_group_size=37, data_page_size=512, compression="zstd"
    )


FIELDS = ("text", "messages", "tools", "input_ids", "labels")


def write_variables(templates: dict[str, str], t: PreTrainedTokenizerFast) -> None:
    """Writes the renderings with variables."""
    cases = []
    for name, variables in VARIABLES:
        used = ("plain",) if name == SHOWN else ("plain", "multi", "thinking", "tools")
        for conversation in used:
            c = json.loads(json.dumps(CONVERSATIONS[conversation]))
            text = t.apply_chat_template(
                c["messages"],
                tools=c.get("tools"),
                chat_template=templates.get(name, name),
                tokenize=False,
                **variables,
            )
            case = dict(template=name, conversation=conversation, variables=variables, text=text)
            cases.append(json.dumps(case, ensure_ascii=False))
    lines = ",\n".join(cases)
    (FOLDER / "variables.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


class Clock(datetime.datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz=None):  # noqa: D102
        return NOW


def write() -> None:
    """Writes the conversations, the tokenizers and the expected renderings."""
    templates = {
        p.stem: p.read_text(encoding="utf-8")
        for p in sorted((FOLDER / "templates").glob("*.jinja"))
    }
    found = {
        s
        for text in templates.values()
        for s in re.findall(
            r"<[|｜][a-zA-Z_▁]+[|｜]>|<(?:start|end)_of_turn>|\[/?[A-Z_]{4,}\]", text
        )
    }
    special = [BOS, EOS, *sorted(found)]
    chat_template_utils.datetime = Clock
    small = {}
    for base in ("qwen2", "gemma"):
        small[base] = tokenizer(base, special)
        small[base].backend_tokenizer.save(str(FOLDER / f"{base}.json"))
    out = []
    for name, text in templates.items():
        for conversation, c in CONVERSATIONS.items():
            # The same objects for all templates: JSON data has no others.
            c = json.loads(json.dumps(c))
            kwargs = c.get("chat_template_kwargs", {})
            args = dict(
                tools=c.get("tools"),
                chat_template=text,
                add_generation_prompt=c.get("add_generation_prompt", False),
                **kwargs,
            )
            case = dict(template=name, conversation=conversation)
            try:
                case["text"] = small["qwen2"].apply_chat_template(
                    c["messages"], tokenize=False, **args
                )
            except Exception as e:
                case["error"] = f"{type(e).__name__}: {e}"
            if (
                "generation" in name + text
                and "{% generation" in text.replace("{%-", "{%")
                and "text" in case
            ):
                for base, t in small.items():
                    found = t.apply_chat_template(
                        c["messages"], return_assistant_tokens_mask=True, return_dict=True, **args
                    )
                    case[base] = dict(
                        tokens=len(found["input_ids"]), ranges=ranges(found["assistant_masks"])
                    )
            out.append(case)
    dump = lambda x: json.dumps(x, ensure_ascii=False, indent=1) + "\n"  # noqa: E731
    (FOLDER / "conversations.json").write_text(dump(CONVERSATIONS), encoding="utf-8")
    lines = ",\n".join(json.dumps(c, ensure_ascii=False) for c in out)
    (FOLDER / "expected.json").write_text(
        json.dumps(dict(now=NOW.isoformat(), bos_token=BOS, eos_token=EOS))[:-1]
        + f', "cases": [\n{lines}\n]}}\n',
        encoding="utf-8",
    )
    write_variables(templates, small["qwen2"])
    write_rows()
    print(f"chat: {len(out)} renderings, {sum('error' in c for c in out)} refused")


if __name__ == "__main__":
    write()
