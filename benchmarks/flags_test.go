package main

import (
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
