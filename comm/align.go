package comm

import (
	"time"

	"ulysses/tensor"
)

// Alignment turns this rank's time into the first rank's: theirs = mine + Offset, to within ±
// Within. Both are zero on the first rank.
type Alignment struct{ Offset, Within time.Duration }

// alignRounds is how often a rank asks; the fastest answer counts.
const alignRounds = 8

// Align measures how the ranks' clocks stand to the first rank's, one rank after another: a rank
// asks for the time, and the answer was read between the question and its arrival (Cristian 1989,
// Probabilistic clock synchronization). What is certain is half of the fastest round trip. now is
// this rank's clock. Collective; not for a communicator of Kind "host", whose SendRecv is.
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
		asked := now()
		if err := c.SendRecv(nil, none, -1, t, 0); err != nil {
			return a, err
		}
		if err := c.SendRecv(nil, t, 0, none, -1); err != nil {
			return a, err
		}
		back := now()
		if trip := back - asked; best < 0 || trip < best {
			best = trip
			a = Alignment{Offset: time.Duration(word[0]) - asked - trip/2, Within: (trip + 1) / 2}
		}
	}
	return a, nil
}
