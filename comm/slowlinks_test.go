package comm_test

import (
	"testing"
	"time"

	"ulysses/comm"
	"ulysses/testkit/slowlinks"
)

// Communicators with slow links pass the tests of all communicators, also under two levels.
func TestSlowLinks(t *testing.T) {
	for _, n := range []int{1, 2, 3, 4} {
		for _, s := range comm.Suite {
			err := comm.Within(t, func() error {
				return comm.RunLocal(n, func(c comm.Comm) error {
					slow, err := slowlinks.New(c, slowlinks.Links{Latency: time.Microsecond, Bandwidth: 20e9}, nil)
					if err != nil {
						return err
					}
					return s.Run(slow)
				})
			})
			if err != nil {
				t.Errorf("%s, %d ranks: %v", s.Name, n, err)
			}
		}
	}
}
