"""Sharding of batches: the tokens of each rank in each micro-batch. Needs no library."""

import unittest

import numpy as np
import ulysses
from need import need_torch
from ranks import run

try:
    import torch
except ImportError:
    torch = None


def ids(values):
    return np.array([values], np.int64)


class Shard(unittest.TestCase):
    def test_fixture(self):
        """The example of the docstring, from both ranks' batches."""

        def body(comm):
            x = ids([1, 10, 10, 10, 2, 2]) + 100 * comm.rank
            return list(ulysses.shard({"input_ids": x, "labels": x}, comm))

        for rank, found in enumerate(run(2, body)):
            for owner, m in enumerate(found):
                self.assertEqual(m.owner, owner)
                want_ids = [[1, 10, 10], [10, 2, 2]][rank]
                want_labels = [[10, 10, 10], [2, 2, -100]][rank]
                self.assertEqual((m["input_ids"] - 100 * owner).tolist(), [want_ids])
                labels = m["shift_labels"]
                self.assertEqual(
                    np.where(labels == -100, -100, labels - 100 * owner).tolist(), [want_labels]
                )
                self.assertEqual(m["position_ids"].tolist(), [[[0, 1, 2], [3, 4, 5]][rank]])
                self.assertNotIn("labels", m)
                self.assertEqual((m.lo, m.hi, m.sequences.seq), (3 * rank, 3 * rank + 3, 6))

    def test_lengths_of_their_own(self):
        """Ranks have batches of different lengths, one with fewer tokens than ranks.

        The concatenated shards are the batch.
        """

        def body(comm):
            n = [2, 7, 4][comm.rank]
            return list(
                ulysses.shard(
                    {
                        "input_ids": np.arange(2 * n).reshape(2, n),
                        "embeds": np.random.default_rng(comm.rank).normal(size=(2, n, 3)),
                        "name": f"rank {comm.rank}",
                        "table": np.full((4, 4, 4), comm.rank),
                    },
                    comm,
                )
            )

        found = run(3, body)
        for owner, n in enumerate([2, 7, 4]):
            whole = np.concatenate([found[r][owner]["input_ids"] for r in range(3)], 1)
            self.assertEqual(whole.tolist(), np.arange(2 * n).reshape(2, n).tolist())
            embeds = np.concatenate([found[r][owner]["embeds"] for r in range(3)], 1)
            np.testing.assert_array_equal(
                embeds, np.random.default_rng(owner).normal(size=(2, n, 3))
            )
            for r in range(3):
                self.assertEqual(found[r][owner]["name"], f"rank {owner}")
        # The second axis has 4 elements: it is copied if S is 7, and sharded if S is 4.
        self.assertEqual(found[0][1]["table"].shape, (4, 4, 4))
        self.assertEqual(found[0][2]["table"].shape[1], 2)

    def test_dims(self):
        def body(comm):
            return list(
                ulysses.shard(
                    {
                        "input_ids": ids(range(6)),
                        "pixels": np.arange(8),
                        "positions3": np.zeros((3, 1, 6)),
                        "side": np.zeros((1, 6)),
                    },
                    comm,
                    dims={"pixels": 0, "positions3": 2, "side": None},
                )
            )

        m = run(2, body)[1][0]
        self.assertEqual(m["pixels"].tolist(), [4, 5, 6, 7])
        self.assertEqual(m["positions3"].shape, (3, 1, 3))
        self.assertEqual(m["side"].shape, (1, 6))

    def test_wrong_dims(self):
        batch = {"input_ids": ids(range(6)), "x": np.zeros((2, 3, 6)), "list": [0] * 6}
        for key, dim, words in (
            ("x", 5, "the axis of 'x' in dims 5 of 3 axes; give a whole number from -3 to 2"),
            ("x", 1.5, "the axis of 'x' in dims 1.5"),
            ("list", 0, "axis 0 of 'list', which is not sharded"),
        ):
            with self.assertRaisesRegex(ulysses.InvalidArgument, words):
                ulysses.shard(batch, None, dims={key: dim})
        batch["position_ids"] = ids([0, 1, 2, 0, 1, 2])
        for dim in (1, -1):  # documents are found with an axis from the end also
            m = next(ulysses.shard(batch, None, dims={"position_ids": dim, "x": -1, "list": None}))
            self.assertEqual(m.sequences.cu_seqlens, (0, 3, 6))

    def test_documents(self):
        """A document starts at position 0, and zeros at the end of a sequence are one document.

        No token has the first token of a document as its label.
        """

        def body(comm):
            x = ids([5, 6, 7, 8, 9, 0, 0, 0])
            return next(
                iter(
                    ulysses.shard(
                        {
                            "input_ids": x,
                            "labels": x,
                            "position_ids": ids([0, 1, 2, 0, 1, 0, 0, 0]),
                        },
                        comm,
                    )
                )
            )

        a, b = run(2, body)
        self.assertEqual(a.sequences.cu_seqlens, (0, 3, 5, 8))
        self.assertEqual(
            a["shift_labels"].tolist() + b["shift_labels"].tolist(),
            [[6, 7, -100, 9], [-100, 0, 0, -100]],
        )

    def test_positions_with_several_axes(self):
        """Positions of a multimodal RoPE are sharded along the tokens, also where B = S.

        The first of four planes has the positions of the text, so it starts documents.
        """
        text = np.array([[0, 1, 2, 0], [0, 1, 0, 1], [0, 1, 2, 3], [0, 1, 2, 3]])
        packed = (0, 3, 4, 6, 8, 12, 16)
        for positions, cu in (
            (text, packed),
            (np.stack([text, text + 7, text + 8, text + 9]), packed),
            (np.stack([text, text, text]), None),
            (text[:1], (0, 3, 4, 7, 8, 11, 12, 15, 16)),
        ):
            x = np.arange(16).reshape(4, 4)
            batch = {"input_ids": x, "labels": x, "position_ids": positions}

            def body(comm):
                return next(iter(ulysses.shard(batch, comm)))

            found = run(2, body)
            whole = np.concatenate([m["position_ids"] for m in found], -1)
            np.testing.assert_array_equal(whole, positions)
            want = ulysses.shift_labels(x, None if cu is None else np.isin(x, cu))
            labels = np.concatenate([m["shift_labels"] for m in found], 1)
            np.testing.assert_array_equal(labels, want)
            self.assertEqual(found[0].sequences.cu_seqlens, cu)

    def test_wrong_shapes(self):
        x = np.zeros((2, 8), int)
        for key, shape, words in (
            ("labels", (8,), r"labels has shape \(8,\); give \[2, 8\]"),
            ("labels", (2, 8, 3), "labels has shape"),
            ("position_ids", (8,), r"position_ids has shape \(8,\); give \[2, 8\]"),
            ("position_ids", (2, 8, 3), "position_ids has shape"),
        ):

            def body(comm):
                with self.assertRaisesRegex(ulysses.InvalidArgument, words):
                    list(ulysses.shard({"input_ids": x, key: np.zeros(shape, int)}, comm))

            run(2, body)

    def test_cu_seqlens(self):
        def body(comm):
            x = ids([5, 6, 7, 8])
            return next(
                iter(
                    ulysses.shard(
                        {"input_ids": x, "labels": x, "cu_seqlens": [0, 3, 4]}, comm, pad=True
                    )
                )
            )

        found = run(3, body)
        self.assertEqual(found[0].sequences.cu_seqlens, (0, 3, 4, 6))
        self.assertEqual(
            np.concatenate([m["position_ids"] for m in found], 1).tolist(), [[0, 1, 2, 0, 0, 0]]
        )
        self.assertEqual(
            np.concatenate([m["shift_labels"] for m in found], 1).tolist(),
            [[6, 7, -100, -100, -100, -100]],
        )

    def test_pad(self):
        def body(comm):
            x = ids([1, 2, 3, 4, 5])
            return next(
                iter(
                    ulysses.shard(
                        {"input_ids": x, "labels": x, "attention_mask": np.ones((1, 5), int)},
                        comm,
                        pad=True,
                    )
                )
            )

        a, b = run(2, body)
        self.assertEqual(b["input_ids"].tolist(), [[4, 5, 0]])
        self.assertEqual(b["shift_labels"].tolist(), [[5, -100, -100]])
        self.assertEqual(b["attention_mask"].tolist(), [[1, 1, 1]])
        self.assertEqual(a.sequences, ulysses.Sequences(1, 6, None, (0, 5, 6)))

    @need_torch
    def test_torch(self):
        def body(comm):
            x = torch.arange(6)[None] + comm.rank
            return list(
                ulysses.shard(
                    {
                        "input_ids": x,
                        "labels": x,
                        "h": torch.ones(1, 6, 2, dtype=torch.bfloat16),
                        "flag": x > 3,
                    },
                    comm,
                )
            )

        m = run(2, body)[1][1]
        self.assertEqual(m["input_ids"].tolist(), [[4, 5, 6]])
        self.assertEqual(m["shift_labels"].tolist(), [[5, 6, -100]])
        self.assertEqual((m["h"].dtype, tuple(m["h"].shape)), (torch.bfloat16, (1, 3, 2)))
        self.assertEqual(m["flag"].tolist(), [[True, True, True]])

    @need_torch
    def test_bytes_of_views(self):
        """The elements of a view are sent, and not all of the tensor that it is a view of."""
        import torch

        big = torch.arange(2.0 * 10**5).reshape(2, -1)

        def body(comm):
            sent = []

            def allgather(send, receive):
                sent.append(len(send))
                comm.allgather(send, receive)

            mine = ulysses.Callbacks(comm.rank, comm.size, allgather, comm.alltoallv)
            with ulysses.Context(mine, threads=1) as ctx:
                found = ulysses.gather_tokens(big[:, comm.rank : comm.rank + 1], context=ctx)
                batch = {"input_ids": torch.ones(1, 4, dtype=torch.long), "table": big[0, 5:9]}
                m = next(ulysses.shard(batch, ctx))
            self.assertLess(sum(sent), 10**4)
            self.assertTrue(torch.equal(found, big[:, :2]) and torch.equal(m["table"], big[0, 5:9]))

        run(2, body)

    def test_fractions_in_cu_seqlens(self):
        bad = {"input_ids": ids([1, 2, 3]), "cu_seqlens": [0, 1.5, 3]}
        with self.assertRaisesRegex(ulysses.InvalidArgument, "cu_seqlens .*1.5.*whole numbers"):
            list(ulysses.shard(bad, None))

    def test_one_wrong_batch_raises_on_all_ranks(self):
        bad = {"input_ids": ids([1, 2, 3]), "cu_seqlens": [0, 2]}

        def body(comm):
            with self.assertRaisesRegex(
                (ulysses.InvalidArgument, ulysses.CommError), "cu_seqlens"
            ) as caught:
                list(ulysses.shard(bad if comm.rank == 1 else {"input_ids": ids([1, 2, 3])}, comm))
            return type(caught.exception)

        self.assertEqual(run(2, body), [ulysses.CommError, ulysses.InvalidArgument])


