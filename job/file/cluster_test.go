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

// A cluster file is refused as a job file is if it has keys that are nested too deep, a key that
// contradicts an earlier line, or a number or a list of tables in the place of the table [rates].
func TestClusterFaults(t *testing.T) {
	for src, want := range map[string]string{
		"nodes = 1\n" + strings.Repeat("a.", 100_000) + "a = 1": "c.toml:2: keys or values are nested more than 50 levels deep",
		"nodes = 1\nrates.memory = 1\nrates = 2\n":              "c.toml",
		"nodes = 1\nrates = 2\n":                                "c.toml:2: rates = 2: rates is a table; write [rates] and its keys below",
		"nodes = 1\n[[rates]]\nmemory = 2\n":                    "c.toml:2: rates: one table is needed; write [rates], not [[rates]]",
	} {
		_, err := parseCluster(src, "c.toml")
		if status.Of(err) != status.InvalidConfig || !strings.Contains(err.Error(), want) {
			t.Errorf("%.50s: %v, want %s", src, err, want)
		}
	}
}
