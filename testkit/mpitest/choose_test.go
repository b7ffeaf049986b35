package mpitest

import (
	"slices"
	"testing"
)

func TestTestsOfRanks(t *testing.T) {
	got, err := testsOfRanks("testdata")
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"TestDirect", "TestThroughHelper"}; !slices.Equal(got, want) {
		t.Errorf("tests that run on several ranks: %q, want %q", got, want)
	}
}
