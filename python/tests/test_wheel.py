"""The wheel: made, installed into an empty environment outside the tree, and imported there.

It contains the library and the CUDA plug-in.
"""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import venv
import zipfile

from need import in_ci, need, packages

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "lib" / "libulysses.so"
PLUGIN = ROOT / "build" / "cuda" / "libulysses_cuda.so"
PORTABLE = ROOT / "build" / "portable"
LIBRARIES = PORTABLE if PORTABLE.exists() else ROOT / "lib"

# A library with the name and version of the plug-in, and without its functions.
NO_PLUGIN = """
#include "kernels.h"
static uly_cuda_api table = {.abi = ULY_CUDA_ABI, .size = 40};
const uly_cuda_api *uly_cuda_plugin(uint32_t abi, uint32_t *have) {
  *have = ULY_CUDA_ABI;
  return abi == ULY_CUDA_ABI ? &table : 0;
}
"""

PROBE = """
import json, ulysses
from ulysses import _library
said = ""
try:
    ulysses.Context(device="cuda")
except ulysses.UlyssesError as e:
    said = f"{type(e).__name__}: {e}"
print(json.dumps([ulysses.__file__, _library.candidates()[0], ulysses.build_info()["cuda"], said]))
"""


def compiled(folder, code, *flags):
    source, made = pathlib.Path(folder, "plugin.c"), pathlib.Path(folder, "plugin.so")
    source.write_text(code)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-I", ROOT / "cuda", "-o", made, source, *flags],
        check=True,
        timeout=60,
    )
    return made


