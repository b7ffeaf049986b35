package plan

import (
	"flag"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/tensor"
)

var update = flag.Bool("update", false, "write the table of docs/plan.md")

// h200s returns a machine of H200s.
func h200s(perNode int) *Machine {
	m := &Machine{Info: device.Info{Kind: "cuda", Name: "H200", Align: 256, Place: tensor.CUDA, Memory: 139 << 30,
		Compute: []tensor.DType{tensor.BF16}, TokenMajor: true},
		Sizes: noSizes{}, Rates: gpuByName["h200"].rates[tensor.BF16]}
	m.Rates.PerNode = perNode
	return m
}

// parsed returns a job with a model and its subject.
func parsed(t *testing.T, text string, sets ...string) (*file.Job, *subject) {
	t.Helper()
	j, err := file.Parse([]byte(text), "job.toml", sets, nil)
	if err != nil {
		t.Fatal(err)
	}
	c, err := j.ReadConfig()
	if err != nil {
		t.Fatal(err)
	}
	return j, SubjectOfModel(c)
}

// choose is Choose without an error.
func choose(t *testing.T, j *file.Job, world int, m *Machine, x *subject) *Choice {
	t.Helper()
	c, err := Choose(j, world, m, x)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

const hybridModel = `
[parallel]
zero = 3
[model.new]
model_type = "qwen3_5_text"
vocab_size = 32000
hidden_size = 2048
intermediate_size = 6144
num_hidden_layers = 8
num_attention_heads = 8
num_key_value_heads = 2
head_dim = 256
linear_num_key_heads = 16
linear_num_value_heads = 16
linear_key_head_dim = 128
linear_value_head_dim = 128
[data]
path = ["a.txt"]
`

// The chosen mesh takes at most 10 % longer than the best of all meshes by the dry run, over
// models, ranks, lengths, nodes and global batches.
func TestChoiceIsNearTheBest(t *testing.T) {
	small := strings.NewReplacer("num_hidden_layers = 32", "num_hidden_layers = 4", "num_attention_heads = 32",
		"num_attention_heads = 6\nhead_dim = 128", "num_key_value_heads = 8",
		"num_key_value_heads = 3").Replace(llama8B)
	for _, c := range []struct {
		name, model       string
		world, perNode    int
		sequence, batches int64
		document          int64
	}{
		{"llama", llama8B, 8, 8, 1 << 15, 1, 0}, {"llama", llama8B, 16, 8, 1 << 17, 16, 0},
		{"llama", llama8B, 64, 8, 1 << 15, 1, 0}, {"llama", llama8B, 64, 8, 1 << 20, 1, 0},
		{"llama", llama8B, 16, 2, 1 << 15, 1, 0}, {"llama", llama8B, 48, 8, 1 << 17, 6, 0},
		{"six heads", small, 12, 4, 1 << 14, 1, 0}, {"six heads", small, 32, 8, 1 << 17, 2, 0},
		{"six heads", small, 7, 8, 1 << 12, 7, 0}, {"six heads", small, 20, 1, 1 << 16, 1, 0},
		{"hybrid", hybridModel, 8, 8, 1 << 16, 1, 0}, {"hybrid", hybridModel, 32, 8, 1 << 17, 4, 0},
		{"hybrid", hybridModel, 16, 4, 1 << 12, 16, 0},
		{"llama", llama8B, 16, 1, 1 << 17, 1, 2048}, {"llama", llama8B, 64, 8, 1 << 17, 16, 1000},
		{"six heads", small, 12, 4, 1 << 15, 1, 300}, {"hybrid", hybridModel, 16, 8, 1 << 16, 1, 5000},
	} {
		name := fmt.Sprintf("%s on %d ranks, %d a node, %d x %d tokens in documents of %d", c.name, c.world, c.perNode,
			c.batches, c.sequence, c.document)
		j, x := parsed(t, c.model, fmt.Sprintf("data.sequence=%d", c.sequence),
			fmt.Sprintf("data.global_batch=%d", c.batches), fmt.Sprintf("data.document=%d", c.document))
		m := h200s(c.perNode)
		choice := choose(t, j, c.world, m, x)
		best, of := math.Inf(1), file.Mesh{}
		for _, o := range meshOptions(j, int64(c.world), m, x) {
			if err := o.plan(j, m, x); err != nil {
				t.Fatal(err)
			}
			if o.seconds < best {
				best, of = o.seconds, o.mesh
			}
		}
		if !(choice.Seconds > 0 && choice.Seconds <= 1.1*best) {
			t.Errorf("%s: %v takes %v s, and %v %v s", name, choice.Mesh, choice.Seconds, of, best)
		}
		other := *j
		other.Choose(choice.Mesh)
		if err := other.Resolve(c.world); err != nil || other.Mesh.GlobalBatch != c.batches ||
			other.Mesh.Ulysses*other.Mesh.Ring*other.Mesh.Replicas != int64(c.world) {
			t.Errorf("%s: %+v, %v", name, other.Mesh, err)
		}
	}
}

// Llama-8B at a million tokens on 64 GPUs: no rank is idle, the line has the numbers, and a second
// call makes the same choice.
func TestChoiceLeavesNoRankIdle(t *testing.T) {
	j, x := parsed(t, llama8B, "data.sequence=1048576")
	c := choose(t, j, 64, h200s(8), x)
	if x.idleHeads(&c.Mesh) != 0 || c.Mesh.Ring < 2 || c.Mesh.Replicas != 1 {
		t.Errorf("%+v", c)
	}
	for _, want := range []string{"mesh: ulysses 32 x ring 2 x data 1", "64 ranks", "32 query heads",
		"ulysses 64 would take", "with 32 ranks idle"} {
		if !strings.Contains(c.Text, want) {
			t.Errorf("%q is not in %q", want, c.Text)
		}
	}
	if again := choose(t, j, 64, h200s(8), x); *again != *c {
		t.Errorf("%+v, then %+v", c, again)
	}
}

// Short documents need less attention and send fewer keys, so another mesh is the fastest, and the
// line names them. On the other mesh a step takes longer.
func TestChoiceFollowsDocuments(t *testing.T) {
	m := h200s(8)
	var chosen []file.Mesh
	for _, document := range []string{"0", "1048576", "2048"} {
		j, x := parsed(t, llama8B, "data.sequence=1048576", "data.document="+document)
		c := choose(t, j, 64, m, x)
		if named := strings.Contains(c.Text, "in 512 documents (data.document)"); named != (document == "2048") {
			t.Errorf("documents of %s tokens: %s", document, c.Text)
		}
		chosen = append(chosen, c.Mesh)
		if document == "2048" {
			other := meshOption{mesh: chosen[0]}
			if err := other.plan(j, m, x); err != nil || !(other.seconds > nearlyBest*c.Seconds) {
				t.Errorf("%v takes %v s, %v %v s: %v", c.Mesh, c.Seconds, chosen[0], other.seconds, err)
			}
		}
	}
	if chosen[0] != chosen[1] || chosen[0] == chosen[2] {
		t.Errorf("%v", chosen)
	}
}

// A job's own degrees are kept, and replicas divide the micro-batches of a step.
func TestChoiceKeepsTheJob(t *testing.T) {
	for _, c := range []struct {
		sets string
		ok   func(m *file.Mesh) bool
	}{
		{"parallel.ring=1", func(m *file.Mesh) bool { return m.Ring == 1 && m.Replicas == 1 }},
		{"parallel.ring=4", func(m *file.Mesh) bool { return m.Ring == 4 && m.Replicas == 1 }},
		{"parallel.ulysses=4 parallel.ring=2", func(m *file.Mesh) bool {
			return m.Ulysses == 4 && m.Ring == 2 && m.Replicas == 2
		}},
		{"data.accumulate=3", func(m *file.Mesh) bool { return m.Replicas == 1 && m.GlobalBatch == 3 }},
		{"data.accumulate=4 data.batch=2", func(m *file.Mesh) bool { return m.Replicas > 1 && m.GlobalBatch == 8 }},
		{"kind=eval", func(m *file.Mesh) bool { return m.Replicas == 1 }},
	} {
		j, x := parsed(t, llama8B, append(strings.Fields(c.sets), "data.sequence=16384")...)
		m := h200s(8)
		m.Info.Memory = 0
		choice := choose(t, j, 16, m, x)
		j.Choose(choice.Mesh)
		for range 2 {
			if err := j.Resolve(16); err != nil || !c.ok(&j.Mesh) {
				t.Errorf("%s: %+v, %v: %s", c.sets, j.Mesh, err, choice.Text)
			}
		}
	}
	if j, _ := parsed(t, llama8B, "parallel.ulysses=4"); LeavesMeshOpen(j, 16) {
		t.Error("parallel.ulysses = 4 leaves the mesh open")
	}
}

// If no mesh fits, the whole sequence is on all ranks, and the line says so. The line names the
// degrees of a job that leaves only the form of its ring open.
func TestNoMeshFits(t *testing.T) {
	for _, c := range []struct {
		ranks int
		sets  []string
		want  string
	}{
		{4, nil, "mesh: ulysses 4 x data 1: no mesh of 4 ranks fits"},
		{3, []string{"parallel.ring=3"}, "mesh: ulysses 1 x ring 3 x data 1: no mesh of 3 ranks fits"},
		{12, []string{"parallel.ulysses=2", "parallel.ring=3"},
			"mesh: ulysses 2 x ring 3 x data 2: no mesh of 12 ranks fits"},
	} {
		j, x := parsed(t, llama8B, append(c.sets, "data.sequence=1048576")...)
		m := h200s(8)
		m.Info.Memory = 1 << 30
		choice := choose(t, j, c.ranks, m, x)
		j.Choose(choice.Mesh)
		if err := j.Resolve(c.ranks); err != nil || choice.Seconds != 0 || !strings.HasPrefix(choice.Text, c.want) ||
			!strings.HasPrefix(choice.Text, fmt.Sprintf("mesh: %v: ", j.Mesh)) {
			t.Errorf("%q, not %q, for %v: %v", choice.Text, c.want, j.Mesh, err)
		}
	}
}

// brokenSizes is a device that cannot tell its sizes.
type brokenSizes struct{ noSizes }

func (brokenSizes) AttentionWorkspace(*device.Attention, bool) int64 { panic("no kernel") }

// An error that does not depend on the mesh is returned as it is, and a job that is not possible on
// any mesh has the error of the mesh of all ranks.
func TestChoiceFails(t *testing.T) {
	for want, c := range map[string]struct {
		sets  []string
		world int
		spoil func(m *Machine)
		code  status.Code
	}{
		"panic: no kernel":               {nil, 4, func(m *Machine) { m.Sizes = brokenSizes{} }, status.Internal},
		"the rate of memory is 0":        {nil, 4, func(m *Machine) { m.Rates.Memory = 0 }, status.InvalidArgument},
		`"nothing" matches no parameter`: {[]string{`train.freeze=["nothing"]`}, 4, nil, status.InvalidConfig},
		"parallel.ring":                  {[]string{"parallel.ring=3"}, 4, nil, status.InvalidConfig},
		"cuda computes in bf16":          {[]string{"device.dtype=f32"}, 4, nil, status.Unsupported},
		"mesh: ulysses 4 x data 1: no":   {nil, 4, func(m *Machine) { m.Info.Memory = 1 << 30 }, status.OK},
	} {
		j, x := parsed(t, llama8B, append(c.sets, "data.sequence=4096")...)
		m := h200s(8)
		if c.spoil != nil {
			c.spoil(m)
		}
		choice, err := Choose(j, c.world, m, x)
		text := fmt.Sprint(err)
		if err == nil {
			text = choice.Text
		}
		if status.Of(err) != c.code || !strings.Contains(text, want) {
			t.Errorf("%v: %s; want %q", status.Of(err), text, want)
		}
	}
}

// The table of docs/plan.md has the choices of this program.
func TestTableOfChoices(t *testing.T) {
	var text strings.Builder
	text.WriteString("| tokens of a sequence | sequences of a step | 8 GPUs, 8 a node | 16, 8 a node | 64, 8 a node | 16, 1 a node |\n|---|---|---|---|---|---|\n")
	for _, row := range []struct {
		tokens, step int64
	}{{1 << 15, 1}, {1 << 17, 1}, {1 << 20, 1}, {1 << 15, 64}, {1 << 17, 64}} {
		fmt.Fprintf(&text, "| %d | %d |", row.tokens, row.step)
		for _, on := range [][2]int{{8, 8}, {16, 8}, {64, 8}, {16, 1}} {
			j, x := parsed(t, llama8B, fmt.Sprintf("data.sequence=%d", row.tokens),
				fmt.Sprintf("data.global_batch=%d", row.step))
			c := choose(t, j, on[0], h200s(on[1]), x)
			fmt.Fprintf(&text, " %d × %d × %d, %.3g s |", c.Mesh.Ulysses, c.Mesh.Ring, c.Mesh.Replicas, c.Seconds)
		}
		text.WriteString("\n")
	}
	checkTable(t, "choices", text.String())
}

// checkTable compares a table of docs/plan.md, which is between two comments, with its text. With
// -update it writes the text.
func checkTable(t *testing.T, name, want string) {
	t.Helper()
	begin, end, path := "<!-- "+name+": begin -->\n", "<!-- "+name+": end -->", "../../docs/plan.md"
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(page), begin)
	shown, after, also := strings.Cut(rest, end)
	if !ok || !also {
		t.Fatalf("docs/plan.md has no table of %s", name)
	}
	if shown == want {
		return
	}
	if !*update {
		t.Fatalf("the table of docs/plan.md is\n%swant\n%srun go test ./job/plan -run %s -update", shown, want,
			t.Name())
	}
	if err := os.WriteFile(path, []byte(before+begin+want+end+after), 0o600); err != nil {
		t.Fatal(err)
	}
}

// The line of a choice says why a mesh with a shorter planned time was not chosen.
func TestVersus(t *testing.T) {
	for _, x := range []struct {
		seconds, chosen float64
		nominal         bool
		want            string
	}{
		{math.Inf(1), 2, false, "; ring does not fit"},
		{3, 2, false, ", ring would take 3 s"},
		{3, 2, true, "; ring would take 1.50 times as long"},
		{1.96, 2, false, ", ring would take 1.96 s, within the error of a plan"},
		{1.96, 2, true, "; ring would take 0.98 times as long, within the error of a plan"},
	} {
		if got := versus("ring", x.seconds, x.chosen, x.nominal); got != x.want {
			t.Errorf("%+v: %q", x, got)
		}
	}
}
