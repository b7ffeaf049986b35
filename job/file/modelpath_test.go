package file

import (
	"strings"
	"testing"
)

// A fault of a field of the model names the line, or the --set, that gave this field.
func TestOriginOfModelFaults(t *testing.T) {
	const src = `[data]
path = ["a.txt"]
[model.override]
truncate = false
[model.new]
head_dim = 7
model_type = "llama"
vocab_size = 256
hidden_size = 8
intermediate_size = 8
num_hidden_layers = 1
num_attention_heads = 2
`
	for sets, want := range map[string]string{
		"model.new.head_dim=4":                              "jobs/job.toml:4: model.override: truncate: unknown field",
		"model.new.rope_theta=300.0":                        "jobs/job.toml:6: model.new: head_dim = 7 is odd",
		"model.new.head_dim=4 model.override.truncate=true": "--set model.override.truncate=true: model.override: truncate: unknown field",
	} {
		j, err := parse(src, strings.Fields(sets)...)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := j.ReadConfig(); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: %v, want %s", sets, err, want)
		}
	}
}
