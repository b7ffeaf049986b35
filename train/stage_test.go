package train

import "testing"

// A new stage begins with the first sequence that has no token of the sequences that were read: a
// sequence that begins among them is left out.
func TestScaled(t *testing.T) {
	for _, x := range []struct{ n, to, from, want int64 }{
		{16, 22, 44, 8}, {15, 22, 44, 8}, {5, 10, 4, 13}, {0, 7, 3, 0}, {3, 7, 3, 7}, {4, 7, 3, 10},
		{1 << 40, 1<<41 + 1, 1 << 41, 1<<40 + 1},
	} {
		if got := scaled(x.n, x.to, x.from); got != x.want {
			t.Errorf("after %d of %d sequences an epoch of %d goes on with %d, want %d", x.n, x.from, x.to, got, x.want)
		}
	}
}
