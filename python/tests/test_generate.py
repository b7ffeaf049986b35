"""Texts that the verb generate continues, compared with transformers in float64."""

from __future__ import annotations

import json
import pathlib
import string
import subprocess
import tempfile
import unittest

from need import packages
from test_parity import PROGRAM, need_program

if packages("torch", "transformers", "safetensors"):
    import torch
    import transformers
    from families import float64, own_recurrence
    from parity import FAMILIES, VOCAB, build

PROMPT, NEW = 11, 16  # tokens: together longer than some windows

# A character is a token.
CHARACTERS = string.ascii_letters[:43]


@need_program
class Generate(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def program(self, *words: object) -> subprocess.CompletedProcess:
        command = [str(PROGRAM), "generate", str(self.folder), *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def save(self, family: str):
        """Saves a model with a tokenizer of characters, and returns it in float64."""
        model = build(family)
        model.save_pretrained(self.folder)
        (self.folder / "generation_config.json").unlink(missing_ok=True)
        vocab = {c: i for i, c in enumerate(CHARACTERS)}
        model_of_text = {"type": "BPE", "vocab": vocab, "merges": []}
        tokenizer = {"model": model_of_text, "decoder": {"type": "ByteLevel"}}
        (self.folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        model.config._experts_implementation = "eager"  # the others have no float64
        return model.double().eval()

    def greedy(self, model, ids: list[int]) -> list[int]:
        """Continues ids with the most probable tokens, without a cache."""
        with torch.no_grad(), float64(), own_recurrence():
            for _ in range(NEW):
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
                ids = [*ids, int(logits.argmax())]
        return ids

    def test_families(self) -> None:
        self.assertEqual(len(CHARACTERS), VOCAB)
        prompt = [(7 * i + 3) % VOCAB for i in range(PROMPT)]
        for family in FAMILIES:
            with self.subTest(family):
                want = self.greedy(self.save(family), prompt)[PROMPT:]
                text = "".join(CHARACTERS[i] for i in prompt)
                done = self.program(text, "--max-tokens", NEW, "--device", "cpu", "--dtype", "f32")
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(done.stdout, "".join(CHARACTERS[i] for i in want) + "\n")

    def test_begin_marks(self) -> None:
        """A prompt begins with the marks of the tokenizer, once, as in transformers."""
        model = self.save("llama")
        path = self.folder / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        mark = {"id": 42, "content": CHARACTERS[42], "special": True, "normalized": False}
        mark |= {"single_word": False, "lstrip": False, "rstrip": False}
        post = {"type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A", "type_id": 0}}]}
        post["single"] = [{"SpecialToken": {"id": "Q", "type_id": 0}}, *post["pair"]]
        post["special_tokens"] = {"Q": {"id": "Q", "ids": [42], "tokens": ["Q"]}}
        decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
        added = {"added_tokens": [mark], "post_processor": post, "decoder": decoder}
        path.write_text(json.dumps(tokenizer | added))
        ids = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))("bcd").input_ids
        self.assertEqual((CHARACTERS[42], ids), ("Q", [42, 1, 2, 3]))
        want = "".join(CHARACTERS[i] for i in self.greedy(model, ids)[4:])
        without = "".join(CHARACTERS[i] for i in self.greedy(model, ids[1:])[3:])
        self.assertNotEqual(want, without)
        for prompt in ("bcd", "Qbcd"):
            done = self.program(prompt, "--max-tokens", NEW, "--device", "cpu", "--dtype", "f32")
            self.assertEqual(done.stdout, want + "\n", done.stderr)

    def test_end_of_text_and_defaults(self) -> None:
        """A token that ends a text is not printed; generation_config.json sets the sampling."""
        model = self.save("llama")
        prompt = [1, 2, 3]
        want = self.greedy(model, prompt)[3:]
        config = self.folder / "generation_config.json"
        config.write_text(json.dumps({"eos_token_id": [40, want[4]]}))
        first = want.index(want[4])
        text = "".join(CHARACTERS[i] for i in want)
        self.assertEqual(self.program("bcd").stdout, text[:first] + "\n")
        config.write_text(json.dumps({"do_sample": True, "temperature": 5.0, "top_k": 0}))
        texts = {self.program("bcd", "--seed", seed).stdout for seed in range(4)}
        self.assertEqual(len(texts), 4)
        self.assertIn(self.program("bcd", "--seed", 2).stdout, texts)
        greedy = self.program("bcd", "--temperature", 0, "--max-tokens", NEW).stdout
        self.assertEqual(greedy, text + "\n")

    def test_positions_of_scaling(self) -> None:
        """A model has the positions that RoPE scaling adds, as in training."""
        self.save("llama")
        path = self.folder / "config.json"
        config = json.loads(path.read_text())
        config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
        path.write_text(json.dumps(config))
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder).double().eval()
        prompt = [(5 * i + 2) % VOCAB for i in range(100)]
        text = "".join(CHARACTERS[i] for i in prompt)
        want = "".join(CHARACTERS[i] for i in self.greedy(model, prompt)[100:])
        self.assertEqual(self.program(text, "--max-tokens", NEW).stdout, want + "\n")
        done = self.program(text, "--max-tokens", 29)
        self.assertEqual(done.returncode, 1)
        self.assertIn("exceed the 128 positions of the model", done.stderr)

    def test_refusals(self) -> None:
        self.save("llama")
        for words, code, text in (
            (("",), 1, "the prompt is empty"),
            (("abc", "--max-tokens", 62), 1, "exceed the 64 positions of the model; lower --max"),
            (("abc", "--top-p", 0), 1, "--top-p 0"),
            (("abc", "--dtype", "fp8"), 1, "fp8"),
        ):
            done = self.program(*words)
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertIn(text, done.stderr)


if __name__ == "__main__":
    unittest.main()
