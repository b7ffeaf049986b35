package main

import (
	"encoding/json"
	"math"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// Flags that a suite cannot use are refused before anything is measured.
func TestFlags(t *testing.T) {
	for _, args := range []string{
		"gemm --cases none --repeat 0", "gemm --cases none --repeat -1", "ulysses --cases none --ranks 0",
		"ulysses --cases none --threads -1", "gemm --cases none 512b --repeat 1",
		"ulysses --cases none --dtype bf16", "gdn_ranks --cases none --dtype bf16", "a2a --cases none --dtype bf16",
		"overlap --cases none --dtype bf16", "levels --cases none --dtype bf16",
	} {
		if err := run(strings.Fields(args)); status.Of(err) != status.InvalidArgument {
			t.Errorf("%s: %v", args, err)
		}
	}
	for _, args := range []string{"gemm --cases none --dtype bf16", "ulysses --cases none --dtype f32"} {
		if err := run(strings.Fields(args)); err != nil {
			t.Errorf("%s: %v", args, err)
		}
	}
}

// All suites of all-to-alls run the sizes that --cases selects, and a rate is of the bytes that one
// rank sends.
func TestAllToAllSizes(t *testing.T) {
	for suite, rows := range map[string]int{"a2a": 1, "overlap": 4, "levels": 2} {
		text := printed(t, suite, "--ranks", "2", "--threads", "1", "--repeat", "1", "--cases", "6553")
		if n := strings.Count(text, "\n"); n != rows {
			t.Fatalf("%s printed %d lines:\n%s", suite, n, text)
		}
		for line := range strings.Lines(text) {
			var x struct {
				Rate float64 `json:"GB/s"`
				Min  float64 `json:"min_s"`
			}
			if err := json.Unmarshal([]byte(line), &x); err != nil {
				t.Fatal(err)
			}
			if bytes := x.Rate * x.Min * 1e9; !(math.Abs(bytes-65536) <= 1) {
				t.Errorf("%s: the rate is of %g bytes: %s", suite, bytes, line)
			}
		}
	}
}

// The median of an even number of times is the mean of the middle two, as in the peers.
func TestMedian(t *testing.T) {
	for _, x := range []struct {
		times []float64
		want  float64
	}{{[]float64{3}, 3}, {[]float64{1, 4}, 2.5}, {[]float64{1, 2, 9}, 2}, {[]float64{1, 2, 4, 8}, 3}} {
		if got := median(x.times); got != x.want {
			t.Errorf("median(%v) = %v, not %v", x.times, got, x.want)
		}
	}
}
