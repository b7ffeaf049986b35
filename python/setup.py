"""Installs libulysses.so with the package: the one beside the package (scripts/wheel.sh), or lib/
of the source tree. Without a library, installation fails."""

import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).resolve().parent
NAME = "libulysses.so"


class WithLibrary(build_py):
    def run(self):
        super().run()
        if (
            self.editable_mode or (HERE / "ulysses" / NAME).exists()
        ):  # an editable package finds lib/ of its source tree
            return
        lib = HERE.parent / "lib"
        if not (lib / NAME).exists():
            raise SystemExit(
                f"ulysses: no {lib / NAME}, without which the package cannot work: run `make lib` in {HERE.parent}, then install again"
            )
        plugin = HERE.parent / "build" / "cuda" / "libulysses_cuda.so"
        for f in (
            lib / NAME,
            *lib.glob("libulysses_mpi_*.so"),
            *([plugin] if plugin.exists() else []),
        ):
            shutil.copyfile(f, pathlib.Path(self.build_lib, "ulysses", f.name))


setup(cmdclass={"build_py": WithLibrary})