@need(
    LIBRARY.exists() and packages("setuptools", "pip"),
    "no lib/libulysses.so, setuptools or pip",
    "run make lib, and pip install setuptools pip",
)
@need(PORTABLE.exists() or not in_ci(), "no build/portable", "run make portable")
class Wheel(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp()).resolve()
        self.addCleanup(shutil.rmtree, self.folder)

    def make(self, plugin):
        return subprocess.run(
            ["scripts/wheel.sh", sys.executable, plugin, self.folder / "dist", LIBRARIES],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=180,
        )

    def installed(self, plugin):
        """Makes a wheel with a plug-in, and installs it into a new environment that has NumPy.

        Returns the output of scripts/wheel.sh, the path of the wheel, and a function that runs
        Python in the environment.
        """
        made = self.make(plugin)
        self.assertEqual(made.returncode, 0, made.stderr)
        wheel = pathlib.Path(made.stdout.strip())
        self.assertRegex(wheel.name, r"^libulysses-[\d.]+-py3-none-manylinux_2_\d+_\w+\.whl$")
        env = self.folder / "env"
        venv.create(env)
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "--python",
                env / "bin" / "python",
                "install",
                "-q",
                "--no-deps",
                "--no-index",
                wheel,
            ],
            check=True,
            timeout=180,
        )
        borrowed = self.folder / "borrowed"
        borrowed.mkdir()
        numpy = pathlib.Path(importlib.util.find_spec("numpy").origin).parent
        for x in (numpy, numpy.parent / "numpy.libs"):
            if x.exists():
                (borrowed / x.name).symlink_to(x)
        variables = {
            k: v
            for k, v in os.environ.items()
            if k not in ("ULYSSES_LIBRARY", "ULYSSES_CUDA_PLUGIN", "LD_LIBRARY_PATH")
        }
        variables["PYTHONPATH"] = str(borrowed)
        return (
            made.stderr,
            wheel,
            lambda *args: subprocess.run(
                [env / "bin" / "python", *args],
                cwd=self.folder,
                env=variables,
                capture_output=True,
                text=True,
                timeout=120,
            ),
        )

    def probe(self, run):
        """Returns the folder of the installed package, the plug-in that its library finds, and the
        error of a context on a GPU."""
        done = run("-c", PROBE)
        self.assertEqual(done.returncode, 0, done.stderr)
        module, library, plugin, said = json.loads(done.stdout)
        inside = pathlib.Path(module).parent
        self.assertTrue(inside.is_relative_to(self.folder / "env"), module)
        self.assertEqual(library, str(inside / "libulysses.so"))
        return inside, plugin, said

    def test_without_plugin(self):
        said, wheel, run = self.installed("none")
        if LIBRARIES == PORTABLE:  # the version of glibc in the Makefile's GLIBC
            self.assertLessEqual(int(re.search(r"manylinux_2_(\d+)_", wheel.name)[1]), 28)
        self.assertRegex(said, r"^wheel: without a CUDA plug-in.*make cuda.*\n$")
        inside, plugin, said = self.probe(run)
        self.assertFalse((inside / PLUGIN.name).exists())
        self.assertEqual(plugin, "")
        self.assertRegex(
            said, "^DeviceError: .*no CUDA plug-in: .*make cuda.*wheel.*ULYSSES_CUDA_PLUGIN"
        )
        done = run(ROOT / "examples" / "python" / "attention_numpy.py")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_with_a_file_that_is_no_plugin(self):
        said, wheel, run = self.installed(compiled(self.folder, NO_PLUGIN))
        self.assertRegex(said, r"^wheel: with the CUDA plug-in .*plugin\.so, \d+ MB.*\n$")
        inside, plugin, said = self.probe(run)
        self.assertEqual(plugin, str(inside / PLUGIN.name))
        self.assertRegex(
            said, f"^DeviceError: .*CUDA plug-in {re.escape(plugin)} does not match this program"
        )

    @need(PLUGIN.exists(), "no build/cuda/libulysses_cuda.so", "run make cuda")
    def test_with_plugin(self):
        _, wheel, run = self.installed(PLUGIN)
        inside, plugin, said = self.probe(run)
        self.assertEqual(plugin, str(inside / PLUGIN.name))
        self.assertEqual((inside / PLUGIN.name).read_bytes(), PLUGIN.read_bytes())
        if not os.path.exists("/dev/nvidiactl"):
            self.assertRegex(said, "^DeviceError: .*(driver|GPU)")
        # The newest glibc that the plug-in may need, as in cuda/built_test.go.
        here = int(os.confstr("CS_GNU_LIBC_VERSION").split(".")[1])
        most = here if here > 36 else 35
        self.assertLessEqual(int(re.search(r"manylinux_2_(\d+)_", wheel.name)[1]), most)

    def test_refused_plugins(self):
        old = compiled(
            self.folder,
            "void *uly_cuda_plugin(unsigned abi, unsigned *have) { *have = 1; return 0; }",
        )
        made = self.make(old)
        self.assertEqual((made.returncode, made.stdout), (1, ""))
        self.assertRegex(made.stderr, "has version 1 of the interface.*make cuda")
        made = self.make(self.folder / "nowhere.so")
        self.assertEqual((made.returncode, made.stdout), (1, ""))
        self.assertIn("no ", made.stderr)

    def test_license(self):
        made = self.make("none")
        self.assertEqual(made.returncode, 0, made.stderr)
        with zipfile.ZipFile(made.stdout.strip()) as wheel:
            found = [n for n in wheel.namelist() if n.endswith("LICENSE")]
            self.assertEqual(len(found), 1, wheel.namelist())
            self.assertEqual(wheel.read(found[0]), (ROOT / "LICENSE").read_bytes())

    def install(self, tree):
        """pip install tree/python into an empty folder, without the network."""
        to = self.folder / "to"
        return to, subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--no-deps",
                "--no-index",
                "--no-build-isolation",
                "--target",
                to,
                tree / "python",
            ],
            capture_output=True,
            text=True,
            timeout=180,
        )

    def tree(self):
        """A copy of the files of the source tree that pip needs."""
        tree = self.folder / "tree"
        shutil.copytree(
            ROOT / "python",
            tree / "python",
            ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info", "tests"),
        )
        return tree

    def test_install_from_the_tree(self):
        """The package is installed with the library of the tree. Without it, installation fails."""
        tree = self.tree()
        _, done = self.install(tree)
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(
            done.stdout + done.stderr,
            r"ulysses: .*/lib/libulysses\.so is missing; run `make lib` in .*, then install again",
        )
        (tree / "lib").mkdir()
        for f in (ROOT / "lib").glob("libulysses*.so"):
            shutil.copyfile(f, tree / "lib" / f.name)
        to, done = self.install(tree)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "import ulysses; from ulysses import _library; "
                "print(_library.candidates()[0], ulysses.version())",
            ],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            env={
                **{k: v for k, v in os.environ.items() if k != "ULYSSES_LIBRARY"},
                "PYTHONPATH": os.pathsep.join([str(to), *sys.path[1:]]),
            },
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(done.stdout.startswith(str(to / "ulysses" / "libulysses.so")), done.stdout)

    def tag(self, *files):
        done = subprocess.run(
            ["scripts/wheel-tag.sh", *files], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout.strip(), done.stderr

    def test_tag(self):
        """The tag is the glibc version of the newest symbol. libstdc++ is refused."""
        code, base, _ = self.tag(compiled(self.folder, "int f(void) { return 1; }"))
        self.assertEqual((code, base), (0, f"manylinux_2_17_{os.uname().machine}"))
        code, tag, _ = self.tag(LIBRARY, self.folder / "plugin.so")
        own = subprocess.check_output(["objdump", "-T", LIBRARY], text=True)
        newest = max(int(n) for n in re.findall(r"GLIBC_2\.(\d+)", own))
        self.assertEqual((code, tag), (0, f"manylinux_2_{max(newest, 17)}_{os.uname().machine}"))
        code, _, said = self.tag(
            compiled(self.folder, "int f(void) { return 1; }", "-Wl,--no-as-needed", "-lstdc++")
        )
        self.assertEqual(code, 1)
        self.assertRegex(said, r"needs libstdc\+\+\.so\.6")


if __name__ == "__main__":
    unittest.main()
