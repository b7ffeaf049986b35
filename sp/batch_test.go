package sp

import (
	"slices"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/testkit/mpitest"
)

// A rank has exactly the key heads of its query heads, and every key head has one owner.
func TestKeyHeadsUnderQueryHeads(t *testing.T) {
	for kv := int64(1); kv < 7; kv++ {
		for group := int64(1); group < 6; group++ {
			for size := int64(1); size < 12; size++ {
				query := shards(kv*group, size)
				key, owned := keyHeads(query, group)
				next := int64(0)
				for r, q := range query {
					for h := range kv {
						used := q.lo < (h+1)*group && q.hi > h*group
						if held := key[r].lo <= h && h < key[r].hi; used != held {
							t.Fatalf("kv %d group %d size %d: rank %d with query heads %v has key head %d: %v", kv,
								group, size, r, q, h, held)
						}
					}
					if owned[r].lo != next || owned[r].n() > 0 &&
						(owned[r].lo < key[r].lo || owned[r].hi != key[r].hi) {
						t.Fatalf("kv %d group %d size %d: rank %d has %v and owns %v", kv, group, size, r, key[r],
							owned[r])
					}
					next = owned[r].hi
				}
				if next != kv {
					t.Fatalf("kv %d group %d size %d: owners end at %d", kv, group, size, next)
				}
			}
		}
	}
}

func TestDocuments(t *testing.T) {
	for _, c := range []struct {
		name string
		spec BatchSpec
		q, k []int64
	}{
		{"rows", BatchSpec{Batch: 2, Seq: 5}, []int64{0, 5, 10}, []int64{0, 5, 10}},
		{"rows of other lengths", BatchSpec{Batch: 2, Seq: 5, KVSeq: 3}, []int64{0, 5, 10}, []int64{0, 3, 6}},
		{"given", BatchSpec{Batch: 2, Seq: 5, CuSeqlens: []int64{0, 2, 5, 10}}, []int64{0, 2, 5, 10},
			[]int64{0, 2, 5, 10}},
		{"given twice", BatchSpec{Batch: 1, Seq: 5, CuSeqlens: []int64{0, 2, 5}, CuSeqlensKV: []int64{0, 3, 5}},
			[]int64{0, 2, 5}, []int64{0, 3, 5}},
		{"a row start is a document start above 0; jumps start nothing",
			BatchSpec{Batch: 2, Seq: 4, Positions: []int64{7, 8, 0, 1, 2, 9, 4, 0}}, []int64{0, 2, 4, 7, 8},
			[]int64{0, 2, 4, 7, 8}},
		{"both", BatchSpec{Batch: 1, Seq: 4, CuSeqlens: []int64{0, 1, 4}, Positions: []int64{0, 0, 1, 2}},
			[]int64{0, 1, 4}, []int64{0, 1, 4}},
	} {
		b, err := newBatch(0, 1, c.spec)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if q, k := b.Documents(); !slices.Equal(q, c.q) || !slices.Equal(k, c.k) {
			t.Errorf("%s: documents %v and %v, want %v and %v", c.name, q, k, c.q, c.k)
		}
	}
}

