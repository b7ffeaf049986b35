"""Models of transformers with sequences sharded over ranks, compared with one process in float64.

The tests compare logits, loss and every gradient. Ranks are threads.
"""

import copy
import functools
import itertools
import sys
import unittest
import unittest.mock

import ulysses
from need import need, need_torch, packages
from ranks import contexts, joined, local
from reference import TOLERANCE, error, per_head
from ulysses.mixers import _replace
from ulysses.model_call import Forward, entered

try:
    import torch
    import transformers
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        checkpoint_wrapper,
    )
    from torch.utils.checkpoint import checkpoint
except ImportError:
    torch = transformers = None
if transformers is not None:
    from families import FAMILIES, TINY, VOCAB, build, float64, loss_of, own_recurrence, reference


def inputs(kind):
    """Returns a batch: (ids, positions for the reference, keyword arguments of the call, labels,
    documents)."""
    g = torch.Generator().manual_seed(5)
    b, s = {
        "plain": (2, 24),
        "packed": (1, 23),
        "uneven": (1, 21),
        "padded right": (2, 24),
        "padded left": (2, 22),
        "without positions": (1, 22),
        "packed rows": (2, 20),
    }[kind]
    ids, positions = torch.randint(0, VOCAB, (b, s), generator=g), torch.arange(s).expand(b, s)
    documents = [(i, 0, s) for i in range(b)]
    if kind == "packed":  # documents end inside and at the end of shards; some have one token
        ends = (0, 3, 4, 5, 12, 22, 23)
        documents = [(0, a, b_) for a, b_ in zip(ends, ends[1:])]
        positions = torch.cat([torch.arange(b_ - a) for _, a, b_ in documents])[None]
    if kind == "packed rows":  # other documents in each sequence
        documents = [(0, 0, 12), (0, 12, 20), (1, 0, 2), (1, 2, 20)]
        positions = torch.stack(
            [
                torch.cat([torch.arange(12), torch.arange(8)]),
                torch.cat([torch.arange(2), torch.arange(18)]),
            ]
        )
    call = {"input_ids": ids, "position_ids": positions}
    if kind == "padded right":  # on 4 ranks the mask hides tokens of the last ranks only
        documents = [(0, 0, 24), (1, 0, 15)]
    if kind == "padded left":
        documents = [(0, 5, 22), (1, 0, 22)]
    if kind.startswith("padded"):
        call["attention_mask"] = torch.zeros(b, s, dtype=torch.long)
        for i, lo, hi in documents:
            call["attention_mask"][i, lo:hi] = 1
    if kind in ("without positions", "padded right"):
        call["position_ids"] = None
    labels = torch.full((b, s), -100)
    for i, lo, hi in documents:
        labels[i, lo : hi - 1] = ids[i, lo + 1 : hi]
    return ids, positions, call, labels, documents


KINDS = (
    "plain",
    "packed",
    "packed rows",
    "uneven",
    "padded right",
    "padded left",
    "without positions",
)


def register(ctx, model):
    """Threads share `ulysses.use`, so each rank's context has its own name here."""
    name = f"ulysses_{ctx.rank}"
    ulysses.register_transformers(name, ctx)
    model.set_attn_implementation(name)
    return model


def without_keyword(forward):
    """Returns the forward of a layer to which a model does not pass its keyword arguments."""
    return lambda *args, ulysses_forward=None, **options: forward(*args, **options)


def checkpointed(forward, reentrant):
    """Returns the forward of a layer with torch.utils.checkpoint around it."""

    def run(*args, **options):
        return checkpoint(functools.partial(forward, **options), *args, use_reentrant=reentrant)

    return run


