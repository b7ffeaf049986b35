package ref

import (
	"math"
	"testing"
)

// The kept share is 1 - p in every row and column, and rows, columns, heads and seeds are
// independent: the number of pairs that two of them both keep is that of independent choices.
func TestKeeps(t *testing.T) {
	const n, p = 4000, 0.3
	lines := map[string]func(line, i int64) bool{
		"queries":             func(line, i int64) bool { return Keeps(p, 7, 3, line, i) },
		"queries, far":        func(line, i int64) bool { return Keeps(p, 7, 3, 1<<38+line<<20, 1<<40+i) },
		"keys":                func(line, i int64) bool { return Keeps(p, 7, 3, i, line) },
		"heads":               func(line, i int64) bool { return Keeps(p, 7, line, i, 5) },
		"seeds":               func(line, i int64) bool { return Keeps(p, line, 1, 5, i) },
		"diagonals":           func(line, i int64) bool { return Keeps(p, 7, 3, i, i+line) },
		"differences of bits": func(line, i int64) bool { return Keeps(p, 7, 3, i^line, i) },
	}
	for name, keeps := range lines {
		for line := range int64(20) {
			kept, both := 0, 0
			for i := range int64(n) {
				if keeps(line, i) {
					kept++
					if keeps(line+1, i) {
						both++
					}
				}
			}
			within := func(what string, got int, share float64) {
				if d := math.Abs(float64(got) - n*share); !(d <= 5*math.Sqrt(n*share*(1-share))) {
					t.Errorf("%s %d: %d of %d %s, expected %.0f", name, line, got, n, what, n*share)
				}
			}
			within("are kept", kept, 1-p)
			within("are kept here and in the next line", both, (1-p)*(1-p))
		}
	}
	if !Keeps(0, 1, 2, 3, 4) {
		t.Error("probability 0 drops a weight")
	}
	// A run that is resumed with another version must make the same choices.
	bits := uint64(0)
	for i := range int64(64) {
		if Keeps(0.5, 42, i%3, i*i, 1000-i) {
			bits |= 1 << i
		}
	}
	if want := uint64(0xa661ba0ae1132ef9); bits != want {
		t.Errorf("the choices are %#x, they were %#x", bits, want)
	}
}
