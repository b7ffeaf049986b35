"""Several processes: mpirun with mpi4py, torch.distributed with gloo, and the examples. Needs the library."""

import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import unittest

from ranks import without_torch

HERE = pathlib.Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples" / "python"


def has(module):
    import importlib.util

    return importlib.util.find_spec(module) is not None


ENV = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]),
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "OMP_NUM_THREADS": "1",
}


def mpirun(ranks, *command):
    done = subprocess.run(
        [
            "mpirun",
            "--oversubscribe",
            "--bind-to",
            "none",
            "-n",
            str(ranks),
            sys.executable,
            *command,
        ],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise AssertionError(
            f"mpirun -n {ranks} {command}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def processes(ranks, *command):
    """As torchrun starts them."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={
                **ENV,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(r),
                "WORLD_SIZE": str(ranks),
            },
        )
        for r in range(ranks)
    ]
    try:
        out = [p.communicate(timeout=300)[0] for p in started]
    finally:
        for p in started:
            p.kill()
    if any(p.returncode for p in started):
        raise AssertionError("\n".join(out))
    return "".join(out)


MPI = has("mpi4py") and shutil.which("mpirun") is not None
# In CI the MPI part must run; PyTorch too.
without_mpi = unittest.skipIf(not MPI and not os.environ.get("CI"), "no mpi4py or no mpirun")


class Launch(unittest.TestCase):
    @without_mpi
    def test_mpi(self):
        for ranks in (1, 2, 4):
            with self.subTest(ranks=ranks):
                self.assertEqual(mpirun(ranks, str(HERE / "launched.py"), "mpi").count("ok"), ranks)

    @without_mpi
    def test_world_without_mpi4py(self):
        out = mpirun(2, str(HERE / "launched.py"), "world")
        self.assertEqual(
            sorted(re.findall("rank [0-9]+ ok", out)), ["rank 0 ok", "rank 1 ok"], out
        )  # lines of ranks may run into each other

    @without_torch
    def test_torch_distributed(self):
        self.assertEqual(processes(2, str(HERE / "launched.py"), "torch").count("ok"), 2)


class Examples(unittest.TestCase):
    @without_mpi
    def test_the_snippet_of_the_page(self):
        """python/README.md's first example runs as it is printed, on one rank and on three."""
        found = re.search(
            r"```python\n(.*?)```", (HERE.parent / "README.md").read_text(), re.DOTALL
        )
        for ranks in (1, 3):
            mpirun(
                ranks,
                "-c",
                found[1]
                + "\nassert out.shape == q[:, lo:hi].shape and dk.shape == k[:, lo:hi].shape",
            )

    def test_numpy_alone(self):
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "attention_numpy.py")],
            env=ENV,
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("rank 0 of 1", done.stdout)

    @without_mpi
    def test_numpy(self):
        for ranks in (2, 4):
            self.assertEqual(
                mpirun(ranks, str(EXAMPLES / "attention_numpy.py")).count("error"), ranks
            )
        self.assertEqual(mpirun(4, str(EXAMPLES / "attention_numpy.py"), "3").count(" of 3: "), 3)

    @without_torch
    def test_torch(self):
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "train_torch.py")],
            env=ENV,
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        out = processes(2, str(EXAMPLES / "train_torch.py"))
        self.assertEqual(out.count("step"), 10, out)


if __name__ == "__main__":
    unittest.main()
