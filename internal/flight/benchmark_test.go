package flight

import (
	"testing"
	"time"
)

// BenchmarkRecord measures what a rank adds to a collective: the beginning and the end of its
// record, in a mapped file.
func BenchmarkRecord(b *testing.B) {
	r := New(0, 4, "here")
	if err := r.Attach(b.TempDir()); err != nil {
		b.Fatal(err)
	}
	defer r.Close()
	g := Group{"world", 0, 1, 4}
	for i := int64(1); b.Loop(); i++ {
		r.End(r.Begin("all-to-all", g, i, 1<<20, false, Checksum(1, []int64{i})))
	}
}

// BenchmarkBeat measures a sign of life, of which there are four a second.
func BenchmarkBeat(b *testing.B) {
	r := New(0, 4, "here")
	if err := r.Attach(b.TempDir()); err != nil {
		b.Fatal(err)
	}
	defer r.Close()
	for b.Loop() {
		r.Beat(false)
	}
}

// BenchmarkDiagnose measures the comparison of full records of 512 ranks, after one rank has called
// other operations than the others for a long time.
func BenchmarkDiagnose(b *testing.B) {
	ranks := make([]*Rank, 512)
	for r := range ranks {
		ranks[r] = &Rank{Rank: r, Size: len(ranks), State: Running, Blames: -1, Calls: make([]Call, Capacity)}
		for i := range ranks[r].Calls {
			at := time.Duration(i) * time.Second
			ranks[r].Calls[i] = Call{Op: "all-reduce", Group: Group{"world", 0, 1, len(ranks)}, Seq: int64(i + 1),
				Began: at, Ended: at + 1}
			if r == 3 && i >= 24 {
				ranks[r].Calls[i].Op = "all-gather"
			}
		}
	}
	for b.Loop() {
		if d := Diagnose(ranks); len(d.Culprits) != 1 || d.Culprits[0].Operation != "all-gather #25 on axis world (ranks 0 to 511)" {
			b.Fatalf("%+v", d.Culprits)
		}
	}
}
