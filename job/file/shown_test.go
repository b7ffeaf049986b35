package file

import (
	"strings"
	"testing"
)

// The value of a variable is replaced in paths alone. In other keys it is a word of the user, and
// the job file of the report must be the one that was run.
func TestVariableInOtherKeys(t *testing.T) {
	j, err := Parse([]byte("kind = \"train\"\n"+base), "job.toml",
		[]string{"data.path=${SPLIT}/a.txt", "eval.path=${SPLIT}/b.txt", "eval.sample=the train to"},
		func(string) (string, bool) { return "train", true })
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"kind": `"train"`, "eval.sample": `["the train to"]`, "data.path": `["${SPLIT}/a.txt"]`}
	for _, kv := range j.Keys() {
		if value, ok := want[kv.Key]; ok && kv.Value != value {
			t.Errorf("%s = %s, want %s", kv.Key, kv.Value, value)
		}
	}
	if text := j.Resolved(1); !strings.HasPrefix(text, "kind = \"train\"\n") {
		t.Errorf("the resolved job:\n%s", text)
	}
}

// A date in a table without fixed keys is written as TOML has it.
func TestDateInTable(t *testing.T) {
	for _, date := range []string{"2024-01-31", "2024-01-31T08:30:00Z", "08:30:00"} {
		j, err := parse(base, "model.new.transformers_version="+date)
		if err != nil {
			t.Fatal(err)
		}
		if text := j.Resolved(1); !strings.Contains(text, "transformers_version = "+date+"  # by --set\n") {
			t.Errorf("%s: %s", date, text)
		}
	}
}
