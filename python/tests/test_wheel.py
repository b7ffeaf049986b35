"""The wheel: made, installed into an empty folder, and used from there with the library it carries."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
READY = (ROOT / "lib" / "libulysses.so").exists() and all(importlib.util.find_spec(m) for m in ("setuptools", "pip"))


@unittest.skipIf(not READY and not os.environ.get("CI"), "no lib/libulysses.so, setuptools or pip")
class Wheel(unittest.TestCase):
    def test_wheel(self):
        made = subprocess.run(["scripts/wheel.sh", sys.executable], cwd=ROOT, capture_output=True, text=True, timeout=180)
        self.assertEqual(made.returncode, 0, made.stderr)
        name = made.stdout.strip()
        self.assertRegex(name, r"^dist/ulysses-[\d.]+-py3-none-manylinux_2_\d+_\w+\.whl$")
        with tempfile.TemporaryDirectory() as d:
            subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", d, ROOT / name], check=True, timeout=180)
            env = {k: v for k, v in os.environ.items() if k != "ULYSSES_LIBRARY"}
            code = "import ulysses\nfrom ulysses import _library\nprint(ulysses.__file__, _library.candidates()[0], ulysses.version())"
            out = subprocess.check_output([sys.executable, "-c", code], cwd=d, env={**env, "PYTHONPATH": d}, text=True).split()
            self.assertEqual(out[:2], [f"{d}/ulysses/__init__.py", f"{d}/ulysses/libulysses.so"])
            done = subprocess.run([sys.executable, ROOT / "examples" / "python" / "attention_numpy.py"], cwd=d, env={**env, "PYTHONPATH": d},
                                  capture_output=True, text=True, timeout=120)
            self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
