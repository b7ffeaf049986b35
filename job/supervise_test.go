package job

import (
	"strings"
	"testing"

	"ulysses/job/file"
)

// A job that starts again on fewer ranks keeps the sequences of a step, also if they follow from
// the number of replicas: its checkpoints are of that number. The number of ranks among which
// experts are divided becomes one that divides both the ranks and the experts.
func TestFewerRanks(t *testing.T) {
	const open = "--set parallel.ulysses=0 --set parallel.ring=0"
	const src = "[model.new]\nmodel_type = \"llama\"\nhidden_size = 8\nintermediate_size = 8\nnum_hidden_layers = 1\n" +
		"num_attention_heads = 4\nvocab_size = 9\n[data]\npath = \"a.txt\"\n"
	for sets, want := range map[string]string{
		"":                   open,
		"parallel.ulysses=8": open,
		"parallel.ulysses=2": open + " --set data.global_batch=4",
		"parallel.ulysses=2 parallel.ring=2 data.batch=3 data.accumulate=5": open + " --set data.global_batch=30",
		"parallel.ulysses=2 data.global_batch=8":                            open,
		"parallel.ring=2 data.accumulate=3":                                 open,
		"parallel.ulysses=3":                                                open, // such a job is refused
		"parallel.ulysses=8 parallel.experts=8":                             open + " --set parallel.experts=2",
		"parallel.experts=2":                                                open,
	} {
		j, err := file.Parse([]byte(src), "job.toml", strings.Fields(sets), nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(onFewer(j)(8, 6), " "); got != want {
			t.Errorf("%s: %s, want %s", sets, got, want)
		}
		if got := strings.Join(onFewer(j)(0, 0), " "); got != open {
			t.Errorf("%s, of an unknown number of ranks: %s", sets, got)
		}
	}
}
