package job

import (
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"ulysses/device"
	"ulysses/dryrun"
	"ulysses/internal/proc"
	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/job/plan"
	"ulysses/testkit/cudatest"
)

// toPlan has jobs on one long text, with heads that the ranks do not divide.
var toPlan = map[string]string{
	"llama": `
model_type = "llama"
num_attention_heads = 6
num_key_value_heads = 3
`,
	"hybrid": `
model_type = "qwen3_5_text"
full_attention_interval = 2
num_attention_heads = 4
num_key_value_heads = 2
linear_num_key_heads = 2
linear_num_value_heads = 6
linear_key_head_dim = 16
linear_value_head_dim = 24
`,
	// a plan assumes that all experts are chosen equally: each token chooses all
	"moe": `
model_type = "qwen3_moe"
num_attention_heads = 4
num_key_value_heads = 2
num_experts = 5
num_experts_per_tok = 5
moe_intermediate_size = 24
output_router_logits = true
`,
}

func planned(t *testing.T, kind string) string {
	t.Helper()
	dir := t.TempDir()
	text := filepath.Join(dir, "a.txt")
	if err := os.WriteFile(text, []byte(strings.Repeat("all work and no play. ", 400)), 0o600); err != nil {
		t.Fatal(err)
	}
	records := filepath.Join(dir, "a.jsonl")
	if err := os.WriteFile(records,
		[]byte(strings.Repeat(`{"text": "`+strings.Repeat("all work and no play. ", 4)+"\"}\n", 5)),
		0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("RECORDS", records)
	path := filepath.Join(dir, "job.toml")
	job := fmt.Sprintf("[device]\nbackend = \"cpu\"\nthreads = 1\n[data]\npath = [%q]\nsequence = 70\n[optimizer]\nwarmup = 1\n[train]\nsteps = 2\n[output]\ndir = %q\n[model.new]\n%s"+
		"vocab_size = 256\nhidden_size = 48\nintermediate_size = 80\nnum_hidden_layers = 3\nhead_dim = 16\n", text, dir,
		toPlan[kind])
	if err := os.WriteFile(path, []byte(job), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// anyMachine is a machine with arbitrary rates and the device's sizes.
func anyMachine(d device.Device, perNode int) *plan.Machine {
	return &plan.Machine{Info: d.Info(), Sizes: d, Host: proc.FreeMemory(),
		Rates: dryrun.Rates{Products: 1e9, Attention: 1e9, Gradient: 1e9, Delta: 1e9, Memory: 1e9, Copies: 1e9,
			Node: 1e9, Network: 1e9, PerNode: perNode}}
}

// The plan of each rank has the run's memory by component and the bytes sent in a step by axis and
// operation, on every mesh, ZeRO stage and type, with accumulation and with recomputed activations.
func TestPlanIsTheRun(t *testing.T) {
	for _, c := range []struct {
		kind  string
		ranks int
		sets  string
	}{
		{"llama", 1, ""}, {"llama", 2, "parallel.zero=1"}, {"llama", 3, "parallel.zero=3"},
		{"llama", 4, "parallel.ulysses=4"}, {"llama", 7, ""},
		{"llama", 4, "parallel.ulysses=2 parallel.zero=2 data.accumulate=3"},
		{"llama", 4, "parallel.ulysses=1 parallel.zero=3 data.batch=2"},
		{"llama", 2, "device.dtype=bf16 parallel.zero=3 memory.attention=recompute memory.block_input=recompute"},
		{"llama", 2, "memory.mlp=offload memory.qkv=offload memory.host=1 data.accumulate=2"},
		{"llama", 3, "optimizer.name=sgd memory.head_groups=3 memory.qkv=recompute"},
		{"llama", 2, "checkpoint.every=1 tile.mlp=16 tile.loss=off"},
		{"llama", 4, "parallel.ulysses=2 parallel.ring=2"},
		{"llama", 3, "parallel.ulysses=1 parallel.ring=3 parallel.zero=3"},
		{"llama", 3, "parallel.ulysses=1 parallel.ring=3 parallel.gather=on"},
		{"llama", 3, "data.document=9 parallel.zero=3"},
		// three sequences in an evaluation, one in a step
		{"llama", 2, "data.pack=false data.budget=210 eval.path=${RECORDS} parallel.ulysses=2"},
		{"llama", 2, `model.new.rope_scaling={rope_type="dynamic",factor=2.0}`},
		{"hybrid", 1, "device.dtype=bf16"}, {"hybrid", 2, "parallel.zero=3"}, {"hybrid", 4, "gdn.strategy=heads"},
		{"hybrid", 4, "gdn.strategy=state parallel.zero=2"},
		{"hybrid", 4, "parallel.ulysses=2 data.accumulate=2"}, {"hybrid", 4, "parallel.ulysses=2 parallel.ring=2"},
		{"moe", 3, "parallel.zero=2"}, {"moe", 4, "parallel.experts=2 parallel.zero=3"},
		{"moe", 4, "parallel.experts=4 parallel.ulysses=2 device.dtype=bf16 parallel.zero=1"},
		{"moe", 3, "parallel.experts=3 parallel.ulysses=1 data.accumulate=2 memory.mlp=recompute memory.qkv=recompute memory.segment=2"},
		{"moe", 2, "parallel.experts=2 tile.mlp=8 checkpoint.every=1"},
	} {
		planIsTheRun(t, c.kind, c.ranks, c.sets)
	}
}

// The plan of an optimizer in host memory is the run's, on the plug-in.
func TestPlanOfOffloadedOptimizerIsTheRun(t *testing.T) {
	cudatest.Use(t)
	for _, c := range []struct {
		kind  string
		ranks int
		sets  string
	}{
		{"llama", 1, "memory.optimizer=host memory.gradients=offload data.accumulate=2"},
		{"llama", 3, "memory.optimizer=stream parallel.zero=1"},
		{"hybrid", 4, "memory.optimizer=host memory.gradients=offload parallel.zero=3 parallel.ulysses=2 parallel.ring=2 gdn.strategy=state memory.mlp=offload"},
		{"llama", 2, "memory.optimizer=stream memory.gradients=offload parallel.zero=2 optimizer.name=sgd checkpoint.every=1"},
		{"moe", 4, "memory.optimizer=stream parallel.zero=1 parallel.experts=2"},
	} {
		planIsTheRun(t, c.kind, c.ranks, "device.backend=cuda device.dtype=bf16 "+c.sets)
	}
}

// planIsTheRun compares the plan of each rank with two steps of the run.
func planIsTheRun(t *testing.T, kind string, ranks int, sets string) {
	t.Helper()
	name := fmt.Sprintf("%s on %d, %s", kind, ranks, sets)
	path := planned(t, kind)
	var mu sync.Mutex
	err := onRanks(Options{Path: path, Sets: strings.Fields(sets), Ranks: ranks, Stdout: io.Discard,
		Stderr: io.Discard}, func(e *Env) error {
		s, err := prepare(e, true)
		if err != nil {
			return err
		}
		defer s.close()
		sent := func() map[[2]string]int64 {
			x := map[[2]string]int64{}
			for _, e := range e.Ledger.Entries() {
				if !e.Control {
					x[[2]string{e.Axis, e.Op}] = e.Bytes
				}
			}
			return x
		}
		if _, err := s.trainer.Step(0); err != nil {
			return err
		}
		before := sent()
		if _, err := s.trainer.Step(1); err != nil {
			return err
		}
		took := sent()
		for of := range took {
			took[of] -= before[of]
		}
		mu.Lock()
		defer mu.Unlock()
		f, err := plan.PredictRank(e.Job, anyMachine(e.Device, 2), plan.SubjectOfModel(s.parts.Config),
			e.Mesh.World.Rank(), true)
		if err != nil {
			return err
		}
		defer f.Close()
		if have := s.trainer.Components(); !slices.Equal(f.Memory, have) {
			t.Errorf("%s: rank %d: planned %v, the run has %v", name, f.Rank, f.Memory, have)
		}
		if !maps.Equal(f.Sent, took) {
			t.Errorf("%s: rank %d: planned to send %v, sent %v", name, f.Rank, f.Sent, took)
		}
		all := int64(0)
		for _, bytes := range f.Sent {
			all += bytes
		}
		if f.Node+f.Network != all || f.Seconds <= 0 {
			t.Errorf("%s: rank %d: %d bytes to its node and %d to others of %d, in %v s", name, f.Rank, f.Node,
				f.Network, all, f.Seconds)
		}
		return nil
	})
	if err != nil {
		t.Errorf("%s: %v", name, err)
	}
}

// After a long run, rank 0 plans a step with rates that the ranks have measured at the same time.
// After a short run, no rank measures.
func TestPlannedBesideMeasured(t *testing.T) {
	err := onRanks(Options{Path: planned(t, "llama"), Ranks: 2, Stdout: io.Discard, Stderr: io.Discard},
		func(e *Env) error {
			s, err := prepare(e, true)
			if err != nil {
				return err
			}
			defer s.close()
			for _, worked := range []float64{100, 5, 0.5} { // in the same order on both
				want := worked > 50 && e.Mesh.World.Rank() == 0
				m, err := s.rank().Measure(worked * float64(1-e.Mesh.World.Rank()))
				if err != nil {
					return err
				}
				if got := s.rank().PlanStep(m); (got != nil) != want || want &&
					(!(got.Seconds > 0) || got.Seconds > 1 || len(got.Phases) == 0) {
					t.Errorf("rank %d after %v s: %v planned", e.Mesh.World.Rank(), worked, got)
				}
				if share, of := m.ShareOfPeak(1e6); e.Mesh.World.Rank() == 0 &&
					((share > 0) != (worked > 1) || share > 1 ||
						(share > 0) != strings.Contains(of, "FLOP/s a rank: matrix products, as measured")) {
					t.Errorf("after %v s: %v %s", worked, share, of)
				}
			}
			return nil
		})
	if err != nil {
		t.Error(err)
	}
}

// A plan for an unknown GPU of this machine uses the rates of a --cluster file. Ranks that share
// the GPU share the rates.
func TestPlanOnAGPU(t *testing.T) {
	cudatest.Use(t)
	path, cluster := planned(t, "hybrid"), filepath.Join(t.TempDir(), "cluster.toml")
	rates := "ranks_per_node = 3\n[rates]\n"
	for _, k := range file.ClusterKeys() {
		if name, ok := strings.CutPrefix(k, "rates."); ok {
			rates += name + " = 2.0\n"
		}
	}
	if err := os.WriteFile(cluster, []byte(rates), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("ULYSSES_EMULATED_DEVICES", "2")
	code, out, errs := call("plan", path, "--set", "device.backend=cuda", "-n", "3")
	known := code == status.OK // on a GPU whose name says what it does
	if !known && (code != status.Unsupported || !strings.Contains(errs, "are unknown") ||
		!strings.Contains(errs, "--cluster")) {
		t.Errorf("%v %s%s", code, out, errs)
	}
	code, out, errs = call("plan", path, "--set", "device.backend=cuda", "--cluster", cluster)
	if code != status.OK || !strings.Contains(out, "3 ranks, ulysses 3 x data 1") ||
		!strings.Contains(out, "which 2 ranks share") && !known {
		t.Errorf("%v %s%s", code, out, errs)
	}
}

// The verb plan prints a plan, searches meshes, and refuses a job with the right code. It executes
// nothing.
func TestPlanThroughTheCommandLine(t *testing.T) {
	path := planned(t, "llama")
	file := func(text string) string {
		p := filepath.Join(t.TempDir(), "cluster.toml")
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	for _, c := range []struct {
		args string
		code status.Code
		want []string
	}{
		{"plan JOB -n 3", status.OK,
			[]string{"3 ranks, ulysses 3 x data 1, zero 0, 3 a node", "saved: mlp", "planned", "attention", "a step",
				"sequence: all-to-all", "to other nodes", "tokens/s", "2 steps of 70 tokens", "fits"}},
		{"plan JOB -n 2 --set kind=eval", status.OK,
			[]string{"a pass", "fits", "optimizer.warmup, train.steps: no effect"}},
		{"plan JOB -n 2000 --set parallel.ulysses=1", status.OK, []string{"2000 ranks, ulysses 1 x data 2000"}},
		{"plan JOB -n 4 --search --set parallel.zero=1", status.OK,
			[]string{"longest sequence", "\n  ulysses  ring      keys  data  zero  ",
				"\n        4     1               1     1 ", "\n        2     1               2     1 ",
				"\n        1     1               4     1 ", "\n        2     2  in steps     1     1 ",
				"\n        1     2  in steps     2     1 ", "\n        1     4  in steps     1     1 ",
				"\n        1     4   at once     1     1 "}},
		{"plan JOB -n 6 --search --set parallel.zero=3 --set parallel.ring=3 --set parallel.gather=on", status.OK,
			[]string{"\n        2     3  at once     1     3 ", "\n        1     3  at once     2     3 "}},
		{"plan JOB -n 4 --search --set parallel.ring=3 --set parallel.ulysses=4", status.InvalidConfig,
			[]string{"set parallel.ring=3: ", "use a number of ranks that is a multiple of 3\n"}},
		{"plan JOB --cluster " + file("nodes = 3\nranks_per_node = 2\n[rates]\nnetwork = 5.0"), status.OK,
			[]string{"6 ranks, ulysses 6", "2 a node",
				"levels           direct all-to-alls: by the model of the links, "}},
		{"plan JOB --cluster " + file("nodes = 3\nranks_per_node = 2\n[rates]\nmessage = 5.0") +
			" --set parallel.two_level=on", status.OK,
			[]string{"levels           all-to-alls with two levels, over 3 nodes of 2 ranks"}},
		// rank 1 has the query heads 2 and 3, which have different key heads
		{"plan JOB -n 6 --set parallel.ulysses=3 --set parallel.ring=2 --set data.sequence=71 " +
			"--set model.new.num_attention_heads=6 --set model.new.num_key_value_heads=2", status.OK,
			[]string{"at most 71 tokens x 1/2 x 2 key heads x (16 + 16) = 2304 elements"}},
		// three ranks of the six that a node has room for have all of its memory
		{"plan JOB -n 3 --cluster " + file("ranks_per_node = 6\nhost_memory = 3.0"), status.OK,
			[]string{"3 ranks, ulysses 3 x data 1, zero 0, 3 a node", "and 1.0 GiB of host memory are free"}},
		{"plan JOB --set device.backend=auto --set parallel.two_level=on --cluster " +
			file("device = \"h100\"\nnodes = 2\nranks_per_node = 2"), status.Unsupported,
			[]string{"parallel.two_level = \"on\": GPUs have no two-level all-to-all; set it to \"auto\""}},
		{"plan JOB -n 3 --set memory.device=1e-4", status.OutOfMemory,
			[]string{"memory.device allows", "--search lists the meshes and ZeRO stages that fit"}},
		{"plan JOB -n 3 --set data.sequence=1000000000", status.OutOfMemory,
			[]string{"of host memory are planned on this rank", "GiB free for 3 ranks"}},
		{"plan JOB -n 3 --set parallel.ulysses=2", status.InvalidConfig, []string{"does not divide the 3 ranks"}},
		{"plan JOB --set data.sequnce=1", status.InvalidConfig, []string{"did you mean data.sequence?"}},
		{"plan JOB --set model.new={} --set model.path=nowhere --set optimizer.lr=1", status.IO, []string{"nowhere"}},
		{"plan JOB --cluster nowhere.toml", status.IO, []string{"nowhere.toml"}},
		{"plan JOB --cluster " + file("nodess = 3\ndevice = \"z80\"\n[rates]\nnetwork = -1\nnode = \"x\"\n"),
			status.InvalidConfig,
			[]string{"4 faults", ":1: nodess: unknown key; did you mean nodes?", `:2: device = "z80": `,
				":4: rates.network = -1: ", `:5: rates.node = "x": `}},
		{"plan JOB --cluster " + file("device = \"h100\""), status.InvalidConfig, []string{"device.backend"}},
		{"plan JOB --cluster " + file("device = \"h100\"") + " --set device.backend=cuda --set model.new.head_dim=512",
			status.Unsupported,
			[]string{
				"ulysses-mpi: head_dim = 512: attention of device cuda supports at most 256; set device.backend = \"cpu\""}},
		{"plan JOB --cluster " + file("nodes = 2000000"), status.InvalidConfig, []string{"at most"}},
		{"plan JOB --cluster " + file("nodes ="), status.InvalidConfig, []string{"not TOML"}},
		{"plan JOB -n 99999999", status.InvalidArgument, []string{"--ranks 99999999"}},
		{"JOB --search", status.InvalidArgument, []string{"is a flag of plan"}},
		{"verify JOB --cluster x", status.InvalidArgument, []string{"is a flag of plan"}},
		{"plan", status.InvalidArgument, []string{"plan: job file is missing"}},
	} {
		code, out, errs := call(strings.Fields(strings.ReplaceAll(c.args, "JOB", path))...)
		if code != c.code || (code == status.OK) == strings.Contains(errs, "ulysses-mpi: ") {
			t.Errorf("%s: code %v\n%s%s", c.args, code, out, errs)
		}
		for _, w := range c.want {
			if !strings.Contains(out+errs, w) {
				t.Errorf("%s: no %q in\n%s%s", c.args, w, out, errs)
			}
		}
	}
	if left, err := filepath.Glob(filepath.Join(filepath.Dir(path), "*")); err != nil || len(left) != 3 {
		t.Errorf("a plan left %v", left)
	}
}

// A plan warns of a warmup and a trace beyond the end of the run only if it knows the end: the data
// decides the steps of a job with train.epochs.
func TestPlanOfEpochs(t *testing.T) {
	path := planned(t, "llama")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for end, warnings := range map[string]int{"steps = 50": 2, "epochs = 2": 0} {
		if err := os.WriteFile(path, []byte(strings.Replace(string(text), "steps = 2", end, 1)), 0o600); err != nil {
			t.Fatal(err)
		}
		code, out, errs := call("plan", path, "--set", "optimizer.warmup=500", "--set", "output.trace=[600,601]")
		if code != status.OK || strings.Count(errs, "the run has ") != warnings {
			t.Errorf("%s: %v, want %d warnings: %s%s", end, code, warnings, out, errs)
		}
	}
}

// The cost of waiting is added once for each collective of ranks on CPUs.
func TestWaitsOfAPlan(t *testing.T) {
	err := onRanks(Options{Path: planned(t, "hybrid"), Ranks: 2, Stdout: io.Discard, Stderr: io.Discard},
		func(e *Env) error {
			if e.Mesh.World.Rank() > 0 {
				return nil
			}
			config, err := e.Job.ReadConfig()
			if err != nil {
				return err
			}
			plan := func(share float64) *plan.Forecast {
				m := anyMachine(e.Device, 2)
				m.Share = share
				f, err := plan.Predict(e.Job, m, plan.SubjectOfModel(config), true)
				if err != nil {
					t.Fatal(err)
				}
				f.Close()
				return f
			}
			without, with := plan(0), plan(3)
			all := int64(0)
			for _, n := range without.Waits {
				all += n
			}
			each := dryrun.WaitCost(without.Seconds/float64(all), 3)
			for phase, n := range without.Waits {
				if more := with.Phases[phase] - without.Phases[phase]; n == 0 ||
					!(math.Abs(more-each*float64(n)) <= 1e-9) {
					t.Errorf("%s: %d meetings, %v s longer", phase, n, more)
				}
			}
			if more := with.Seconds - without.Seconds; all == 0 || !(math.Abs(more-each*float64(all)) <= 1e-9) {
				t.Errorf("%d meetings: %v s longer", all, more)
			}
			return nil
		})
	if err != nil {
		t.Error(err)
	}
}
