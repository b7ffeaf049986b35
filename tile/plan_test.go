package tile

import (
	"fmt"
	"math"
	"testing"

	"ulysses/comm"
	"ulysses/internal/status"
)

// Tiles have all rows once, in order, none longer than requested; empty tiles are the last ones.
func TestBounds(t *testing.T) {
	for rows := int64(0); rows < 40; rows++ {
		for most := rows; most < rows+9; most += 4 {
			for _, n := range []int64{0, 1, 2, 3, 7, 39, 40, 1000, math.MaxInt64} {
				p, err := NewPlan(rows, n, most)
				if err != nil {
					t.Fatal(err)
				}
				at := int64(0)
				for i := range p.Count {
					lo, hi := p.Bounds(i)
					if lo != at || hi < lo || n > 0 && hi-lo > n || hi-lo > MaxTileRows(rows, n) || hi-lo > p.Step() ||
						hi > lo && i > 0 && lo != i*p.Step() {
						t.Fatalf("%d rows of %d by %d: tile %d of %d is [%d, %d) behind %d", rows, most, n, i, p.Count,
							lo, hi, at)
					}
					at = hi
				}
				if at != rows || p.Count < 1 {
					t.Fatalf("%d rows of %d by %d: %d tiles end at %d", rows, most, n, p.Count, at)
				}
			}
		}
	}
}

// Lengths that earlier implementations computed wrongly: five rows in four tiles, and fewer tiles
// with rows than planned.
func TestKnownLengths(t *testing.T) {
	for _, x := range []struct {
		rows, tile, most, count int64
		want                    string
	}{
		{5, 2, 8, 4, "2 2 1 0"},
		{125, 32, 125, 4, "32 32 32 29"},
		{425, 213, 425, 2, "213 212"},
		{0, 3, 6, 2, "0 0"},
		{7, 0, 9, 1, "7"},
		{0, 0, 0, 1, "0"},
	} {
		p, err := NewPlan(x.rows, x.tile, x.most)
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		for i := range p.Count {
			lo, hi := p.Bounds(i)
			got += fmt.Sprint(hi-lo, " ")
		}
		if p.Count != x.count || got != x.want+" " {
			t.Errorf("%d rows of %d by %d: %d tiles of %s, want %d of %s", x.rows, x.most, x.tile, p.Count, got,
				x.count, x.want)
		}
	}
	p, _ := NewPlan(300, 2, 512)
	if p.Count != 256 {
		t.Errorf("300 rows where another rank has 512: %d tiles, want 256 as there", p.Count)
	}
}

// MaxTileRows of the longest batch is enough for shorter batches, whose tiles may be longer.
func TestMaxTileRows(t *testing.T) {
	long, _ := NewPlan(1025, 1024, 0)
	short, _ := NewPlan(1024, 1024, 0)
	if long.Step() >= short.Step() || MaxTileRows(1025, 1024) < short.Step() {
		t.Errorf("steps %d and %d, room %d", long.Step(), short.Step(), MaxTileRows(1025, 1024))
	}
}

// Ranks agree on the number of tiles and on errors.
func TestAgree(t *testing.T) {
	rows := []int64{9, 0, 31, 4}
	err := comm.RunLocal(4, func(c comm.Comm) error {
		p, err := Agree(c, rows[c.Rank()], 4)
		if err != nil || p != (Plan{rows[c.Rank()], 8}) {
			t.Errorf("rank %d: %v, %v", c.Rank(), p, err)
		}
		if _, err = Agree(c, rows[c.Rank()], int64(4+c.Rank()/3)); status.Of(err) == status.OK {
			t.Errorf("rank %d: tiles of 4 and of 5 rows go together", c.Rank())
		}
		if _, err = Agree(c, rows[c.Rank()]-1, 4); status.Of(err) != status.InvalidArgument {
			t.Errorf("rank %d: a rank with -1 rows: %v", c.Rank(), err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range [][3]int64{{-1, 1, 0}, {1, -1, 0}, {5, 1, 4}} {
		if _, err := NewPlan(x[0], x[1], x[2]); status.Of(err) != status.InvalidArgument {
			t.Errorf("%v: %v", x, err)
		}
	}
}