@need_torch
class Families(unittest.TestCase):
    def setUp(self):
        torch.set_num_threads(1)

    def check(self, family, meshes=((1, {}), (2, {}), (4, {}))):
        model = build(family)
        for kind in KINDS:
            ids, positions, call, labels, documents = inputs(kind)
            logits, loss, gradients = reference(family, ids, positions, labels, documents)

            def body(ctx):
                rank_model = register(ctx, models[ctx.rank])
                found = rank_model(**{name: local(x, ctx) for name, x in call.items()}).logits
                rank_labels = local(labels, ctx)
                mean = ulysses.reduce_sequence_parallel_loss(
                    loss_of(found, rank_labels),
                    (rank_labels != -100).sum(),
                    gradients="summed",
                    context=ctx,
                )
                mean.backward()
                return found.detach(), mean.item()

            for size, mesh in meshes:
                with self.subTest(family, kind=kind, ranks=size, mesh=mesh):
                    models = [copy.deepcopy(model) for _ in range(size)]
                    found = contexts(size, body, **mesh)
                    whole = joined([y for y, _ in found], **mesh)
                    self.assertTrue(bool(whole.isfinite().all()))
                    real = ~logits.isnan().any(-1)
                    self.assertLess(error(whole[real], logits[real]), TOLERANCE)
                    for _, mean in found:
                        self.assertLess(abs(mean - loss) / loss, TOLERANCE)
                    parts = [dict(m.named_parameters()) for m in models]
                    for name, want in gradients.items():
                        got = sum(p[name].grad for p in parts)
                        self.assertLess(error(got, want), TOLERANCE, name)
                        # The error of a wrong head is as large as its gradient. The terms of one
                        # head cancel to a tenth here, so the tolerance is ten times as large.
                        if name.endswith(("A_log", "dt_bias")):
                            self.assertLess(per_head(got, want), 10 * TOLERANCE, name)

    def test_window_of_the_mask(self):
        """Layers that do not pass their window have the window of the model's mask."""
        model = build("phimoe").eval()
        ids = torch.arange(26).reshape(2, 13)
        with torch.no_grad():
            want = model(input_ids=ids, use_cache=False).logits

            def body(ctx):
                rank_model = register(ctx, copy.deepcopy(model))
                given = {"input_ids": ids, "position_ids": torch.arange(13).expand(2, 13)}
                with torch.no_grad():
                    return rank_model(**{n: local(x, ctx) for n, x in given.items()}).logits

            for size in (1, 2, 4):
                found = joined(contexts(size, body))
                self.assertLess(error(found, want), TOLERANCE, size)

    def test_zigzag(self):
        """Models on a ring, with tokens in a zigzag: documents, padding and windows."""
        meshes = ((2, dict(ring=2, zigzag=True)), (4, dict(ring=2, zigzag=True, gather_keys=True)))
        for family in ("llama", "gpt-oss"):
            self.check(family, meshes)


def _family(name):
    def test(self):
        self.check(name)

    return test


if transformers is not None:
    for _name in FAMILIES:
        if _name == "phimoe":  # its router draws experts in training
            continue
        setattr(
            Families,
            "test_" + _name.replace(" ", "_").replace("-", "_").replace(".", "_"),
            _family(_name),
        )


