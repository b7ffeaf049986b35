package generate

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// The ids of config.json that end a text are a number, a list or null, at the top or in
// text_config, of which the first that is set counts.
func TestReadEnds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.json")
	for text, want := range map[string][]int32{
		`{}`:                    nil,
		`{"eos_token_id": 3}`:   {3},
		`{"eos_token_id": []}`:  nil,
		`{"text_config": null}`: nil,
		`{"eos_token_id": null, "text_config": {"eos_token_id": [4, 5]}}`: {4, 5},
		`{"eos_token_id": [1], "text_config": {"eos_token_id": 2}}`:       {1},
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		m := &Model{}
		if err := m.readEnds(path); err != nil || !slices.Equal(m.ends, want) {
			t.Errorf("%s: %v %v, want %v", text, m.ends, err, want)
		}
	}
	if err := os.WriteFile(path, []byte(`{"eos_token_id": "x"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := (&Model{}).readEnds(path); err == nil {
		t.Error("a text as an id is accepted")
	}
}
