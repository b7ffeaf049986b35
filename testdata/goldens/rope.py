"""RoPE's frequencies of transformers for the types of scaling, written to rope.json."""

import json
import pathlib

import torch
import transformers
from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.ministral3.modeling_ministral3 import Ministral3RotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

ROTARY = dict(
    llama=LlamaRotaryEmbedding,
    phi3=Phi3RotaryEmbedding,
    glm4=Glm4RotaryEmbedding,
    gpt_oss=GptOssRotaryEmbedding,
    ministral3=Ministral3RotaryEmbedding,
)

SHORT = [1 + 0.1 * k for k in range(8)]
LONG = [2 + 0.5 * k for k in range(8)]
LONGROPE = dict(rope_type="longrope", short_factor=SHORT, long_factor=LONG)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
MINISTRAL3 = dict(model_type="ministral3", num_key_value_heads=1)
GAIN = dict(llama_4_scaling_beta=0.1, original_max_position_embeddings=16)
DYNAMIC = dict(rope_type="dynamic", factor=4.0)

# Each case: rope_parameters, what else config.json has, and the lengths of batches.
CASES = [
    (dict(rope_type="default"), {}, [0]),
    (dict(rope_type="default", rope_theta=1e6), dict(head_dim=128), [0]),
    (dict(rope_type="linear", factor=4.0), {}, [0]),
    (dict(rope_type="linear", factor=3.7, rope_theta=5e5), dict(head_dim=96), [0]),
    (DYNAMIC, dict(max_position_embeddings=2048), [0, 1, 2047, 2048, 2049, 4096, 8192]),
    (dict(DYNAMIC, rope_theta=1e6, factor=2.5), dict(head_dim=80), [1024, 1025, 100000]),
    (YARN, dict(max_position_embeddings=8192), [0]),
    (dict(YARN, truncate=False), dict(max_position_embeddings=8192), [0]),
    (
        dict(
            YARN,
            factor=40.0,
            original_max_position_embeddings=4096,
            mscale=0.707,
            mscale_all_dim=1.0,
        ),
        {},
        [0],
    ),
    (dict(YARN, attention_factor=1.5, beta_fast=16, beta_slow=2), dict(head_dim=64), [0]),
    (dict(YARN, factor=0.5), {}, [0]),
    (dict(YARN, factor=None), dict(max_position_embeddings=4096), [0]),
    (dict(rope_type="yarn", factor=2.0), dict(max_position_embeddings=4096), [0]),
    # the ramp would begin before the first pair, and also end there
    (dict(YARN, original_max_position_embeddings=128), {}, [0]),
    (dict(YARN, original_max_position_embeddings=16), dict(head_dim=64), [0]),
    # the ramp begins and ends at the same pair
    (dict(YARN, beta_fast=4.0, beta_slow=4.0, truncate=False), {}, [0]),
    (
        dict(
            YARN,
            factor=32.0,
            rope_theta=150000.0,
            original_max_position_embeddings=4096,
            truncate=False,
        ),
        dict(head_dim=64),
        [0],
    ),
    (dict(LLAMA3, rope_theta=5e5), dict(max_position_embeddings=65536), [0]),
    (dict(LLAMA3, rope_theta=5e5, factor=32.0), dict(head_dim=64), [0]),
    # a narrow interpolation enlarges roundings
    (
        dict(LLAMA3, high_freq_factor=1.5, original_max_position_embeddings=16, factor=32.0),
        dict(head_dim=128),
        [0],
    ),
    (
        dict(LONGROPE, original_max_position_embeddings=1024),
        dict(max_position_embeddings=4096),
        [0, 1023, 1024, 1025, 4096, 4097],
    ),
    (dict(LONGROPE, original_max_position_embeddings=1024, factor=32.0), {}, [8, 5000]),
    (
        dict(LONGROPE, original_max_position_embeddings=1024, attention_factor=1.25),
        {},
        [8, 5000],
    ),
    (LONGROPE, dict(max_position_embeddings=4096), [4096, 4097]),
    (dict(rope_type="proportional", partial_rotary_factor=0.5, factor=2.0), {}, [0]),
    (dict(rope_type="proportional", partial_rotary_factor=0.3), dict(head_dim=24), [0]),
    (dict(rope_type="proportional"), dict(model_type="glm4", num_key_value_heads=1), [0]),
    # Phi-3 reads the original length outside of the table alone, and has a default for it
    (LONGROPE, dict(model_type="phi3", max_position_embeddings=8192), [4096, 4097]),
    (
        dict(LONGROPE, original_max_position_embeddings=1024),
        dict(model_type="phi3", max_position_embeddings=8192),
        [4096, 4097],
    ),
    (
        dict(LONGROPE, original_max_position_embeddings=512),
        dict(model_type="phi3", original_max_position_embeddings=1024),
        [1024, 1025],
    ),
    # an empty table is RoPE without scaling, a missing one is YaRN
    ({}, dict(model_type="gpt_oss"), [0]),
    (None, dict(model_type="gpt_oss"), [0]),
    # the default is the table of published models, which has theta 1e6 also beside another one
    (None, dict(MINISTRAL3, head_dim=128), [0]),
    (None, dict(MINISTRAL3, rope_theta=300.0), [0]),
    (dict(YARN, mscale=0.7, llama_4_scaling_beta=0.1), MINISTRAL3, [0]),
    (dict(rope_type="default", **GAIN), MINISTRAL3, [0]),
]

