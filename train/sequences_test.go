package train

import (
	"slices"
	"testing"

	"ulysses/cpu"
	"ulysses/data"
	"ulysses/model"
	"ulysses/sp"
	"ulysses/tensor"
)

// A token has the index of its sequence in the micro-batch, -1 if it has no target, and a number in
// the run that depends on its sequence and its place there alone. A rank has the tokens of its
// ranges.
func TestSequencesOfTokens(t *testing.T) {
	d, err := cpu.New(cpu.Options{Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	stream, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	const none = data.Ignore
	m := &data.MicroBatch{IDs: make([]int32, 7), Targets: []int32{1, none, 3, 4, none, 6, none},
		Sequences: []data.Sequence{{Number: 5, At: 0}, {Number: 1 << 20, At: 3}}}
	for _, x := range []struct {
		ranges    []sp.Range
		sequences []int32
		numbers   []int64
	}{
		{[]sp.Range{{Lo: 0, Hi: 4}}, []int32{0, -1, 0, 1}, []int64{5 << 32, 5<<32 + 1, 5<<32 + 2, 1 << 52}},
		{[]sp.Range{{Lo: 1, Hi: 3}, {Lo: 4, Hi: 6}}, []int32{-1, 0, -1, 1},
			[]int64{5<<32 + 1, 5<<32 + 2, 1<<52 + 1, 1<<52 + 2}},
	} {
		rank := Trainer{Setup: Setup{Device: d}, stream: stream}
		rank.sequences, rank.numbers = tensor.OfInt32(make([]int32, 4), 4), tensor.OfInt64(make([]int64, 4), 4)
		var b model.Batch
		if b.SP, err = sp.SketchBatch(0, 2, sp.BatchSpec{Batch: 1, Seq: 7}); err != nil {
			t.Fatal(err)
		}
		if err := rank.copySequences(m, x.ranges, &b); err != nil {
			t.Fatal(err)
		}
		if err := rank.copyNumbers(m, x.ranges, &b); err != nil {
			t.Fatal(err)
		}
		if got := b.Sequences.Int32s(); !slices.Equal(got, x.sequences) ||
			!slices.Equal(b.SequenceTargets, []int64{2, 2}) {
			t.Errorf("%v: sequences %v with targets %v, want %v", x.ranges, got, b.SequenceTargets, x.sequences)
		}
		if got := b.Numbers.Int64s(); !slices.Equal(got, x.numbers) {
			t.Errorf("%v: numbers %v, want %v", x.ranges, got, x.numbers)
		}
	}
}
