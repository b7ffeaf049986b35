"""Installs the package with libulysses.so.

scripts/wheel.sh copies the library into the package. Otherwise it is copied from lib/ of the source
tree. Without a library, installation fails.
"""

import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).resolve().parent
NAME = "libulysses.so"


class WithLibrary(build_py):
    def run(self):
        super().run()
        # An editable package finds lib/ of its source tree.
        if self.editable_mode or (HERE / "ulysses" / NAME).exists():
            return
        lib = HERE.parent / "lib"
        if not (lib / NAME).exists():
            raise SystemExit(
                f"ulysses: {lib / NAME} is missing; run `make lib` in {HERE.parent}, then install "
                "again"
            )
        plugin = HERE.parent / "build" / "cuda" / "libulysses_cuda.so"
        for f in (
            lib / NAME,
            *lib.glob("libulysses_mpi_*.so"),
            *([plugin] if plugin.exists() else []),
        ):
            shutil.copyfile(f, pathlib.Path(self.build_lib, "ulysses", f.name))


setup(cmdclass={"build_py": WithLibrary})
