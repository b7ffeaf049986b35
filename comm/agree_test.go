package comm

import (
	"errors"
	"testing"
	"time"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Ranks on several hosts are named with their host.
func TestPlace(t *testing.T) {
	for _, x := range []struct {
		rank  int
		hosts []string
		want  string
	}{
		{0, []string{"a"}, "rank 0"},
		{1, []string{"a", "a", "a"}, "rank 1"},
		{1, []string{"a", "a", "b"}, "rank 1 on a"},
		{2, []string{"a", "a", "b"}, "rank 2 on b"},
	} {
		var hosts [][]byte
		for _, host := range x.hosts {
			hosts = append(hosts, []byte(host))
		}
		if got := place(x.rank, hosts); got != x.want {
			t.Errorf("%v: %q, want %q", x.hosts, got, x.want)
		}
	}
}

// While f runs on one rank, the ranks communicate, and the error of f is that of all ranks.
func TestAgreeAfter(t *testing.T) {
	calls := make(chan struct{})
	err := RunLocal(3, func(c Comm) error {
		g := &gathers{c, calls}
		err := AgreeAfter(g, func() error {
			if c.Rank() != 1 {
				return nil
			}
			for range 2 {
				select {
				case <-calls:
				case <-time.After(time.Minute):
					return errors.New("the ranks do not communicate")
				}
			}
			return status.Errorf(status.IO, "a fault")
		})
		if status.Of(err) != status.IO || err.Error() != "rank 1: a fault" {
			t.Errorf("rank %d: %v", c.Rank(), err)
		}
		return AgreeAfter(g, func() error { return nil })
	})
	if err != nil {
		t.Error(err)
	}
}

// gathers tells each all-gather of a rank.
type gathers struct {
	Comm
	calls chan struct{}
}

func (c *gathers) AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	select {
	case c.calls <- struct{}{}:
	default: // nothing waits for it
	}
	return c.Comm.AllGather(s, dst, src, rows)
}
