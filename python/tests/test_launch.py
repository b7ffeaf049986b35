"""Several processes: mpirun with mpi4py, torch.distributed with gloo, and the examples."""

import pathlib
import re
import socket
import subprocess
import sys
import unittest

import children
from need import need_mpi, need_torch

HERE = pathlib.Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples" / "python"


ENV = children.environment(
    OMPI_ALLOW_RUN_AS_ROOT="1",
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    OMPI_MCA_btl_vader_single_copy_mechanism="none",
    OMP_NUM_THREADS="1",
)


def mpirun(ranks, *command):
    """Runs a Python program on ranks of MPI, and returns its output."""
    launcher = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", ranks, sys.executable]
    return children.run([*launcher, *command], env=ENV).stdout


def torchrun(ranks, *command):
    """Runs a Python program on ranks of torch.distributed, and returns its output."""
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


class Launch(unittest.TestCase):
    @need_mpi
    def test_mpi(self):
        for ranks in (1, 2, 4):
            with self.subTest(ranks=ranks):
                self.assertEqual(mpirun(ranks, str(HERE / "launched.py"), "mpi").count("ok"), ranks)

    @need_mpi
    def test_world_without_mpi4py(self):
        out = mpirun(2, str(HERE / "launched.py"), "world")
        # Lines of different ranks may be joined.
        self.assertEqual(sorted(re.findall("rank [0-9]+ ok", out)), ["rank 0 ok", "rank 1 ok"], out)

    @need_mpi
    @need_torch
    def test_mpi_with_torch(self):
        self.assertEqual(mpirun(4, str(HERE / "launched.py"), "mpi_torch").count("ok"), 4)

    @need_mpi
    @need_torch
    def test_end_with_a_request(self):
        """A program may end, or close or delete its context, while a reshard is in progress. MPI
        does not access memory that Python has freed."""
        for end in ("", "ctx.close()", "del ctx"):
            code = f"""
import torch, ulysses
from mpi4py import MPI
ctx = ulysses.Context(MPI.COMM_WORLD, threads=1)
x = torch.ones(1, 2048, 8, 64)
ulysses.gather_seq_scatter_heads(x, 1, 2, 4096, True, context=ctx)
{end}
del x
MPI.COMM_WORLD.barrier()
"""
            mpirun(2, "-c", code)

    @need_mpi
    def test_close_on_another_thread(self):
        """Where MPI forbids calls on a thread, closing there raises, and the context stays."""
        code = """
import mpi4py, threading
mpi4py.rc.thread_level = "funneled"
import ulysses
from mpi4py import MPI
ctx = ulysses.Context(MPI.COMM_WORLD, threads=1)
raised = []
def close():
    try:
        ctx.close()
    except ulysses.InvalidArgument as e:
        raised.append(str(e))
thread = threading.Thread(target=close)
thread.start(), thread.join()
assert "call from that thread" in raised[0] and not ctx.closed, raised
ctx.close()
assert ctx.closed
"""
        mpirun(2, "-c", code)

    @need_torch
    def test_torch_distributed(self):
        self.assertEqual(torchrun(2, str(HERE / "launched.py"), "torch").count("ok"), 2)


class Examples(unittest.TestCase):
    @need_mpi
    def test_readme(self):
        """The example of python/README.md runs on one rank and on three."""
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
        done = children.run(["python", EXAMPLES / "attention_numpy.py"], env=ENV)
        self.assertIn("rank 0 of 1", done.stdout)

    @need_mpi
    def test_numpy(self):
        for ranks in (2, 4):
            self.assertEqual(
                mpirun(ranks, str(EXAMPLES / "attention_numpy.py")).count("error"), ranks
            )
        self.assertEqual(mpirun(4, str(EXAMPLES / "attention_numpy.py"), "3").count(" of 3: "), 3)

    @need_torch
    def test_torch(self):
        children.run(["python", EXAMPLES / "train_torch.py"], env=ENV)
        out = torchrun(2, str(EXAMPLES / "train_torch.py"))
        self.assertEqual(out.count("step"), 10, out)

    @need_torch
    def test_trainer(self):
        """The Trainer logs the same losses on one and on two ranks."""
        one = children.run(["python", EXAMPLES / "train_transformers.py"], env=ENV).stdout
        two = torchrun(2, str(EXAMPLES / "train_transformers.py"))
        lines = [[x for x in out.splitlines() if x.startswith("losses")] for out in (one, two)]
        self.assertEqual(len(lines[0]), 1, one)
        self.assertEqual(lines[0], lines[1], two)


if __name__ == "__main__":
    unittest.main()
