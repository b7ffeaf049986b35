package model

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Fields of the configuration that have other values in a folder are named with both values.
func TestChanges(t *testing.T) {
	c := configs(t)["llama"]
	dir := t.TempDir()
	check := func(what string, want ...string) {
		t.Helper()
		if got := c.Changes(dir); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, configFile), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	check("no file")
	write("{")
	check("no JSON")
	own, err := c.JSON()
	if err != nil {
		t.Fatal(err)
	}
	write(string(own))
	check("its own file")
	write(strings.NewReplacer(`"rms_norm_eps": 1e-05`, `"made_up": {"a": 1}`, `"rope_type": "default"`,
		`"rope_type": "linear"`).Replace(string(own)))
	check("another file", `made_up of the model is not set, it was {"a":1}`,
		"rms_norm_eps of the model is 1e-05, it was not set",
		`rope_parameters of the model is {"rope_theta":10000.0,"rope_type":"default"}, it was {"rope_theta":10000.0,"rope_type":"linear"}`)
}
