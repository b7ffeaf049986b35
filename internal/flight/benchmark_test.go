package flight

import (
	"testing"
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
