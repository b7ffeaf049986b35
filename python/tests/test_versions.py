"""Versions of PyTorch, transformers and Accelerate that are too old are named, with the fix."""

import contextlib
import importlib
import sys
import types
import unittest
import unittest.mock

import ulysses
from need import need_torch


@contextlib.contextmanager
def without(name):
    """Makes the import of a module fail."""
    kept = importlib.import_module(name)
    sys.modules[name] = None
    try:
        yield
    finally:
        sys.modules[name] = kept


@need_torch
class TooOld(unittest.TestCase):
    def setUp(self):
        ulysses.transformers._tables()  # imports what the tests do not hide

    def refuses(self, words):
        return self.assertRaisesRegex(ulysses.Unsupported, words)

    def test_torch(self):
        import torch
        import ulysses._torch

        function = torch.get_autocast_dtype
        del torch.get_autocast_dtype
        try:
            with self.refuses("PyTorch .* is too old; install torch 2.4 or newer"):
                importlib.reload(ulysses._torch)
        finally:
            torch.get_autocast_dtype = function

    def test_transformers(self):
        with without("transformers.masking_utils"):
            with self.refuses("has no tables of attention.*; install transformers 4.53 or newer"):
                ulysses.register_transformers("ulysses_too_old")
            with self.refuses("install transformers 4.53 or newer"):
                ulysses.UlyssesSPAttentionHF.register_with_transformers("folder", "sdpa", 2, 1)

    def test_kernels_of_transformers(self):
        """A transformers that loads no kernels is no ImportError."""
        with without("transformers.integrations.hub_kernels"):
            with self.assertRaisesRegex(ulysses.InvalidArgument, "kernel cannot be loaded.*'sdpa'"):
                ulysses.UlyssesSPAttentionHF.register_with_transformers("folder", "a/b", 2, 1)

    def test_trainer(self):
        from ulysses import _versions, trainer

        new = types.SimpleNamespace(state=types.SimpleNamespace(device_mesh=None))
        old = types.SimpleNamespace(state=types.SimpleNamespace())
        _versions.check_versions("operation", new)
        with self.refuses("operation: Accelerate .*; install accelerate 1.10 or newer"):
            _versions.check_versions("operation", old)

        class Old:
            """A Trainer that does not count the labels of an evaluation."""

        with unittest.mock.patch.object(_versions.transformers, "Trainer", Old):
            with self.refuses("does not count the labels.*; install transformers 4.57 or newer"):
                _versions.check_versions("operation", new)
        with self.refuses("same_data: Accelerate .*; install accelerate 1.10 or newer"):
            with trainer.same_data(old, None):
                pass


if __name__ == "__main__":
    unittest.main()
