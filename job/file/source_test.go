package file

import (
	"reflect"
	"strings"
	"testing"

	"ulysses/data"
)

const sourceBase = "[model.new]\nmodel_type = \"llama\"\n"

// [[data.source]] has paths relative to the job file, and defaults.
func TestSources(t *testing.T) {
	job, err := Parse([]byte(sourceBase+"[data]\nsequence = 64\n[[data.source]]\npath = \"a.jsonl\"\nweight = 2\n[[data.source]]\npath = [\"/b/*.txt\", \"${X}.txt\"]\nformat = \"text\"\n"), "jobs/job.toml", nil,
		func(string) (string, bool) { return "secret", true })
	if err != nil {
		t.Fatal(err)
	}
	want := []data.SourceConfig{{Path: []string{"jobs/a.jsonl"}, Weight: 2, Format: "auto"}, {Path: []string{"/b/*.txt", "jobs/secret.txt"}, Weight: 1, Format: "text"}}
	if !reflect.DeepEqual(job.Data.Source, want) {
		t.Errorf("%+v", job.Data.Source)
	}
	for _, kv := range job.Keys() {
		if kv.Key == "data.source" && kv.Value != `[{path = ["jobs/a.jsonl"], weight = 2.0, format = "auto"}, {path = ["/b/*.txt", "jobs/${X}.txt"], weight = 1.0, format = "text"}]` {
			t.Error(kv.Value)
		}
	}
	for src, want := range map[string]string{
		"[[data.source]]\nweight = 1\n":                                 ":3: data.source.path: missing; each table [[data.source]] needs it",
		"[[data.source]]\npath = \"a.txt\"\nweight = 0\n":               ":3: data.source.weight = 0: must be above 0",
		"[[data.source]]\npath = \"a.txt\"\nwieght = 1\n":               ":3: data.source.wieght: unknown key; the keys of [[data.source]] are path, weight, format",
		"[[data.source]]\npath = \"a.txt\"\nformat = \"chatml\"\n":      `:3: data.source.format = "chatml": "auto", "text", "messages"`,
		"[data]\nsource = 3\n":                                          ":4: data.source = 3: a list of tables is needed",
		"[data]\nsource = [3]\n":                                        ":4: data.source = 3: tables are needed; write [[data.source]]",
		"[data]\npath = \"b.txt\"\n[[data.source]]\npath = \"a.txt\"\n": ":5: data.source: data.path is set as well",
		"[[data.source]]\npath = \"a.txt\"\n[eval]\nsplit = 0.1\n":      ":6: eval.split = 0.1: documents cannot be held out of data.source",
		"[[data.source]]\npath = \"http://x/a.txt\"\n":                  "data.source",
	} {
		_, err := Parse([]byte(sourceBase+src), "jobs/job.toml", nil, nil)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want %s", src, err, want)
		}
	}
}