# OLMo 3: the places of a theta that transformers reads for full attention and for windows.
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT = dict(rope_type="default")
KINDS = [
    {},
    dict(rope_theta=300.0),
    dict(rope_theta=300.0, rope_scaling=YARN),
    dict(rope_theta=300.0, rope_scaling=dict(YARN, rope_theta=700.0)),
    dict(rope_theta=300.0, rope_parameters={FULL: DEFAULT, SLIDING: DEFAULT}),
    dict(rope_theta=300.0, rope_parameters={FULL: dict(DEFAULT, rope_theta=900.0)}),
    dict(rope_theta=300.0, rope_parameters={SLIDING: dict(DEFAULT, rope_theta=800.0)}),
    dict(
        rope_theta=300.0,
        rope_scaling=YARN,
        rope_parameters={
            FULL: dict(DEFAULT, rope_theta=900.0),
            SLIDING: dict(DEFAULT, rope_theta=800.0),
        },
    ),
    # a share of the features for each kind of layer
    dict(rope_parameters={FULL: DEFAULT, SLIDING: dict(rope_type="proportional")}),
    dict(
        rope_parameters={
            FULL: dict(rope_type="proportional"),
            SLIDING: dict(rope_type="proportional", partial_rotary_factor=0.25),
        }
    ),
]


def rounded(x: torch.Tensor) -> list[float]:
    return [float(f"{v:.9g}") for v in x.tolist()]


def kinds() -> list[dict]:
    """Returns OLMo 3's frequencies of both kinds of layers."""
    cases = []
    for more in KINDS:
        fields = dict(
            model_type="olmo3",
            vocab_size=8,
            hidden_size=32,
            intermediate_size=8,
            num_hidden_layers=4,
            num_attention_heads=2,
            sliding_window=4,
            max_position_embeddings=8192,
        )
        fields |= more
        rotary = Olmo3RotaryEmbedding(transformers.Olmo3Config(**json.loads(json.dumps(fields))))
        cases.append(
            dict(
                config=fields,
                length=0,
                frequencies=rounded(getattr(rotary, f"{FULL}_inv_freq")),
                scale=getattr(rotary, f"{FULL}_attention_scaling"),
                window=rounded(getattr(rotary, f"{SLIDING}_inv_freq")),
            )
        )
    return cases


def write(path: pathlib.Path) -> None:
    cases = kinds()
    for parameters, more, lengths in CASES:
        fields = dict(
            model_type="llama",
            vocab_size=8,
            hidden_size=16,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            head_dim=16,
            max_position_embeddings=1024,
        )
        fields |= more | dict(rope_parameters=parameters)
        for n in lengths:
            config = transformers.AutoConfig.for_model(**json.loads(json.dumps(fields)))
            rotary = ROTARY[config.model_type](config)
            if n > 0:
                rotary(torch.zeros(1), torch.tensor([[0, n - 1]]))
            cases.append(
                dict(
                    config=fields,
                    length=n,
                    frequencies=rounded(rotary.inv_freq),
                    scale=rotary.attention_scaling,
                )
            )
    lines = ",\n".join(json.dumps(c) for c in cases)
    path.write_text(f"[\n{lines}\n]\n")
