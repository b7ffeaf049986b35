"""DeepSpeed's registration: its arguments, and models on 4 ranks of torch.distributed."""

import pathlib
import tempfile
import types
import unittest
import warnings

import children
import ulysses
from need import need_torch

HERE = pathlib.Path(__file__).resolve().parent


@need_torch
class Register(unittest.TestCase):
    def setUp(self):
        import transformers

        self.table = transformers.AttentionInterface._global_mapping
        self.config = transformers.LlamaConfig(attn_implementation="sdpa")
        self.before = dict(self.table)

    def tearDown(self):
        self.assertEqual(self.table, self.before)

    def register(self, core="sdpa", size=2, batch=1, **options):
        model = options.pop("model", types.SimpleNamespace(config=self.config))
        return ulysses.UlyssesSPAttentionHF.register_with_transformers(
            model, core, size, batch, **options
        )

    def test_one_rank(self):
        self.assertIsNone(self.register(size=1))

    def test_arguments(self):
        """Wrong arguments are ValueErrors that have the values."""
        for words, options in (
            ("seq_length_is_variable is False and seq_length is None", {}),
            ("'eager', which models call without", dict(core="eager")),
            ("'paged|eager'", dict(core="paged|eager")),
            (
                "'nothing' is not registered in transformers; give one of .*sdpa",
                dict(core="nothing"),
            ),
            ("'owner/kernel': the kernel cannot be loaded", dict(core="owner/kernel")),
            ("'flex_attention' and the model uses 'sdpa'", dict(core="flex_attention")),
            ("sequence_parallel_size is 0", dict(size=0)),
            ("micro_batch_size is -1", dict(batch=-1)),
            ("seq_length is 0", dict(seq_length=0)),
            ("is 2 and torch.distributed is not initialized", {}),
            ("is 2 and torch.distributed is not initialized", dict(model=self.config)),
        ):
            fixed = words.startswith("seq_length_is")
            with self.subTest(words), self.assertRaisesRegex(ValueError, words.replace("|", r"\|")):
                self.register(**options, seq_length_is_variable=not fixed)

    def test_models(self):
        """A model is a name or path, a config, a wrapper, or a model with a text model inside."""
        import transformers

        words = "is 2 and torch.distributed is not initialized"  # after the checks of the model
        with tempfile.TemporaryDirectory() as folder:
            self.config.save_pretrained(folder)
            for model in (folder, pathlib.Path(folder), self.config):
                with self.assertRaisesRegex(ValueError, words):
                    self.register(model=model)
        both = transformers.LlavaConfig(attn_implementation="sdpa")
        with self.assertRaisesRegex(ValueError, words):
            self.register(model=types.SimpleNamespace(config=both))
        with self.assertRaisesRegex(ValueError, "'flex_attention' and the model uses 'sdpa'"):
            self.register("flex_attention", model=types.SimpleNamespace(config=both))

    def test_max_length(self):
        with self.assertWarnsRegex(FutureWarning, "max_length is deprecated; give seq_length"):
            self.register(size=1, max_length=8, seq_length_is_variable=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.register(size=1, seq_length=8, seq_length_is_variable=False)

    def test_a_kernel_that_is_loaded(self):
        """The function of a kernel is replaced and restored like the others."""
        self.table["owner/kernel"] = self.before["owner/kernel"] = kernel = object()
        self.config._attn_implementation = "owner/kernel"
        try:
            with self.assertRaisesRegex(ValueError, "not initialized"):
                self.register("owner/kernel")
            with ulysses.Context() as ctx:
                ulysses.register_transformers("owner/kernel", ctx)
                ulysses.register_transformers("owner/kernel", ctx)
                self.assertIsNot(self.table["owner/kernel"], kernel)
                ulysses.unregister_transformers("owner/kernel")
            self.assertIs(self.table["owner/kernel"], kernel)
        finally:
            del self.table["owner/kernel"], self.before["owner/kernel"]

    def test_unregister(self):
        with ulysses.Context() as ctx:
            ulysses.register_transformers("ulysses_new", ctx)
        ulysses.UlyssesSPAttentionHF.unregister("ulysses_new")
        self.assertNotIn("ulysses_new", self.table)
        with self.assertRaisesRegex(ValueError, "'ulysses_new' is not registered"):
            ulysses.unregister_transformers("ulysses_new")

    def test_on_4_ranks(self):
        out = children.run(["python", HERE / "registered.py"]).stdout
        self.assertEqual(out.count("ok"), 4, out)


if __name__ == "__main__":
    unittest.main()
