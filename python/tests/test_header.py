"""Compares the structs and constants of _struct.py with a C compiler's view of capi/ulysses.h."""

import ctypes
import json
import pathlib
import shutil
import subprocess
import tempfile
import unittest

from need import need
from ulysses import _struct, errors

HEADER = pathlib.Path(__file__).resolve().parents[2] / "capi" / "ulysses.h"


@need(shutil.which("gcc"), "no gcc", "run make deps")
class Header(unittest.TestCase):
    def test_structs(self):
        lines = []
        for c_name, cls in _struct.STRUCTS.items():
            lines.append(f'printf("\\"{c_name}\\": %zu,", sizeof({c_name}));')
            for name, _ in cls._fields_:
                lines.append(
                    f'printf("\\"{c_name}.{name}\\": [%zu, %zu],", '
                    f"offsetof({c_name}, {name}), sizeof((({c_name} *)0)->{name}));"
                )
        numbers = {**_struct.NUMBERS, **{s.name: int(s) for s in errors.Status}}
        lines += [f'printf("\\"{n}\\": %d,", (int)ULYSSES_{n});' for n in numbers]
        source = (
            '#include <stdio.h>\n#include <stddef.h>\n#include "ulysses.h"\n'
            'int main(void) {\nputs("{");\n'
            + "\n".join(lines)
            + '\nputs("\\"end\\": 0}");\nreturn 0; }\n'
        )
        with tempfile.TemporaryDirectory() as d:
            (pathlib.Path(d) / "sizes.c").write_text(source)
            subprocess.run(
                ["gcc", "-I", HEADER.parent, "-o", f"{d}/sizes", f"{d}/sizes.c"], check=True
            )
            found = json.loads(subprocess.check_output([f"{d}/sizes"]))
        for c_name, cls in _struct.STRUCTS.items():
            self.assertEqual(found[c_name], ctypes.sizeof(cls), c_name)
            for name, _ in cls._fields_:
                field = getattr(cls, name)
                self.assertEqual(
                    found[f"{c_name}.{name}"], [field.offset, field.size], f"{c_name}.{name}"
                )
        for name, value in numbers.items():
            self.assertEqual(found[name], value, name)

    def test_statuses(self):
        for status in list(errors.Status)[1:]:
            error = errors.error_of(status, "op: values; fix")
            self.assertEqual((error.status, str(error)), (status, "op: values; fix"))
        self.assertEqual(errors.error_of(99, "x").status, 99)


if __name__ == "__main__":
    unittest.main()