class Loader(unittest.TestCase):
    def test_a_value_that_one_rank_cannot_send(self):
        def body(comm):
            batch = {"input_ids": ids(range(6)), "f": max if comm.rank else lambda: 0}
            with self.assertRaisesRegex(ulysses.UlyssesError, "values .'f'.* cannot be pickled"):
                ulysses.shard(batch, comm)
            batch["f"] = max
            self.assertIs(next(ulysses.shard(batch, comm))["f"], max)

        run(2, body)

    def test_ends_together(self):
        """Rank 1 has two batches, rank 0 has three: both ranks see two times two micro-batches.

        The second epoch is equal to the first.
        """

        def body(comm):
            batches = [{"input_ids": ids([comm.rank, i, 7])} for i in range(3 - comm.rank)]
            it = ulysses.loader(batches, comm)
            first = [m["input_ids"].tolist() for m in it]
            self.assertEqual(len(it), 2 * len(batches))
            self.assertEqual([m["input_ids"].tolist() for m in it], first)
            return first

        a, b = run(2, body)
        self.assertEqual(a, [[[0, 0]], [[1, 0]], [[0, 1]], [[1, 1]]])
        self.assertEqual(b, [[[7]]] * 4)

    def test_a_loader_that_fails(self):
        def broken():
            yield {"input_ids": ids([1, 2])}
            raise RuntimeError("disk gone")

        def body(comm):
            steps = 0
            with self.assertRaisesRegex(Exception, "disk gone") as caught:
                for _ in ulysses.loader(
                    broken() if comm.rank == 0 else [{"input_ids": ids([1, 2])}] * 5, comm
                ):
                    steps += 1
            return steps, type(caught.exception)

        self.assertEqual(run(2, body), [(2, RuntimeError), (2, ulysses.CommError)])


if __name__ == "__main__":
    unittest.main()
