"""The rule for missing tools: a test is skipped, and fails in CI."""

import os
import unittest
from unittest import mock

from need import need


def outcome(ci, found):
    """Runs a decorated test and a decorated class, and returns what became of each."""
    with mock.patch.dict(os.environ, {"CI": ci}):
        decorator = need(found, "no gcc", "install gcc")

    class Function(unittest.TestCase):
        @decorator
        def test(self):
            pass

    @decorator
    class Class(unittest.TestCase):
        def test(self):
            pass

    outcomes = []
    for cls in (Function, Class):
        result = unittest.TestResult()
        cls("test").run(result)
        outcomes += [f"skipped: {text}" for _, text in result.skipped]
        outcomes += [f"failed: {text.splitlines()[-1]}" for _, text in result.failures]
        outcomes += ["passed"] * (result.wasSuccessful() and not result.skipped)
    return outcomes


class Need(unittest.TestCase):
    def test_rule(self):
        for ci, found, want in (
            ("", True, "passed"),
            ("true", True, "passed"),
            ("", False, "skipped: no gcc; install gcc"),
            ("true", False, "failed: AssertionError: no gcc, and CI=true; install gcc"),
        ):
            self.assertEqual(outcome(ci, found), [want] * 2, (ci, found))


if __name__ == "__main__":
    unittest.main()
