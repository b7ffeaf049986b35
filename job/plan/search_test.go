package plan

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/job/file"
)

// A job that is not possible on any mesh has the error, and no table.
func TestSearchFails(t *testing.T) {
	sets := []string{`train.freeze=["nothing"]`, "data.sequence=4096"}
	_, x := parsed(t, llama8B, sets...)
	parse := func(more ...string) (*file.Job, error) {
		return file.Parse([]byte(llama8B), "job.toml", append(slices.Clone(sets), more...), nil)
	}
	var out strings.Builder
	if err := search(&out, parse, 4, h200s(8), x); status.Of(err) != status.InvalidConfig ||
		!strings.Contains(err.Error(), `"nothing" matches no parameter`) || out.Len() > 0 {
		t.Errorf("%v\n%s", err, out.String())
	}
}

// On a slow network, search leaves out meshes whose estimates are more than three times the best
// of those that fit, and says how many. Where all meshes are near, it plans all of them.
func TestSearchLeavesSlowMeshesOut(t *testing.T) {
	const tiny = `
[model.new]
model_type = "llama"
vocab_size = 256
hidden_size = 512
intermediate_size = 512
num_hidden_layers = 1
num_attention_heads = 8
num_key_value_heads = 8
head_dim = 64
[data]
path = ["a.txt"]
sequence = 1024
[parallel]
zero = 1
`
	_, x := parsed(t, tiny)
	parse := func(sets ...string) (*file.Job, error) {
		return file.Parse([]byte(tiny), "job.toml", sets, os.LookupEnv)
	}
	for _, c := range []struct {
		network float64 // bytes/s
		left    bool
	}{{1e15, false}, {1e7, true}} {
		m := h200s(1)
		m.Rates.Network, m.Rates.Latency = c.network, 1e-9
		var out strings.Builder
		if err := search(&out, parse, 8, m, x); err != nil {
			t.Fatal(err)
		}
		text := out.String()
		if !strings.HasPrefix(text, "8 ranks, 1 a node: ") {
			t.Errorf("the header is %.40q", text)
		}
		left, of := 0, 0
		if at := strings.LastIndex(strings.TrimSpace(text), "\n"); c.left {
			if _, err := fmt.Sscanf(text[at+1:], "%d of %d meshes are left out", &left, &of); err != nil {
				t.Errorf("%v in\n%s", err, text)
			}
		}
		all := len(meshes(mustParse(t, parse), 8, m, x))
		if named := strings.Contains(text, "left out"); named != c.left || c.left && (left < 1 || of != all) {
			t.Errorf("network %v: %d of %d meshes are left out, %d are possible:\n%s", c.network, left, of, all, text)
		}
		if !strings.Contains(text, "MiB  ") { // as the memory of a tiny model is shown
			t.Errorf("network %v: no memory in MiB:\n%s", c.network, text)
		}
		if shown := tableRows(text); shown != all-left {
			t.Errorf("network %v: %d meshes are shown, want %d - %d:\n%s", c.network, shown, all, left, text)
		}
		// replicas send only gradients, so they are the fastest
		if !strings.Contains(strings.Join(strings.Fields(text), " "), "longest sequence 1 1 8 1 ") {
			t.Errorf("network %v: the mesh of replicas is not the first:\n%s", c.network, text)
		}
	}
}

func mustParse(t *testing.T, parse func(sets ...string) (*file.Job, error)) *file.Job {
	t.Helper()
	j, err := parse()
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// tableRows returns the number of meshes in the table of search.
func tableRows(text string) int {
	_, table, _ := strings.Cut(text, "longest sequence")
	_, table, _ = strings.Cut(table, "\n")
	rows, _, _ := strings.Cut(table, "\n\n")
	return strings.Count(strings.TrimSpace(rows), "\n") + 1
}

// In models with experts, search also divides the experts, among as many ranks as possible, unless
// the job says among how many. Where the weights of experts are large, that is faster than to
// gather them.
func TestSearchDividesExperts(t *testing.T) {
	const moe = `
[model.new]
model_type = "qwen3_moe"
vocab_size = 1000
hidden_size = 1024
intermediate_size = 1024
num_hidden_layers = 4
num_attention_heads = 8
num_key_value_heads = 8
head_dim = 128
num_experts = 96
num_experts_per_tok = 1
moe_intermediate_size = 2048
[data]
path = ["a.txt"]
sequence = 1024
`
	_, x := parsed(t, moe)
	for _, c := range []struct {
		sets  string
		ranks int64
		want  []int64
	}{{"", 8, []int64{0, 8}}, {"", 7, []int64{0, 7}}, {"", 1, []int64{0}},
		{"model.new.num_experts=6", 8, []int64{0, 4}}, {"parallel.experts=2", 8, []int64{2}},
		{"parallel.experts=1", 8, []int64{1}}} {
		parse := func(sets ...string) (*file.Job, error) {
			return file.Parse([]byte(moe), "job.toml", append(strings.Fields(c.sets), sets...), os.LookupEnv)
		}
		j, x := mustParse(t, parse), x
		if strings.Contains(c.sets, "num_experts") {
			_, x = parsed(t, strings.Replace(moe, "num_experts = 96", "num_experts = 6", 1))
		}
		if got := divisions(j, c.ranks, x); !slices.Equal(got, c.want) {
			t.Errorf("%s, %d ranks: %v, want %v", c.sets, c.ranks, got, c.want)
		}
	}
	parse := func(sets ...string) (*file.Job, error) {
		return file.Parse([]byte(moe), "job.toml", sets, os.LookupEnv)
	}
	for sets, want := range map[string]string{
		"parallel.zero=3":                    "data zero experts memory of a rank expected s tokens/s longest sequence 1 1 8 3 8 ",
		"parallel.zero=3 parallel.experts=1": "tokens/s longest sequence 1 1 8 3 1 "} {
		var out strings.Builder
		err := search(&out, func(more ...string) (*file.Job, error) {
			return parse(append(strings.Fields(sets), more...)...)
		}, 8, h200s(1), x)
		if text := strings.Join(strings.Fields(out.String()), " "); err != nil || !strings.Contains(text, want) {
			t.Errorf("%s: %v\n%s", sets, err, out.String())
		}
	}
}
