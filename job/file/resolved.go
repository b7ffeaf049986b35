package file

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"
)

// Resolved returns the job that was run as the text of a job file: the keys of the file and of
// --set, and the values that the program has chosen. steps is the number of steps of the run. Paths
// without variables are relative to the folder in which the program was started.
func (j *Job) Resolved(steps int64) string {
	m := &j.Mesh
	chosen := map[string]any{}
	if j.Parallel.Ulysses != m.Ulysses {
		chosen["parallel.ulysses"] = m.Ulysses
	}
	if m.Ring > 1 && j.Parallel.Ring != m.Ring {
		chosen["parallel.ring"] = m.Ring
	}
	if m.Ring > 2 && j.Parallel.Gather == "auto" {
		chosen["parallel.gather"] = map[bool]string{false: "off", true: "on"}[m.Gather]
	}
	if j.Data.GlobalBatch > 0 || j.accumulate > j.Data.Accumulate {
		chosen["data.accumulate"] = j.Data.Accumulate
	}
	if !j.IsSet("data.tokenizer") {
		chosen["data.tokenizer"] = j.valueShown(byKey["data.tokenizer"])
	}
	if j.Kind == "train" && j.Train.Epochs > 0 {
		chosen["train.steps"] = steps
	}
	return WithoutLogins(j.resolved(chosen))
}

func (j *Job) resolved(chosen map[string]any) string {
	var text strings.Builder
	table := ""
	line := func(key toml.Key, value any, note string) {
		if note == "" && j.at[key.String()].arg {
			note = "by --set"
		}
		if note != "" {
			note = "  # " + note
		}
		fmt.Fprintf(&text, "%s = %s%s\n", toml.Key{key[len(key)-1]}, TOML(value), note)
	}
	header := func(name string) {
		if name != table {
			fmt.Fprintf(&text, "\n[%s]\n", name)
		}
		table = name
	}
	for i := range schema {
		f := &schema[i]
		choice, isChosen := chosen[f.key]
		if !isChosen && !j.IsSet(f.key) {
			continue
		}
		key := toml.Key(strings.Split(f.key, "."))
		fields, free := j.valueShown(f).(map[string]any)
		if free {
			header(f.key)
			for _, name := range slices.Sorted(maps.Keys(fields)) {
				line(append(slices.Clone(key), name), fields[name], "")
			}
			continue
		}
		header(strings.Join(key[:len(key)-1], "."))
		switch o := j.at[f.key]; {
		case !isChosen:
			line(key, j.valueShown(f), "")
		case !j.IsSet(f.key):
			line(key, choice, "chosen by the program")
		case o.arg:
			line(key, choice, "chosen by the program: --set has "+TOML(j.valueShown(f)))
		default:
			line(key, choice, "chosen by the program: the file has "+TOML(j.valueShown(f)))
		}
	}
	return strings.TrimPrefix(text.String(), "\n")
}
