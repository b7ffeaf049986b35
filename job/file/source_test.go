package file

import (
	"reflect"
	"strings"
	"testing"

	"ulysses/data"
)

const sourceBase = "[model]\nnew = " + newModel + "\n"

// [[data.source]] has paths relative to the job file, and defaults.
func TestSources(t *testing.T) {
	job, err := Parse([]byte(sourceBase+
		"[data]\nsequence = 64\n[[data.source]]\npath = \"a.jsonl\"\nweight = 2\n[[data.source]]\npath = [\"/b/*.txt\", \"${X}.txt\"]\nformat = \"text\"\n"),
		"jobs/job.toml", nil,
		func(string) (string, bool) { return "secret", true })
	if err != nil {
		t.Fatal(err)
	}
	want := []data.SourceConfig{{Path: []string{"jobs/a.jsonl"}, Weight: 2, Format: "auto"},
		{Path: []string{"/b/*.txt", "jobs/secret.txt"}, Weight: 1, Format: "text"}}
	if !reflect.DeepEqual(job.Data.Source, want) {
		t.Errorf("%+v", job.Data.Source)
	}
	for _, kv := range job.Keys() {
		if kv.Key == "data.source" &&
			kv.Value != `[{path = ["jobs/a.jsonl"], weight = 2.0, format = "auto"}, {path = ["/b/*.txt", "jobs/${X}.txt"], weight = 1.0, format = "text"}]` {
			t.Error(kv.Value)
		}
	}
	for src, want := range map[string]string{
		"[[data.source]]\nweight = 1\n":                                                            ":3: data.source.path: missing; each table [[data.source]] needs it",
		"[[data.source]]\npath = \"b.txt\"\n[[data.source]]\npath = []\n":                          ":3: data.source: a table has an empty path; name its files",
		"[[data.source]]\npath = \"a.txt\"\nweight = 0\n":                                          ":3: data.source.weight = 0: must be above 0",
		"[[data.source]]\npath = \"a.txt\"\n[[data.source]]\npath = \"b.txt\"\nweight = 1.5e308\n": ":3: data.source.weight = 1.5e+308: must be at most 1e300",
		"[[data.source]]\npath = \"a.txt\"\nwieght = 1\n":                                          ":3: data.source.wieght: unknown key; the keys of [[data.source]] are path, weight, format",
		"[[data.source]]\npath = \"a.txt\"\nformat = \"chatml\"\n":                                 `:3: data.source.format = "chatml": "auto", "text", "messages"`,
		"[data]\nsource = 3\n":                                                                     ":4: data.source = 3: a list of tables is needed",
		"[data]\nsource = [3]\n":                                                                   ":4: data.source = 3: tables are needed; write [[data.source]]",
		"[data]\npath = \"b.txt\"\n[[data.source]]\npath = \"a.txt\"\n":                            ":5: data.source: data.path is set as well",
		"[[data.source]]\npath = \"a.txt\"\n[eval]\nsplit = 0.1\n":                                 ":6: eval.split = 0.1: documents cannot be held out of data.source",
		"[[data.source]]\npath = \"http://x/a.txt\"\n":                                             "data.source",
	} {
		_, err := Parse([]byte(sourceBase+src), "jobs/job.toml", nil, nil)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "data.path: missing") {
			t.Errorf("%q: %v; want %s", src, err, want)
		}
	}
}

// [[eval.set]] has paths relative to the job file, and names that are keys of metrics.jsonl.
func TestEvalSets(t *testing.T) {
	const train = sourceBase + "[data]\npath = \"t.txt\"\n"
	job, err := Parse([]byte(train+
		"[[eval.set]]\nname = \"a.b-1\"\npath = \"a.jsonl\"\n[[eval.set]]\nname = \"c\"\npath = [\"/b/*.txt\", \"${X}.txt\"]\nformat = \"text\"\n[eval]\nevery = 2\nmetric = \"c\"\npatience = 1\n"),
		"jobs/job.toml", nil,
		func(string) (string, bool) { return "secret", true })
	if err != nil {
		t.Fatal(err)
	}
	want := []data.EvalSetConfig{{Name: "a.b-1", Path: []string{"jobs/a.jsonl"}, Format: "auto"},
		{Name: "c", Path: []string{"/b/*.txt", "jobs/secret.txt"}, Format: "text"}}
	if !reflect.DeepEqual(job.Eval.Set, want) || !job.Tracks() {
		t.Errorf("%+v", job.Eval.Set)
	}
	for _, kv := range job.Keys() {
		if kv.Key == "eval.set" &&
			kv.Value != `[{name = "a.b-1", path = ["jobs/a.jsonl"], format = "auto"}, {name = "c", path = ["/b/*.txt", "jobs/${X}.txt"], format = "text"}]` {
			t.Error(kv.Value)
		}
	}
	const one = "[[eval.set]]\nname = \"a\"\npath = \"a.txt\"\n"
	for src, want := range map[string]string{
		"[[eval.set]]\npath = \"a.txt\"\n":                 ":5: eval.set.name: missing; each table [[eval.set]] needs it",
		"[[eval.set]]\nname = \"a\"\n":                     ":5: eval.set.path: missing",
		"[[eval.set]]\nname = \"a/b\"\npath = \"a.txt\"\n": ":5: eval.set: each table needs a name of its own, of letters, digits",
		one + "[[eval.set]]\nname = \"b\"\npath = []\n":    ":5: eval.set: a table has an empty path; name its files",
		one + one:                           ":5: eval.set: each table needs a name of its own",
		one + "[eval]\npath = \"b.txt\"\n":  ":5: eval.set: set together with eval.path or eval.split",
		one + "[eval]\nsplit = 0.1\n":       ":5: eval.set: set together with eval.path or eval.split",
		one + "[eval]\nmetric = \"b\"\n":    `:9: eval.metric = "b": no table [[eval.set]] has this name`,
		one + "[eval]\npatience = 2\n":      ":9: eval.patience = 2: there are no evaluations during the run; set eval.every",
		"[eval]\nevery = 3\npatience = 2\n": "eval.patience = 2: there are no evaluations during the run",
		one + "[checkpoint]\nbest = true\n": ":9: checkpoint.best = true: there are no evaluations during the run; set eval.every",
		one + "[eval]\npatience = -1\n":     "eval.patience = -1: must be at least 0",
		one + "[eval]\nthreshold = -0.5\n":  "eval.threshold = -0.5: must be at least 0",
	} {
		_, err := Parse([]byte(train+src), "jobs/job.toml", nil, nil)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want %s", src, err, want)
		}
	}
}