@need_torch
class Calls(unittest.TestCase):
    def setUp(self):
        torch.set_num_threads(1)

    def both(self, model, calls, words, cls=None, size=2):
        """Checks that every rank refuses its call with these words. The next call works."""

        def body(ctx):
            rank_model = register(ctx, copy.deepcopy(model))
            with self.assertRaisesRegex(cls or ulysses.UlyssesError, words):
                rank_model(**calls(ctx))
            ids = torch.ones(1, 3, dtype=torch.long)
            return (
                rank_model(input_ids=ids).logits.shape if cls is not ulysses.Unsupported else None
            )

        return contexts(size, body)

    def test_layers_without_the_interface(self):
        """Layers that apply the model's mask themselves are refused on one rank, too.

        This package makes no mask, so the layers of BLOOM, and compressed keys, would see tokens
        of the future.
        """
        ids, positions = torch.arange(26).reshape(2, 13), torch.arange(13).expand(2, 13)
        with ulysses.Context() as ctx:
            ulysses.register_transformers("ulysses", ctx)
            bloom = transformers.BloomConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                n_layer=2,
                n_head=4,
                attn_implementation="ulysses",
            )
            with self.assertRaisesRegex(ulysses.Unsupported, "BloomForCausalLM: its layers do not"):
                transformers.BloomForCausalLM(bloom)(input_ids=ids)
            model = build("llama", attention="ulysses")
            right = model(input_ids=ids, position_ids=positions).logits
            attention = type(model.model.layers[0].self_attn)
            module = sys.modules[attention.__module__]
            rotate = module.apply_rotary_pos_emb

            def compressed(q, k, cos, sin, **options):
                q, k = rotate(q, k, cos, sin, **options)
                return q, torch.cat([k[:, :, :3], k], 2)

            with (
                unittest.mock.patch.object(module, "apply_rotary_pos_emb", compressed),
                self.assertRaisesRegex(ulysses.Unsupported, "has 16 keys for 13 tokens without"),
            ):
                model(input_ids=ids, position_ids=positions, use_cache=False)
            again = model(input_ids=ids, position_ids=positions).logits
            self.assertTrue(torch.equal(again, right))

    def test_contiguous(self):
        """Some models view the output with other axes, as transformers' functions allow."""
        q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
        with ulysses.Context() as ctx:
            out, _ = ulysses.transformers_attention(torch.nn.Module(), q, k, k, context=ctx)
        self.assertEqual(out.view(2, 5, 32).shape, (2, 5, 32))

    def test_documents_in_other_mixers(self):
        """State space layers pass their state from document to document, also on one rank."""
        model = transformers.JambaForCausalLM(
            transformers.JambaConfig(
                **TINY,
                num_experts=2,
                num_experts_per_tok=1,
                attn_layer_period=2,
                attn_layer_offset=1,
                mamba_d_state=4,
                mamba_dt_rank=4,
                use_mamba_kernels=False,
                pad_token_id=None,
            )
        ).eval()
        ids, one = torch.arange(12).reshape(1, 12), torch.arange(12)[None]
        want = model(input_ids=ids, use_cache=False).logits
        with ulysses.Context() as ctx, torch.no_grad():
            mine = register(ctx, model)
            found = mine(input_ids=ids, position_ids=one, use_cache=False).logits
            self.assertLess(error(found, want.detach()), TOLERANCE)
            mask = torch.ones(1, 12, dtype=torch.long)
            mask[0, :3] = 0
            for wrong in (dict(position_ids=one % 7), dict(attention_mask=mask)):
                with self.assertRaisesRegex(ulysses.Unsupported, "mamba is .*would mix documents"):
                    mine(input_ids=ids, use_cache=False, **wrong)

    def test_wrong_on_one_rank(self):
        """A call that is wrong on one rank raises on every rank."""
        model, ids = build("llama"), torch.arange(12).reshape(1, 12)
        right = {
            "input_ids": ids,
            "position_ids": torch.arange(12)[None],
            "attention_mask": torch.ones(1, 12, dtype=torch.long),
        }
        hole = torch.ones(1, 6, dtype=torch.long)
        hole[0, 3] = 0
        for words, wrong in (
            ("position_ids", {"position_ids": None}),
            ("position_ids", {"position_ids": torch.arange(5)[None]}),
            ("attention_mask", {"attention_mask": torch.ones(1, 4)}),
            ("attention_mask", {"attention_mask": torch.ones(1, 1, 6, 6)}),
            ("attention_mask is .* on rank 0 and", {"attention_mask": None}),
            (
                "hides tokens in the middle of sequence 0, before token .*move the padding",
                {"attention_mask": hole},
            ),
            ("input_ids", {"input_ids": None}),
            (
                "tokens of each sequence",
                {
                    "input_ids": ids[:, :9],
                    "position_ids": torch.arange(9)[None],
                    "attention_mask": torch.ones(1, 9),
                },
            ),
            (
                "sequences",
                {"input_ids": ids.reshape(2, 6)[:, :6].expand(2, 6), "attention_mask": None},
            ),
            ("labels", {"labels": ids}),
            ("key-value cache", {"use_cache": True}),
            ("cu_seq_lens_q", {"cu_seq_lens_q": torch.tensor([0, 6])}),
        ):
            for bad in (0, 1):

                def calls(ctx):
                    shards = {name: local(x, ctx) for name, x in right.items()}
                    return {**shards, **wrong} if ctx.rank == bad else shards

                with self.subTest(words, rank=bad):
                    self.both(model, calls, words)

    def test_padding(self):
        """Padding on the right: logits, loss and gradients of transformers' own call.

        The reference of `Families` is proven by transformers' attention in float64 on the padded
        batch. Outputs of padding are finite, and the token of padding has no gradient.
        """
        ends, pad = (17, 9, 17, 1), VOCAB - 1
        ids = torch.randint(0, pad, (4, 17), generator=torch.Generator().manual_seed(2))
        mask = (torch.arange(17)[None] < torch.tensor(ends)[:, None]).long()
        ids[mask == 0] = pad
        labels = ulysses.shift_labels(ids.masked_fill(mask == 0, -100))
        documents = [(b, 0, n) for b, n in enumerate(ends)]
        positions = torch.arange(17).expand(4, -1)
        for family in ("llama", "mistral with a window", "gpt2", "qwen3.5 text"):
            logits, loss, gradients = reference(family, ids, positions, labels, documents)
            with float64(), own_recurrence():
                model = build(family, "sdpa").double()
                found = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
                mean = loss_of(found, labels)
                mean.backward()
            real = mask.bool()
            self.assertLess(error(found.detach()[real], logits[real]), 1e-12, family)
            self.assertLess(abs(float(mean) - loss), 1e-12, family)
            for name, p in model.named_parameters():
                self.assertLess(error(p.grad, gradients[name]), 1e-10, (family, name))
            model = build(family)

            def body(ctx):
                rank_model, y = register(ctx, copy.deepcopy(model)), local(labels, ctx)
                out = rank_model(input_ids=local(ids, ctx), attention_mask=local(mask, ctx))
                ulysses.reduce_sequence_parallel_loss(
                    loss_of(out.logits, y), (y != -100).sum(), gradients="summed", context=ctx
                ).backward()
                return out.logits.detach(), dict(rank_model.named_parameters())

            for size in (1, 3, 4):
                found = contexts(size, body)
                whole = torch.cat([y for y, _ in found], 1)
                self.assertTrue(bool(whole.isfinite().all()), (family, size))
                self.assertLess(error(whole[real], logits[real]), TOLERANCE, (family, size))
                for name, want in gradients.items():
                    got = sum(p[name].grad for _, p in found)
                    self.assertLess(error(got, want), TOLERANCE, (family, size, name))
                    if name.endswith("embed_tokens.weight"):
                        self.assertEqual(float(got[pad].abs().max()), 0, (family, size))

    def test_positions_that_start_at_0_on_every_rank(self):
        """Positions from 0 on every rank are refused. With Context.use, they are documents."""
        model = build("llama")
        self.both(
            model,
            lambda ctx: {
                "input_ids": torch.ones(1, 4, dtype=torch.long),
                "position_ids": torch.arange(4)[None],
            },
            "start at 0 on rank 1 of 2, whose first token has index 4",
            ulysses.InvalidArgument,
        )
        ids = torch.arange(8)[None]
        documents = reference(
            "llama",
            ids,
            torch.arange(4).repeat(2)[None],
            torch.zeros(1, 8, dtype=torch.long),
            [(0, 0, 4), (0, 4, 8)],
        )[0]

        def body(ctx):
            ctx.use(ulysses.Sequences(1, 8, None, (0, 4, 8)))
            rank_model = register(ctx, copy.deepcopy(model))
            return [
                rank_model(input_ids=local(ids, ctx), position_ids=p).logits.detach()
                for p in (torch.arange(4)[None], None)
            ]

        for found in zip(*contexts(2, body)):
            self.assertLess(error(torch.cat(found, 1), documents), TOLERANCE)

    def test_fewer_tokens_than_ranks(self):
        self.both(
            build("llama"),
            lambda ctx: {"input_ids": torch.ones(1, 1 if ctx.rank == 0 else 0, dtype=torch.long)},
            "one token or more",
        )

    def test_positions_that_jump(self):
        """A jump of positions starts a document, as in transformers. Positions need not start at 0,
        and one row of positions may serve all sequences."""
        ids = torch.arange(22).reshape(2, 11)
        for positions in (
            torch.tensor([[0, 1, 2, 7, 8, 9, 4, 4, 5, 0, 1]]),
            torch.tensor(
                [[9, 10, 11, 12, 0, 1, 2, 3, 4, 5, 6], [5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3]]
            ),
        ):
            for family in ("llama", "gpt2", "qwen2 with a window"):
                model = build(family)  # not in a thread: they share the random numbers
                want = build(family, "sdpa")(
                    input_ids=ids, position_ids=positions, use_cache=False
                ).logits.detach()

                def body(ctx):
                    rank_model = register(ctx, copy.deepcopy(model))
                    return rank_model(
                        input_ids=local(ids, ctx), position_ids=local(positions, ctx)
                    ).logits.detach()

                for size in (1, 2, 4):
                    self.assertLess(
                        error(torch.cat(contexts(size, body), 1), want), TOLERANCE, (family, size)
                    )

    def test_loss_of_the_model(self):
        """With labels and shift_labels the model's own loss is the mean over its rank's tokens."""
        ids, positions, _, labels, documents = inputs("packed")
        for family in ("llama", "qwen3.5 text", "gpt2"):
            want, model = reference(family, ids, positions, labels, documents)[1], build(family)

            def body(ctx):
                rank_labels = local(labels, ctx)
                loss = register(ctx, copy.deepcopy(model))(
                    input_ids=local(ids, ctx),
                    position_ids=local(positions, ctx),
                    labels=rank_labels,
                    shift_labels=rank_labels,
                ).loss
                return ulysses.reduce_sequence_parallel_loss(
                    loss, (rank_labels != -100).sum(), context=ctx
                ).item()

            for size in (1, 2, 4):
                for found in contexts(size, body):
                    self.assertLess(abs(found - want) / want, TOLERANCE, (family, size))

    def test_layers_that_mix_tokens_otherwise(self):
        """Models with convolutions, recurrent states or token shifts are refused on several ranks.

        The message names the layer, which would compute on the tokens of its rank only.
        """
        for config, model, more, words in (
            (
                "Lfm2Config",
                "Lfm2ForCausalLM",
                dict(layer_types=["conv", "full_attention"]),
                "layer 0 is of type 'conv'",
            ),
            (
                "OlmoHybridConfig",
                "OlmoHybridForCausalLM",
                dict(layer_types=["linear_attention", "full_attention"]),
                "OlmoHybridGatedDeltaNet",
            ),
            (
                "MiniMaxConfig",
                "MiniMaxForCausalLM",
                dict(num_local_experts=2, layer_types=["linear_attention", "full_attention"]),
                "MiniMaxLightningAttention",
            ),
            (
                "JambaConfig",
                "JambaForCausalLM",
                dict(
                    num_experts=2,
                    attn_layer_period=2,
                    attn_layer_offset=1,
                    use_mamba_kernels=False,
                    mamba_d_state=4,
                ),
                "Jamba",
            ),
            (
                "Llama4TextConfig",
                "Llama4ForCausalLM",
                dict(num_local_experts=2, intermediate_size_mlp=48),
                "layer 0 is of type 'chunked_attention'",
            ),
        ):
            made = getattr(transformers, model)(
                getattr(transformers, config)(**{**TINY, **more}, pad_token_id=None)
            )
            with self.subTest(model):
                self.both(
                    made,
                    lambda ctx: {"input_ids": torch.ones(1, 4, dtype=torch.long)},
                    f"{model} on 2 ranks: .*{words}.*run the model on one rank",
                    ulysses.Unsupported,
                )
        with (
            ulysses.Context() as ctx,
            self.assertRaisesRegex(ulysses.Unsupported, "chunked_overlay"),
        ):
            register(ctx, made)(input_ids=torch.ones(1, 4, dtype=torch.long))

    def test_convolution_with_a_bias(self):
        """A gated delta layer is not replaced if its convolution has a bias."""
        made = build("qwen3.5 text")
        conv = made.model.layers[0].linear_attn.conv1d
        conv.bias = torch.nn.Parameter(torch.ones(conv.weight.shape[0]))
        self.both(
            made,
            lambda ctx: {"input_ids": torch.ones(1, 4, dtype=torch.long)},
            "layers.0.linear_attn is a Qwen3_5GatedDeltaNet.*run the model on one rank",
            ulysses.Unsupported,
        )

    def test_dropout(self):
        """Dropout of a model in training has one choice on all ranks, and is drawn on rank 0."""
        config = transformers.LlamaConfig(**TINY, attention_dropout=0.5)
        model = transformers.LlamaForCausalLM(config).train()
        ids = torch.arange(12)[None] % VOCAB

        def body(ctx):
            lo, hi = ulysses.shard_rows(12, ctx.size, ctx.rank)
            made = register(ctx, copy.deepcopy(model))
            first, second = (made(input_ids=ids[:, lo:hi]).logits.detach() for _ in range(2))
            return first, second, made.eval()(input_ids=ids[:, lo:hi]).logits.detach()

        first, second, none = (torch.cat(x, 1) for x in zip(*contexts(2, body)))
        self.assertGreater(error(first, none), 1e-3)
        self.assertGreater(error(first, second), 1e-3)

    def test_generate(self):
        """On one rank, generation equals transformers': with a cache, and with padding without one.

        On two ranks, a cache is refused.
        """
        ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
        for family in ("llama", "mistral with a window", "gpt2", "qwen3.5 text"):
            plain, model = build(family, "sdpa").eval(), build(family).eval()
            options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
            want = plain.generate(ids, attention_mask=torch.ones_like(ids), **options)
            with ulysses.Context() as ctx:
                rank_model = register(ctx, model)
                self.assertEqual(
                    rank_model.generate(
                        ids, attention_mask=torch.ones_like(ids), **options
                    ).tolist(),
                    want.tolist(),
                    family,
                )
                mask = torch.ones_like(ids)
                mask[0, :2] = 0
                padded = plain.generate(ids, attention_mask=mask, **options)
                self.assertEqual(
                    rank_model.generate(
                        ids, attention_mask=mask, use_cache=False, **options
                    ).tolist(),
                    padded.tolist(),
                    family,
                )
                with self.assertRaisesRegex(ulysses.Unsupported, "use_cache=False"):
                    rank_model.generate(ids, attention_mask=mask, **options)
                if family == "llama":
                    with self.assertRaisesRegex(ulysses.Unsupported, "DynamicCache"):
                        rank_model.generate(
                            ids,
                            attention_mask=torch.ones_like(ids),
                            cache_implementation="static",
                            **options,
                        )

        def body(ctx):
            rank_model = register(ctx, copy.deepcopy(plain))
            with self.assertRaisesRegex(
                ulysses.Unsupported, "a key-value cache on 2 ranks.*generate on one rank"
            ):
                rank_model.generate(ids, attention_mask=torch.ones_like(ids), **options)

        contexts(2, body)

    def test_layers_that_run_again(self):
        """With gradient checkpointing, layers run again in backward, after another call has set
        other documents."""
        ids = torch.arange(12)[None] % VOCAB
        one, two = torch.arange(12)[None], torch.cat([torch.arange(5), torch.arange(7)])[None]
        for family in ("llama", "gpt2", "qwen3.5 text"):
            model = build(family)

            def gradients(ctx, again):
                rank_model = register(ctx, copy.deepcopy(model))
                if again:
                    rank_model.gradient_checkpointing_enable(
                        gradient_checkpointing_kwargs={"use_reentrant": False}
                    )
                first = rank_model(input_ids=local(ids, ctx), position_ids=local(two, ctx)).logits
                rank_model(input_ids=local(ids, ctx), position_ids=local(one, ctx))
                first.square().mean().backward()
                return [p.grad for p in rank_model.parameters()]

            for a, b in zip(
                contexts(2, lambda ctx: gradients(ctx, True)),
                contexts(2, lambda ctx: gradients(ctx, False)),
            ):
                for x, y in zip(a, b):
                    self.assertLess(error(x, y), 1e-6, family)

    def test_layers_without_the_keyword(self):
        """Layers that run again in backward know their documents also where the model does not pass
        them its keyword arguments, as in GPT-2 of transformers 5.0 and Qwen3.5 of 5.3."""
        ids = torch.arange(12)[None] % VOCAB
        two = torch.cat([torch.arange(5), torch.arange(7)])[None]

        def enabled(model, reentrant):
            model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))

        def wrapped(model, reentrant):
            kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
            layers = model.model.layers
            for i, layer in enumerate(layers):
                layers[i] = checkpoint_wrapper(layer, checkpoint_impl=kind)

        def by_hand(model, reentrant):
            for layer in model.model.layers:
                layer.forward = checkpointed(layer.forward, reentrant)

        for family in ("llama", "qwen3.5 text"):
            model = build(family)

            def gradients(ctx, again=None, reentrant=False):
                rank_model = register(ctx, copy.deepcopy(model))
                if again is not None:
                    for layer in rank_model.model.layers:
                        layer.forward = without_keyword(layer.forward)
                    rank_model.enable_input_require_grads()
                    again(rank_model, reentrant)
                y = rank_model(input_ids=local(ids, ctx), position_ids=local(two, ctx)).logits
                y.square().mean().backward()
                return [p.grad for p in rank_model.parameters()]

            for size in (1, 2):
                want = contexts(size, gradients)
                for again, reentrant in itertools.product((enabled, wrapped), (False, True)):
                    found = contexts(size, lambda ctx: gradients(ctx, again, reentrant))
                    for a, b in zip(found, want):
                        for x, y in zip(a, b):
                            self.assertLess(error(x, y), 1e-6, (family, size, again, reentrant))
                for reentrant in (False, True):
                    with self.assertRaisesRegex(
                        ulysses.Unsupported, "runs again in backward.*gradient_checkpointing_enable"
                    ):
                        contexts(size, lambda ctx: gradients(ctx, by_hand, reentrant))

    def test_layers_that_run_again_without_a_call(self):
        """A layer of a model that this package does not compute any more may run again."""
        model = build("qwen3.5 text")
        ids = torch.arange(12)[None] % VOCAB
        with ulysses.Context() as ctx:
            register(ctx, model)(input_ids=ids)
        model.set_attn_implementation("sdpa")
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
        model(input_ids=ids).logits.square().mean().backward()
        self.assertTrue(all(p.grad is not None for p in model.parameters()))

    def test_a_model_inside_a_call_of_another(self):
        """A model that a hook of another one calls has its own documents and positions.

        The inner model may be one that this package does not compute, on whole sequences.
        """
        ids = torch.arange(12)[None] % VOCAB
        two = torch.cat([torch.arange(5), torch.arange(7)])[None]
        for family in ("llama", "qwen3.5 text"):
            outer, inner, plain = build(family), build(family), build(family, "sdpa")
            want = plain(input_ids=ids, use_cache=False).logits.detach()

            def body(ctx):
                a, b, c = (copy.deepcopy(m) for m in (outer, inner, plain))
                register(ctx, a), register(ctx, b)
                found = []

                def hook(*_):
                    found.append(b(input_ids=local(ids, ctx)).logits.detach())
                    found.append(c(input_ids=ids, use_cache=False).logits.detach())

                a.model.layers[0].register_forward_hook(hook)
                a(input_ids=local(ids, ctx), position_ids=local(two, ctx))
                return found

            for size in (1, 2):
                found = contexts(size, body)
                self.assertLess(error(torch.cat([b for b, _ in found], 1), want), TOLERANCE)
                self.assertEqual(error(found[0][1], want), 0, (family, size))

    @need(packages("peft"), "no peft", "run make test-python TORCH=1")
    def test_adapters(self):
        """Adapters of PEFT that need whole sequences are refused on several ranks."""
        import peft

        ids = torch.arange(12)[None] % VOCAB
        on = dict(task_type="CAUSAL_LM")
        lora = dict(on, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        for config, words in (
            (peft.LoraConfig(**lora), ""),
            (peft.LoraConfig(**lora, alora_invocation_tokens=[2, 3]), "its invocation tokens"),
            (peft.PromptTuningConfig(**on, num_virtual_tokens=2), "virtual tokens before the"),
            (peft.PrefixTuningConfig(**on, num_virtual_tokens=2), "virtual tokens before the"),
        ):
            model = peft.get_peft_model(build("llama"), config).eval()
            mask = torch.ones_like(ids)

            def body(ctx):
                rank_model = copy.deepcopy(model)
                register(ctx, rank_model.get_base_model())
                shards = dict(input_ids=local(ids, ctx), attention_mask=local(mask, ctx))
                if not words or ctx.size == 1:
                    return rank_model(**shards).logits.detach()
                with self.assertRaisesRegex(ulysses.Unsupported, f"2 ranks: .*{words}"):
                    rank_model(**shards)

            with self.subTest(config.peft_type, words=words):
                plain = copy.deepcopy(model)
                plain.get_base_model().set_attn_implementation("sdpa")
                want = plain(input_ids=ids, attention_mask=mask).logits.detach()
                for size in (1,) if words else (1, 2):
                    self.assertLess(error(torch.cat(contexts(size, body), 1), want), TOLERANCE)
                if words:
                    contexts(2, body)

    def test_a_cache_under_another_name(self):
        """From transformers 5.24 on, the argument of models and layers for a cache is `cache`."""

        class Renamed(transformers.LlamaForCausalLM):
            def forward(self, input_ids=None, cache=None, position_ids=None, **options):
                options = dict(options, past_key_values=cache, position_ids=position_ids)
                return super().forward(input_ids, **options)

        model = build("llama").eval()
        ids = torch.tensor([[3, 1, 4, 1, 5]])
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        model.__class__ = Renamed
        for size, words in ((1, "a StaticCache has memory"), (2, "a key-value cache on 2 ranks")):

            def body(ctx):
                rank_model = register(ctx, copy.deepcopy(model))
                with self.assertRaisesRegex(ulysses.Unsupported, words):
                    rank_model(input_ids=local(ids, ctx), cache=cache)

            contexts(size, body)

    def test_a_layer_with_a_cache_under_another_name(self):
        """A gated delta rule layer with a cache computes as transformers, whatever its name is."""

        class Net:
            def forward(self, hidden_states, cache=None, attention_mask=None):
                return hidden_states, cache, attention_mask

        _replace(Net)
        cache = transformers.DynamicCache()
        with ulysses.Context() as ctx, entered(Forward(ctx, ulysses.Sequences(1, 5), 5)):
            self.assertEqual(Net().forward(1, cache=cache), (1, cache, None))
            self.assertEqual(Net().forward(1, cache, 2), (1, cache, 2))

    def test_autocast(self):
        """Under autocast, rotations and norms make queries and keys of float32 and values of
        bfloat16. Attention converts them, as PyTorch's does."""
        ids = torch.arange(12)[None] % VOCAB
        for family in ("llama", "qwen3", "gpt2", "qwen3.5 text"):
            model = build(family)

            def results(model, ids, autocast=True):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    logits = model(input_ids=ids, use_cache=False).logits
                logits.float().square().sum().backward()
                gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
                return logits.detach().double(), gradients.double()

            exact = results(copy.deepcopy(model), ids, autocast=False)
            plain = results(copy.deepcopy(model), ids)
            ranks = contexts(
                2, lambda ctx: results(register(ctx, copy.deepcopy(model)), local(ids, ctx))
            )
            found = torch.cat([logits for logits, _ in ranks], 1), sum(g for _, g in ranks)
            for a, b, c in zip(found, plain, exact):
                self.assertLess(error(a, c), 2 * error(b, c), family)

    def test_a_direct_call(self):
        """The attention function without a model finds documents from the ids of all ranks.

        A wrong argument on one rank raises on every rank.
        """

        class Module:
            is_causal = True

        g = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(1, n, 13, 8, generator=g) for n in (4, 2, 2))
        # The second document starts inside the shard of a rank.
        ids = torch.cat([torch.arange(6), torch.arange(7)])[None]
        see = torch.ones(13, 13).tril().bool()
        see[6:, :6] = False
        want = torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), attn_mask=see, enable_gqa=True
        ).transpose(1, 2)

        def body(ctx):
            lo, hi = ulysses.shard_rows(13, ctx.size, ctx.rank)
            shards = [x[:, :, lo:hi] for x in (q, k, v)]
            out = ulysses.transformers_attention(
                Module, *shards, position_ids=ids[:, lo:hi], context=ctx
            )[0]
            if ctx.size > 1:
                for wrong in (
                    dict(position_ids=None),
                    dict(position_ids=ids[:, :1]),
                    dict(position_ids=ids[:, lo:hi], softcap=3.0),
                    dict(position_ids=ids[:, lo:hi], attention_mask=torch.ones(1, 2)),
                ):
                    with self.assertRaises(ulysses.UlyssesError):
                        ulysses.transformers_attention(
                            Module,
                            *shards,
                            **(wrong if ctx.rank == 1 else dict(position_ids=ids[:, lo:hi])),
                            context=ctx,
                        )
                with self.assertRaisesRegex(ulysses.InvalidArgument, "start at 0 on rank 1"):
                    ulysses.transformers_attention(
                        Module, *shards, position_ids=torch.arange(hi - lo)[None], context=ctx
                    )
            return out

        for size in (1, 2, 4):
            self.assertLess(error(torch.cat(contexts(size, body), 1), want), TOLERANCE)

    def test_strong_decay_per_head(self):
        """A layer of Qwen3.5 with decays from 0.01 to 24 a token.

        The errors of the gradients of A_log and dt_bias are relative to the gradient of each head.
        An error relative to the whole tensor would hide heads with small gradients.
        """
        model = build("qwen3.5 text")
        layer = model.model.layers[0].linear_attn
        with torch.no_grad():
            layer.A_log.copy_(torch.tensor([-4.0, 0.0, 2.0, 3.2]))
            layer.dt_bias.fill_(0.5)
        x, w = torch.randn(1, 24, 32), torch.randn(1, 24, 32)
        exact = copy.deepcopy(layer).double()
        with float64(), own_recurrence():
            want = exact(x.double())
            (want * w).sum().backward()
        decay = (
            exact.A_log.exp()
            * torch.nn.functional.softplus(exact.in_proj_a(x.double()) + exact.dt_bias)
        ).amax((0, 1))
        self.assertGreater(float(decay.max()), 24)
        call = "ulysses_forward"
        from ulysses.forwards import Forward
        from ulysses.mixers import prepare

        prepare(model, 1)

        def body(ctx):
            rank_layer = copy.deepcopy(layer)
            shard = local(x, ctx)
            y = rank_layer(shard, **{call: Forward(ctx, ulysses.Sequences(1, 24), shard.shape[1])})
            (y * local(w, ctx)).sum().backward()
            return y.detach(), rank_layer.A_log.grad, rank_layer.dt_bias.grad

        for size in (1, 2, 4):
            found = contexts(size, body)
            self.assertLess(error(torch.cat([f[0] for f in found], 1), want.detach()), TOLERANCE)
            for i, name in ((1, "A_log"), (2, "dt_bias")):
                self.assertLess(
                    per_head(sum(f[i] for f in found), getattr(exact, name).grad),
                    TOLERANCE,
                    (name, size),
                )


if __name__ == "__main__":
    unittest.main()
