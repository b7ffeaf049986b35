package comm

import (
	"time"

	"ulysses/tensor"
)

// Alignment converts this rank's clock to the clock of rank 0: time on rank 0 = time here + Offset,
// with an error of at most Within. Both are zero on rank 0.
type Alignment struct{ Offset, Within time.Duration }

// alignRounds is the number of round trips per rank. The fastest one is used.
const alignRounds = 8

// Align measures the offset of each rank's clock to the clock of rank 0, one rank after another. A
// rank sends a request, and rank 0 answers with its time, which it reads between the sending and
// the arrival of the answer (Cristian 1989, Probabilistic clock synchronization). The error is at
// most half of the round trip. now is this rank's clock. Collective. It does not support Kind
// "host", where all ranks must call SendRecv.
func Align(c Comm, now func() time.Duration) (Alignment, error) {
	var a Alignment
	word := []int64{0}
	t, none := tensor.OfInt64(word, 1), tensor.Tensor{}
	if c.Rank() == 0 {
		for r := 1; r < c.Size(); r++ {
			for range alignRounds {
				if err := c.SendRecv(nil, t, r, none, -1); err != nil {
					return a, err
				}
				word[0] = int64(now())
				if err := c.SendRecv(nil, none, -1, t, r); err != nil {
					return a, err
				}
			}
		}
		return a, nil
	}
	best := time.Duration(-1)
	for range alignRounds {
		sent := now()
		if err := c.SendRecv(nil, none, -1, t, 0); err != nil {
			return a, err
		}
		if err := c.SendRecv(nil, t, 0, none, -1); err != nil {
			return a, err
		}
		if trip := now() - sent; best < 0 || trip < best {
			best = trip
			a = Alignment{Offset: time.Duration(word[0]) - sent - trip/2, Within: (trip + 1) / 2}
		}
	}
	return a, nil
}
