package data

import (
	"fmt"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/internal/status"
)

// unreadable is a file of which one unit of two cannot be read.
type unreadable struct{ format }

func (unreadable) path() string { return "x.bin" }
func (unreadable) work() int64  { return 2 }
func (unreadable) unit() int64  { return 1 }

func (unreadable) scan(_ *decoder, lo, _ int64) error {
	if lo == 1 {
		return status.Errorf(status.IO, "x.bin: cannot be read at byte 1: input/output error")
	}
	return nil
}

// The error of a file that a rank cannot read names the rank, on all ranks.
func TestUnreadableFileNamesTheRank(t *testing.T) {
	texts := make([]string, 2)
	err := comm.RunLocal(2, func(c comm.Comm) error {
		o := opener{Options: Options{Comm: c}}
		_, _, err := o.scan([]format{unreadable{}})
		if texts[c.Rank()] = fmt.Sprint(err); status.Of(err) != status.IO {
			return fmt.Errorf("status %v", status.Of(err))
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	for rank, text := range texts {
		if !strings.HasPrefix(text, "rank 1: x.bin: cannot be read at byte 1") {
			t.Errorf("rank %d: %s", rank, text)
		}
	}
}
