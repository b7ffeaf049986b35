package plan

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/model"
)

// longPlan is a plan of an example with the optimizer in host memory.
type longPlan struct {
	example, cluster string
	device           string  // of the cluster, if it is another
	host             float64 // GiB of a node; 0 = the cluster's
	sets             []string
}

// predict plans the job.
func (p *longPlan) predict(t *testing.T) (*Forecast, *Machine, error) {
	t.Helper()
	examples := filepath.Join("..", "..", "examples")
	c, err := file.ReadCluster(filepath.Join(examples, "clusters", p.cluster+".toml"))
	if err != nil {
		t.Fatal(err)
	}
	c.Device = cmp.Or(p.device, c.Device)
	if p.host > 0 {
		c.HostMemory = p.host
	}
	path := filepath.Join(examples, p.example+".toml")
	src, err := file.Read(path)
	if err != nil {
		t.Fatal(err)
	}
	j, err := file.Parse(src, path, p.sets, nil)
	if err == nil {
		err = j.Resolve(int(c.Nodes * c.PerNode))
	}
	if err != nil {
		t.Fatal(err)
	}
	x, err := SubjectOf(j)
	if err != nil {
		t.Fatal(err)
	}
	m, err := clusterMachine(c, j, x)
	if err != nil {
		t.Fatal(err)
	}
	f, err := Predict(j, m, x, true)
	return f, m, err
}

// The job of the benchmark gpu_step fits into a GPU of 80 GB with 110 GiB of host memory.
func TestGPUStepFits(t *testing.T) {
	for _, device := range []string{"h100", "h200"} {
		p := longPlan{example: "../benchmarks/gpu-step", cluster: "h200-1", device: device, host: 110}
		if _, _, err := p.predict(t); err != nil {
			t.Errorf("%s: %v", device, err)
		}
	}
}

// Before it recomputes more, the planner gives the gated delta rule less memory. A panel that the
// job sets stays.
func TestPanelsOfAPlan(t *testing.T) {
	least := []string{"memory.block_input=offload", "memory.segment=8", "memory.attention=recompute",
		"memory.qkv=recompute", "memory.mlp=recompute", "tile.mlp=4096", "memory.head_groups=4"}
	predict := func(sets ...string) (*Forecast, error) {
		p := longPlan{example: "qwen3.5-27b", cluster: "h200-4", sets: slices.Concat(least, sets)}
		f, _, err := p.predict(t)
		return f, err
	}
	bytes := func(panel string) int64 {
		f, err := predict("tile.gdn=" + panel)
		if err != nil {
			t.Fatalf("panels of %s: %v", panel, err)
		}
		return model.Bytes(f.Memory)
	}
	long, short := bytes("16384"), bytes("4096")
	if short >= long {
		t.Fatalf("panels of 4096 tokens need %d bytes, of 16384 %d", short, long)
	}
	for limit, want := range map[int64]int64{long + 1: 16384, (long + short) / 2: 4096} {
		set := fmt.Sprintf("memory.device=%g", float64(limit)/(1<<30))
		f, err := predict(set)
		if err != nil {
			t.Fatal(err)
		}
		if got := f.Model.Tiles().GDN; got != want || model.Bytes(f.Memory) > limit {
			t.Errorf("%s: panels of %d tokens with %d bytes, want %d", set, got, model.Bytes(f.Memory), want)
		}
		if _, err := predict(set, "tile.gdn=off"); status.Of(err) != status.OutOfMemory {
			t.Errorf("%s with one panel: %v", set, err)
		}
	}
}

// The plans of long sequences with an optimizer in host memory fit, and docs/plan.md has their
// memory by rank and by host.
func TestTableOfLongPlans(t *testing.T) {
	const gib = 1 << 30
	var text strings.Builder
	text.WriteString("| example | tokens | GPUs | weights | gradients | optimizer | activations | device, of | host of a rank: gradients | optimizer | activations | host of a node, of | s a step |\n|" +
		strings.Repeat("---|", 13) + "\n")
	for _, p := range []longPlan{
		{example: "qwen3.5-27b", cluster: "h200-4"},
		{example: "llama-8b-one-gpu", cluster: "h200-1"},
		{example: "llama-8b-one-gpu", cluster: "h200-1", host: 110,
			sets: []string{"data.sequence=655360", "memory.gradients=device", "memory.device=136", "memory.host=110"}},
		{example: "llama-70b", cluster: "h200-64"},
	} {
		f, m, err := p.predict(t)
		if err != nil {
			t.Errorf("%+v: %v", p, err)
			continue
		}
		node := f.HostOfNode()
		sums := map[string]int64{}
		for _, c := range f.Memory {
			kind := "activations"
			for _, word := range []string{"weights", "gradients", "moments"} {
				if strings.Contains(c.Name, word) {
					kind = word
				}
			}
			if kind == "moments" || strings.HasPrefix(c.Name, "master weights") {
				kind = "optimizer"
			}
			sums[fmt.Sprint(kind, c.Host)] += c.Bytes
		}
		device, host := model.Bytes(f.Memory), model.HostBytes(f.Memory)
		if sum := sums["weightsfalse"] + sums["gradientsfalse"] + sums["optimizerfalse"] +
			sums["activationsfalse"]; sum != device || device > m.Info.Memory || host*int64(node.Ranks) > node.Free {
			t.Errorf("%+v: %d bytes of the device, by kind %d, and %d of the host", p, device, sum, host)
		}
		in := func(bytes int64) string { return fmt.Sprintf("%.1f", float64(bytes)/gib) }
		fmt.Fprintf(&text, "| %s | %d | %d | %s | %s | %s | %s | %s of %s | %s | %s | %s | %s of %s | %.4g |\n",
			p.example, f.Job.Data.Sequence, f.Job.Mesh.World, in(sums["weightsfalse"]), in(sums["gradientsfalse"]),
			in(sums["optimizerfalse"]), in(sums["activationsfalse"]), in(device), in(m.Info.Memory),
			in(sums["gradientstrue"]), in(sums["optimizertrue"]+sums["weightstrue"]), in(sums["activationstrue"]),
			in(host*int64(node.Ranks)), in(node.Free), f.Seconds)
		f.Close()
	}
	checkTable(t, "long plans", text.String())
}

// A plan that exceeds the memory of a host is refused with the memory of a rank and of the host, of
// whichever kind the excess is.
func TestHostOfANodeIsTooSmall(t *testing.T) {
	for _, c := range []struct {
		longPlan
		want []string
	}{
		{longPlan{example: "llama-8b-one-gpu", cluster: "h200-1", host: 110},
			[]string{"122564.1 MiB of host memory", "112640.0 MiB", "gradients, shard (host)", "use more nodes"}},
		{longPlan{example: "qwen3.5-27b", cluster: "h200-4", host: 256},
			[]string{"the host has 256.0 GiB free for 4 ranks, for each 65536.0 MiB", "(host)"}},
		{longPlan{example: "qwen3.5-27b", cluster: "h200-4", host: 400,
			sets: []string{"memory.block_input=offload", "memory.segment=1"}},
			[]string{"the host has 400.0 GiB free for 4 ranks", "offloaded activations (host)"}},
	} {
		_, _, err := c.predict(t)
		if status.Of(err) != status.OutOfMemory {
			t.Errorf("%+v: %v", c.longPlan, err)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%+v: no %q in %v", c.longPlan, w, err)
			}
		}
	}
}
