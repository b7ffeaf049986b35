"""ulysses.tiles and the C library's tiled_compute make the same tiles."""

import ctypes
import unittest
from ctypes import CFUNCTYPE, POINTER, c_int32, c_int64, c_uint32, c_void_p

import numpy as np
import ulysses
from ulysses import _library, _struct
from ulysses.tensors import view


class Tile(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_int32),
        ("index", c_int64),
        ("count", c_int64),
        ("lo", c_int64),
        ("hi", c_int64),
        ("stream", c_void_p),
    ]


_LIST = POINTER(POINTER(_struct.Tensor))
Forward = CFUNCTYPE(c_int32, c_void_p, POINTER(Tile), _LIST, _LIST)


class TiledArgs(_struct.Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("n_in", c_int32),
        ("n_out", c_int32),
        ("reserved", c_int32),
        ("in_dim", POINTER(c_int32)),
        ("out_dim", POINTER(c_int32)),
        ("tile_rows", c_int64),
        ("max_rows", c_int64),
        ("in", _LIST),
        ("out", _LIST),
        ("dout", _LIST),
        ("din", _LIST),
        ("forward", Forward),
        ("backward", c_void_p),
        ("user", c_void_p),
        ("stream", c_void_p),
    ]


class Tiles(unittest.TestCase):
    def test_same_arithmetic(self):
        run = _library.library().tiled_compute
        run.argtypes, run.restype = [POINTER(TiledArgs)], c_int32
        for rows in (0, 1, 5, 17, 125, 1025):
            x, y = np.zeros((rows, 2), np.float32), np.zeros((rows, 2), np.float32)
            for tile_rows in (0, 1, 2, 7, 64, 1024, 5000):
                for max_rows in (0, rows, rows + 9):
                    found = []

                    def forward(user, tile, given, out):
                        t = tile.contents
                        self.assertEqual(
                            (t.index, given[0].contents.shape[0]), (len(found), t.hi - t.lo)
                        )
                        found.append((t.lo, t.hi))
                        return 0

                    views, callback = (view(x), view(y)), Forward(forward)
                    lists = [(POINTER(_struct.Tensor) * 1)(v.pointer()) for v in views]
                    args = TiledArgs(
                        n_in=1,
                        n_out=1,
                        tile_rows=tile_rows,
                        max_rows=max_rows,
                        out=lists[1],
                        forward=callback,
                    )
                    setattr(args, "in", lists[0])
                    self.assertEqual(
                        run(ctypes.byref(args)), 0, _library.library().ulysses_last_error()
                    )
                    self.assertEqual(
                        found, ulysses.tiles(rows, tile_rows, max_rows), (rows, tile_rows, max_rows)
                    )


if __name__ == "__main__":
    unittest.main()
