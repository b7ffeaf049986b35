"""Effects of the library on its process: symbols, signals, memory, forked children, output."""

import os
import pathlib
import signal
import tempfile
import unittest

import children
import ulysses
from need import need_torch
from ulysses import _library

try:
    import torch
except ImportError:
    torch = None


def python(code, **env):
    """Runs code in a separate process, and returns its output."""
    done = children.run(
        ["python", "-c", code],
        env=children.environment(**env),
        # A background job of a shell ignores SIGINT, and so would the process.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    return done.stdout.strip()


CALL = """
import numpy as np, ulysses
ctx = ulysses.Context(threads=1)
x = np.ones((1, 4, 2, 8), np.float32)
assert (ulysses.attention(x, x, x, context=ctx) == 1).all()
"""


class Process(unittest.TestCase):
    def test_symbols_stay_local(self):
        """RTLD_LOCAL: a function of the library is not visible in the global scope."""
        self.assertEqual(
            python(
                CALL
                + """
import ctypes
try:
    ctypes.CDLL(None).ulysses_version
    print("visible")
except AttributeError:
    print("local")
"""
            ),
            "local",
        )

    def test_library_that_cannot_be_loaded(self):
        """A library for another machine, or with noexec, is not one that is missing."""
        with tempfile.TemporaryDirectory() as folder:
            code = """
import ulysses
try:
    ulysses.Context()
except ulysses.DeviceError as e:
    print(e)
"""
            says = python(code, ULYSSES_LIBRARY=folder)
            self.assertIn("libulysses.so was not found: ", says)
            pathlib.Path(folder, "libulysses.so").write_text("version https://git-lfs.github.com")
            says = python(code, ULYSSES_LIBRARY=folder)
            self.assertIn("libulysses.so was found and cannot be loaded: ", says)
            self.assertIn("noexec", says)

    def test_no_mpi_without_ranks(self):
        """The library and a context of one rank load no MPI library."""
        self.assertEqual(
            python(CALL + "print('libmpi' in open('/proc/self/maps').read())"), "False"
        )

    def test_import_opens_nothing(self):
        self.assertEqual(
            python("import ulysses; print('libulysses' in open('/proc/self/maps').read())"), "False"
        )

    def test_nothing_is_printed(self):
        self.assertEqual(
            python(
                CALL
                + """
try:
    ulysses.attention(x, x[:, :, :0], x, context=ctx)
except ulysses.UlyssesError:
    pass
"""
            ),
            "",
        )

    def test_interrupt(self):
        """SIGINT raises KeyboardInterrupt."""
        self.assertEqual(
            python(
                CALL
                + """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
    print("slept")
except KeyboardInterrupt:
    print("interrupted")
assert (ulysses.attention(x, x, x, context=ctx) == 1).all()
"""
            ),
            "interrupted",
        )

    def test_memory_stays(self):
        """After 2,000 forward and backward passes with 100 lengths, 2,000 more use no more memory.

        The context drops batches and makes them again. The memory of Python 3.14 grows by 10 MB in
        the first passes and no more: after 20,000 passes it is what it was after 10,000.
        """
        grown = int(
            python(
                CALL
                + """
import gc
def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def round():
    for s in range(1, 101):
        y = np.ones((1, s, 2, 8), np.float32)
        for _ in range(5):
            out, _, call = ulysses.attention_forward(y, y, y, causal=True, context=ctx)
            ulysses.attention_backward(call, y)
for _ in range(4): round()
before = resident()
for _ in range(4): round()
print(resident() - before)
"""
            )
        )
        self.assertLess(grown, 8 << 20)

    def test_forked_child(self):
        """A forked child can delete a context and exit. Its calls are refused."""
        self.assertEqual(
            python(
                CALL
                + """
import gc, os
pid = os.fork()
if pid == 0:
    try:
        ulysses.attention(x, x, x, context=ctx)
    except ulysses.InternalError as e:
        assert "fork" in str(e)
        ctx.close()
        del ctx
        gc.collect()
        os._exit(7)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
assert (ulysses.attention(x, x, x, context=ctx) == 1).all()
"""
            ),
            "7",
        )

    @need_torch
    def test_forked_workers_of_a_loader(self):
        """Workers of a DataLoader that are forked after the library was opened work."""
        self.assertEqual(
            python("""
import torch, ulysses
class Data(torch.utils.data.Dataset):
    def __len__(self): return 12
    def __getitem__(self, i):
        return {"input_ids": torch.arange(6) + i, "labels": torch.arange(6) + i}
ctx = ulysses.Context(threads=1)
x = torch.ones(1, 6, 2, 8, requires_grad=True)
for epoch in range(2):
    seen = 0
    batches = torch.utils.data.DataLoader(
        Data(), batch_size=2, num_workers=2, multiprocessing_context="fork"
    )
    for micro_batch in ulysses.loader(batches, ctx):
        ulysses.attention(x, x, x, causal=True, context=ctx).sum().backward()
        seen += micro_batch["input_ids"].shape[0]
    print(seen)
"""),
            "12\n12",
        )

    def test_versions(self):
        self.assertRegex(ulysses.version(), r"^\d+\.\d+\.\d+$")
        self.assertIsInstance(ulysses.build_info(), dict)

    def test_named_by_the_environment(self):
        path = next(c for c in _library.candidates() if os.path.exists(c))
        self.assertEqual(python(CALL + "print('ok')", ULYSSES_LIBRARY=str(path)), "ok")
        self.assertEqual(python(CALL + "print('ok')", ULYSSES_LIBRARY=os.path.dirname(path)), "ok")


if __name__ == "__main__":
    unittest.main()
