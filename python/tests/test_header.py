"""The package's structs, numbers and functions against capi/ulysses.h, by a C compiler. Needs a compiler, not the library."""

import ctypes
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

from ulysses import _struct, errors

HEADER = pathlib.Path(__file__).resolve().parents[2] / "capi" / "ulysses.h"


def declared():
    """The header without comments."""
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)


@unittest.skipIf(shutil.which("gcc") is None and not os.environ.get("CI"), "no gcc")
class Header(unittest.TestCase):
    def test_structs(self):
        lines = []
        for c_name, cls in _struct.STRUCTS.items():
            lines.append(f'printf("\\"{c_name}\\": %zu,", sizeof({c_name}));')
            for name, _ in cls._fields_:
                lines.append(
                    f'printf("\\"{c_name}.{name}\\": [%zu, %zu],", offsetof({c_name}, {name}), sizeof((({c_name} *)0)->{name}));'
                )
        numbers = [n for n in _struct.NUMBERS if n != "VERSION"]
        lines += [f'printf("\\"{n}\\": %d,", (int)ULYSSES_{n});' for n in numbers + ["VERSION"]]
        source = (
            '#include <stdio.h>\n#include <stddef.h>\n#include "ulysses.h"\nint main(void) {\nputs("{");\n'
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
        for name in _struct.NUMBERS:
            self.assertEqual(found[name], _struct.NUMBERS[name], name)

    def test_fields_are_all_there(self):
        """Nothing at a struct's tail was forgotten: sizes would say so, but for a field that fills a hole."""
        text = declared()
        for c_name, cls in _struct.STRUCTS.items():
            body = re.search(r"typedef struct \{([^{}]*)\} " + c_name + ";", text)
            self.assertIsNotNone(body, c_name)
            found = []
            for statement in body[1].split(";"):
                function = re.search(r"\(\*(\w+)\)", statement)
                if function:
                    found.append(function[1])
                elif statement.strip():
                    found += [
                        re.search(r"(\w+)(\[\d+\])?\s*$", part)[1] for part in statement.split(",")
                    ]
            self.assertEqual(found, [n for n, _ in cls._fields_], c_name)

    def test_functions(self):
        """Every function is in the header, with as many arguments."""
        text = declared()
        for name, args in [
            *_struct.FUNCTIONS.items(),
            *((n, a) for n, (_, a) in _struct.OTHERS.items()),
        ]:
            found = re.search(r"\b" + name + r"\(([^;]*)\);", text)
            self.assertIsNotNone(found, name)
            self.assertEqual(
                0 if found[1].strip() == "void" else found[1].count(",") + 1, len(args), name
            )

    def test_statuses(self):
        found = dict(
            re.findall(
                r"ULYSSES_([A-Z_]+) = (\d+)",
                re.search(r"enum \{ ULYSSES_OK.*?\}", declared(), re.S)[0],
            )
        )
        self.assertEqual(
            {n: int(v) for n, v in found.items()}, {s.name: int(s) for s in errors.Status}
        )
        for status in list(errors.Status)[1:]:
            error = errors.error_of(status, "op: values: remedy")
            self.assertEqual((error.status, str(error)), (status, "op: values: remedy"))
        self.assertEqual(errors.error_of(99, "x").status, 99)


if __name__ == "__main__":
    unittest.main()
