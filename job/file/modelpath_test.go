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
		"model.new.head_dim=4 model.override={head_dim=3}":  "--set model.override={head_dim=3}: model.override: head_dim = 3 is odd",
		"model.new.head_dim=4 model.override.truncate=true": "--set model.override.truncate=true: model.override: truncate: unknown field",
	} {
		if _, err := parse(src, strings.Fields(sets)...); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: %v, want %s", sets, err, want)
		}
	}
}

// Faults of [model.new] are reported together with the faults of other tables, each with its line.
func TestModelFaultsAmongOthers(t *testing.T) {
	_, err := parse(`[data]
path = ["a.txt"]
sequenc = 48
[model.new]
model_type = "llama"
vocab_size = -1
hiden_size = 8
intermediate_size = 8
num_hidden_layers = 1
num_attention_heads = "2"
[optimizer]
lr = "x"
`)
	for _, want := range []string{"toml:3: data.sequenc: ", "toml:4: model.new: hidden_size is missing",
		"toml:6: model.new: vocab_size = -1: ", "toml:7: model.new: hiden_size: unknown field; did you mean",
		`toml:10: model.new: num_attention_heads = "2": `, "toml:12: optimizer.lr = "} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: want %s", err, want)
		}
	}
}
