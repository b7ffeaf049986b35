package file

import (
	"strings"
	"testing"

	"ulysses/internal/status"
)

// Numbers of ranks whose product overflows are refused.
func TestClusterRanks(t *testing.T) {
	for _, src := range []string{
		"nodes = 4294967296\nranks_per_node = 4294967296", // 2^64 ranks
		"nodes = 4611686018427387905\nranks_per_node = 4", // 2^64 + 4
		"nodes = 3037000500\nranks_per_node = 3037000500", // above 2^63
		"nodes = 1048577",
	} {
		_, err := parseCluster(src, "c.toml")
		if status.Of(err) != status.InvalidConfig || !strings.Contains(err.Error(), "too many ranks; at most 1048576") {
			t.Errorf("%s: %v", src, err)
		}
	}
	if c, err := parseCluster("nodes = 1024\nranks_per_node = 1024", "c.toml"); err != nil {
		t.Errorf("%+v, %v", c, err)
	}
}
