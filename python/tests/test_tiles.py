"""ulysses.tiles and the C library's tiled_compute make the same tiles."""

import ctypes
import unittest

import numpy as np
import ulysses
from ulysses import _library, _struct
from ulysses.tensors import view


class Tiles(unittest.TestCase):
    def test_same_arithmetic(self):
        run = _library.library().tiled_compute
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

                    views, callback = (view(x), view(y)), _struct.TileForward(forward)
                    lists = [(ctypes.POINTER(_struct.Tensor) * 1)(v.pointer()) for v in views]
                    args = _struct.TiledArgs(
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