// Wrong specifications return the same error on every rank, and the communicator still works
// afterwards.
func TestRefusals(t *testing.T) {
	layers := []struct {
		want  string
		layer Layer
	}{
		{"heads is 0", Layer{KVHeads: 1, Dim: 1, VDim: 1}},
		{"kv_heads is -1", Layer{Heads: 4, KVHeads: -1, Dim: 1, VDim: 1}},
		{"dim is 0", Layer{Heads: 4, KVHeads: 2, VDim: 1}},
		{"v_dim is 0", Layer{Heads: 4, KVHeads: 2, Dim: 1}},
		{"multiple", Layer{Heads: 4, KVHeads: 3, Dim: 1, VDim: 1}},
	}
	batches := []struct {
		want string
		spec BatchSpec
	}{
		{"1 or more", BatchSpec{Batch: 0, Seq: 4}},
		{"1 or more", BatchSpec{Batch: 1, Seq: -4}},
		{"1 or more", BatchSpec{Batch: 1, Seq: 4, KVSeq: -1}},
		{"start at 0", BatchSpec{Batch: 1, Seq: 4, CuSeqlens: []int64{1, 4}}},
		{"end at 4", BatchSpec{Batch: 1, Seq: 4, CuSeqlens: []int64{0, 5}}},
		{"end at 4", BatchSpec{Batch: 1, Seq: 4, CuSeqlens: []int64{0, 3}}},
		{"must increase", BatchSpec{Batch: 1, Seq: 4, CuSeqlens: []int64{0, 2, 2, 4}}},
		{"must increase", BatchSpec{Batch: 1, Seq: 4, CuSeqlens: []int64{0, 3, 2, 4}}},
		{"crosses the end of a sequence", BatchSpec{Batch: 2, Seq: 4, CuSeqlens: []int64{0, 3, 5, 8}}},
		{"crosses the end of a sequence", BatchSpec{Batch: 3, Seq: 4, CuSeqlens: []int64{0, 4, 12}}},
		{"0 entries", BatchSpec{Batch: 1, Seq: 4, CuSeqlens: []int64{}}},
		{"without cu_seqlens;", BatchSpec{Batch: 1, Seq: 4, CuSeqlensKV: []int64{0, 4}}},
		{"give cu_seqlens_k", BatchSpec{Batch: 1, Seq: 4, KVSeq: 6, CuSeqlens: []int64{0, 4}}},
		{"cu_seqlens_k", BatchSpec{Batch: 1, Seq: 4, KVSeq: 6, CuSeqlens: []int64{0, 4}, CuSeqlensKV: []int64{0, 4}}},
		{"1 of keys; give the same number",
			BatchSpec{Batch: 1, Seq: 4, CuSeqlens: []int64{0, 2, 4}, CuSeqlensKV: []int64{0, 4}}},
		{"same order", BatchSpec{Batch: 2, Seq: 4, CuSeqlens: []int64{0, 2, 4, 8}, CuSeqlensKV: []int64{0, 4, 6, 8}}},
		{"3 positions for 4", BatchSpec{Batch: 1, Seq: 4, Positions: []int64{0, 1, 2}}},
		{"negative", BatchSpec{Batch: 1, Seq: 2, Positions: []int64{0, -1}}},
		{"disagree", BatchSpec{Batch: 1, Seq: 3, Positions: []int64{0, 1, 0}, CuSeqlens: []int64{0, 3}}},
		{"disagree", BatchSpec{Batch: 1, Seq: 3, Positions: []int64{0, 1, 2}, CuSeqlens: []int64{0, 2, 3}}},
	}
	for _, n := range mpitest.Sizes() {
		mpitest.Ranks(t, n, func(c comm.Comm) error {
			b := newBench()
			defer b.close()
			for _, x := range layers {
				_, err := NewPlan(b.dev, c, x.layer)
				refused(t, c, err, x.want)
			}
			for _, x := range batches {
				_, err := NewBatch(c, x.spec)
				refused(t, c, err, x.want)
			}
			if c.Size() == 1 {
				return nil
			}
			layer, spec := Layer{Heads: 4, KVHeads: 2, Dim: 8, VDim: 8},
				BatchSpec{Batch: 1, Seq: 8, CuSeqlens: []int64{0, 3, 8}}
			if c.Rank() == c.Size()-1 {
				layer.Causal, spec.CuSeqlens = true, []int64{0, 4, 8}
			}
			_, err := NewPlan(b.dev, c, layer)
			refused(t, c, err, "causal")
			_, err = NewBatch(c, spec)
			refused(t, c, err, "cu_seqlens")
			return c.Barrier()
		})
	}
}

func refused(t *testing.T, c comm.Comm, err error, want string) {
	t.Helper()
	if status.Of(err) != status.InvalidArgument || !strings.Contains(err.Error(), want) {
		t.Errorf("rank %d of %d: %v: want an invalid argument that says %q", c.Rank(), c.Size(), err, want)
	}
}
