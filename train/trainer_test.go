package train

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/data"
	"ulysses/device"
	"ulysses/gdn"
	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
	"ulysses/testkit/devicetest"
	"ulysses/testkit/fake"
)

var tiny = map[string]map[string]any{
	"llama": {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48,
		"num_hidden_layers":   2,
		"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1, "mlp_bias": true},
	"qwen3": {"model_type": "qwen3", "vocab_size": 256, "hidden_size": 24, "intermediate_size": 40,
		"num_hidden_layers": 2, "head_dim": 8,
		"num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.1, "tie_word_embeddings": true},
	// layer 1 is dense
	"moe": {"model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 24,
		"num_hidden_layers": 3, "head_dim": 8, "num_attention_heads": 4,
		"num_key_value_heads": 2, "initializer_range": 0.1, "num_experts": 5, "num_experts_per_tok": 2,
		"moe_intermediate_size": 14, "mlp_only_layers": []any{1},
		"output_router_logits": true, "router_aux_loss_coef": 0.1},
	"shared": {"model_type": "qwen3_5_moe_text", "vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 2,
		"head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
		"full_attention_interval": 1, "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 8,
		"linear_value_head_dim": 8, "linear_conv_kernel_dim": 2,
		"initializer_range": 0.1, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
		"shared_expert_intermediate_size": 10},
}

func init() { // four layers
	deep := maps.Clone(tiny["llama"])
	deep["num_hidden_layers"] = 4
	tiny["deep"] = deep
}

// run has the settings of a training run that vary between tests.
type run struct {
	model     string
	ranks     int
	ulysses   int
	ring      int // 0 = 1
	experts   int // ranks among which experts are divided; 0 = not divided
	optimizer string
	compute   tensor.DType
	strategy  gdn.Strategy
	on        *devicetest.Kind // nil = the CPU
	steps     int64            // 0 = twenty
	freeze    []string
	lora      *model.LoRA
	seen      func(m *model.Model) // called on every rank before the reduction of each step
	tiles     model.Tiles
	usedTiles *model.Tiles // set to the tiles that were used; nil = not set
	zero      int
	lr        float64      // 0 = 0.3 for sgd, 3e-3 for adamw
	clip      float64      // of gradients; 0 = 1, negative = none
	keep      *Checkpoints // nil = no checkpoints
	stop      bool         // after the first step
	resume    bool         // from the newest checkpoint of keep
	memory    MemoryConfig
	free      int64   // of the host
	unused    int64   // of the memory of the device; 0 = unknown
	offload   Offload // of the optimizer's states
	choice    *Choice // set to the choice of the planner; nil = not set
	onNaN     string  // "" = stop
	biasRate  float64 // of the biases of experts; 0 = there are none
	made      func(m *model.Model)
	overlap   bool // q, k and v are projected and sent one after the other
	// called on every rank between the passes and the reduction of each step, and after the step;
	// nil = no call
	probe, after func(w Weights, step int64) error
}

// outcome is the result of a run on rank 0.
type outcome struct {
	losses, norms []float64
	flops         []float64 // of the job
	eval          float64
	weights       []float32 // master weights that are trained
	numel         int64     // of all parameters
	table         []model.Component
	peak          int64
	sent          int64 // by all-to-alls, in steps
	evalSent      int64 // by all-to-alls, in the evaluation
}

// length returns the number of steps.
func (x run) length() int64 {
	if x.steps > 0 {
		return x.steps
	}
	return 20
}

func (x run) train(t *testing.T) (o outcome) {
	t.Helper()
	dir := t.TempDir()
	text := strings.Repeat("the cat sat on the mat, and the dog sat on the log. ", 12)
	dataset := config(48, file(t, dir, "a.txt", text[:500]), file(t, dir, "b.txt", strings.ToUpper(text[:300])))
	dataset.Accumulate, dataset.Batch = 4/int64(x.ranks/x.ulysses/max(1, x.ring)), 1
	return x.trainOn(t, dataset)
}

// trainOn runs on the given data.
func (x run) trainOn(t *testing.T, dataset data.Config) (o outcome) {
	t.Helper()
	var mu sync.Mutex
	err := comm.RunLocal(x.ranks, func(host comm.Comm) error {
		got, err := x.rank(host, &dataset)
		if err == nil && host.Rank() == 0 {
			mu.Lock()
			defer mu.Unlock()
			o = got
		}
		return err
	})
	if err != nil {
		t.Fatalf("%+v: %v", x, err)
	}
	return o
}

func (x run) rank(host comm.Comm, dataset *data.Config) (o outcome, err error) {
	if x.on != nil {
		d, c, done, err := x.on.Open(host)
		if err != nil {
			return o, err
		}
		defer d.Close()
		return x.with(d, c, done, dataset)
	}
	d, err := cpu.New(cpu.Options{Workers: 1})
	if err != nil {
		return o, err
	}
	defer d.Close()
	return x.with(d, host, func() error { return nil }, dataset)
}

// with runs on a device. done closes the communicator.
func (x run) with(d device.Device, c comm.Comm, done func() error, dataset *data.Config) (o outcome, err error) {
	ledger := comm.NewLedger()
	mesh, err := comm.NewMesh(c, x.ulysses, max(1, x.ring), ledger, clock.New(), nil)
	if err != nil {
		return o, err
	}
	if err = mesh.DivideExperts(x.experts, ledger, clock.New(), nil); err != nil {
		return o, err
	}
	cfg, err := model.ConfigFromMap(tiny[x.model])
	if err != nil {
		return o, err
	}
	if x.biasRate > 0 {
		if err := cfg.AddExpertBias(); err != nil {
			return o, err
		}
	}
	m, err := model.New(d, mesh.Seq, cfg,
		model.Options{Compute: x.compute, Strategy: x.strategy, Ring: int64(x.ring), Freeze: x.freeze, LoRA: x.lora,
			Experts: mesh.ExpertRanks(), MoveBiases: x.biasRate > 0,
			Overlap: x.overlap})
	if err != nil {
		return o, err
	}
	defer m.Close()
	if x.made != nil {
		x.made(m)
	}
	if err := m.SetTiles(x.tiles); err != nil {
		return o, err
	}
	if x.usedTiles != nil {
		defer func() { *x.usedTiles = m.Tiles() }()
	}
	opt := &OptimizerConfig{Name: x.optimizer, LR: 3e-3, Betas: [2]float64{0.9, 0.95}, Eps: 1e-8, WeightDecay: 0.1,
		Clip: 1, Schedule: "cosine", Warmup: 3, ExpertBiasRate: x.biasRate}
	if x.optimizer == "sgd" {
		opt.LR = 0.3
	}
	if x.lr > 0 {
		opt.LR = x.lr
	}
	if x.clip != 0 {
		opt.Clip = max(0, x.clip)
	}
	w, err := NewWeights(d, mesh, m.Groups(), x.compute, opt, x.zero, x.offload)
	if err = comm.Agree(mesh.World, err); err != nil {
		return o, err
	}
	defer w.Free()
	if err := m.Init(7); err != nil {
		return o, err
	}
	set, err := data.Open(*dataset, data.EvalConfig{}, data.Options{Vocab: cfg.VocabSize, Seed: 1})
	if err != nil {
		return o, err
	}
	defer set.Close()
	eval := []data.NamedSet{{Set: set.Train()}}
	if x.optimizer == "sgd" {
		eval = nil // so only the last step waits for its update
	}
	var t *Trainer
	setup := Setup{Device: d, Mesh: mesh, Model: m, Weights: w, Optimizer: opt, Clock: clock.New(), Checkpoints: x.keep,
		Data:   Data{Train: set.Train(), Evals: eval, Config: dataset},
		Memory: Memory{Config: x.memory, FreeHost: x.free, Stage: x.zero},
		Loop:   Loop{Steps: x.length(), OnNaN: cmp.Or(x.onNaN, "stop")}}
	if x.resume {
		r, err := x.keep.Resume("", d, mesh.World, w, m.Groups(), opt, x.length())
		if err != nil {
			return o, err
		}
		setup.Loop.Resumed, setup.Loop.Updates = r.Step, r.Updates
	}
	setup.Hooks.Stop = func() bool { return x.stop }
	if x.seen != nil {
		setup.Hooks.Probe = func(int64) error { x.seen(m); return nil }
	}
	if x.probe != nil {
		setup.Hooks.Probe = func(step int64) error { return x.probe(w, step) }
	}
	setup.Hooks.Step = func(r *Record) error {
		if x.after != nil {
			if err := x.after(w, r.Step); err != nil {
				return err
			}
		}
		if o.peak = r.PeakBytes; o.table == nil {
			o.table = t.Components()
		}
		o.sent = ledger.Get("sequence", comm.OpAllToAll).Bytes
		o.losses, o.norms = append(o.losses, float64(r.Loss)), append(o.norms, float64(r.GradNorm))
		o.flops = append(o.flops, r.ModelTFLOPS*1e12*r.Seconds*float64(mesh.World.Size()))
		return nil
	}
	setup.Hooks.Eval = func(r *EvalRecord) error {
		o.eval, o.evalSent = float64(r.EvalLoss), ledger.Get("sequence", comm.OpAllToAll).Bytes-o.sent
		return nil
	}
	t, err = New(setup)
	if err != nil {
		return o, err
	}
	defer t.Free()
	if x.choice != nil {
		for _, c := range t.Choices() {
			if c.Chosen {
				*x.choice = c
			}
		}
	}
	if err := t.Run(); err != nil {
		return o, err
	}
	// does not wait for the stream of the trainer, whose steps must be complete
	s, err := d.NewStream()
	if err != nil {
		return o, err
	}
	defer s.Close()
	values := map[string][]float32{}
	for _, g := range w.Portions() {
		if g.Frozen {
			continue
		}
		all, err := w.Whole(g, false, s)
		if err != nil {
			return o, err
		}
		x := make([]float32, g.Numel())
		if err := d.Copy(s, tensor.OfFloat32(x, int64(len(x))), all); err != nil {
			return o, err
		}
		if err := comm.BarrierBeforeSync(mesh.World); err != nil {
			return o, err
		}
		if err := s.Sync(); err != nil {
			return o, err
		}
		for _, p := range g.Params {
			values[p.Name], x = x[:p.Numel()], x[p.Numel():]
		}
	}
	for _, g := range m.Groups() {
		for _, p := range g.Params {
			o.weights = append(o.weights, values[p.Name]...)
		}
	}
	if err := checkTraffic(ledger, t.Traffic()); err != nil {
		return o, err
	}
	for _, c := range []*comm.Counted{mesh.Seq, mesh.Data, mesh.Expert, mesh.ExpertData} {
		if c == nil {
			continue
		}
		if err := c.Close(); err != nil {
			return o, err
		}
	}
	if err := done(); err != nil {
		return o, err
	}
	o.table, o.numel = t.Components(), m.Numel()
	// With data.budget or without packing, no micro-batch may have the planned number of tokens.
	full := dataset.Budget == 0 && dataset.Pack
	if planned := model.Bytes(o.table); planned < t.PeakBytes() || planned > t.PeakBytes() && full {
		return o, fmt.Errorf("planned %d bytes, used %d", planned, t.PeakBytes())
	}
	for _, a := range t.Allocations() { // each arena, and its components
		sum := a.Planned
		if a.Components != nil {
			sum = model.Bytes(a.Components) + model.HostBytes(a.Components)
		}
		if a.Peak > a.Planned || a.Peak < a.Planned && full || sum != a.Planned {
			return o, fmt.Errorf("%s: planned %d bytes, components of %d, used %d", a.Name, a.Planned, sum, a.Peak)
		}
	}
	return o, nil
}

// worst returns the largest difference between two lists.
func worst(a, b []float64) (d float64) {
	if len(a) != len(b) {
		return math.Inf(1)
	}
	for i := range a {
		if e := math.Abs(a[i] - b[i]); !(e <= d) {
			d = e
		}
	}
	return d
}

// Twenty steps on the test device, which runs operations late and has memory of its own, give the
// losses of the CPU in F32, and nearly the same in BF16, on any mesh.
func TestTrainingOnTestDevice(t *testing.T) {
	late := devicetest.Fake("late", fake.Options{})
	for _, name := range []string{"llama", "qwen3"} {
		for _, optimizer := range []string{"adamw", "sgd"} {
			want := run{model: name, ranks: 1, ulysses: 1, optimizer: optimizer, compute: tensor.F32}.train(t)
			if n := len(want.losses); n != 20 || !(want.losses[n-1] <= want.losses[0]-0.4) {
				t.Fatalf("%s with %s: the loss does not decrease: %v", name, optimizer, want.losses)
			}
			for _, mesh := range [][2]int{{1, 1}, {2, 2}, {4, 4}, {4, 2}} {
				if optimizer == "sgd" && mesh[0] > 2 {
					continue
				}
				for _, compute := range []tensor.DType{tensor.F32, tensor.BF16} {
					x := run{model: name, ranks: mesh[0], ulysses: mesh[1], optimizer: optimizer, compute: compute,
						on: &late}
					got := x.train(t)
					limit := 1e-5
					if mesh[0] > 1 {
						// gradients are summed in another order in each of twenty steps
						limit = 3e-5
					}
					x.near(t, got, want, limit)
					if compute == tensor.F32 && mesh[0] == 1 && !slices.Equal(got.weights, want.weights) {
						t.Errorf("%+v: the same operations give different weights", x)
					}
				}
			}
		}
	}
}

// near compares losses, with a limit in F32 and 1e-2 in BF16.
func (x run) near(t *testing.T, got, want outcome, limit float64) {
	t.Helper()
	if x.compute == tensor.BF16 {
		limit = 1e-2
	}
	if d := max(worst(got.losses, want.losses), math.Abs(got.eval-want.eval)); !(d <= limit) {
		t.Errorf("%+v: the losses differ by %.2g: %v, want %v", x, d, got.losses, want.losses)
	}
}

// The CUDA plug-in gives nearly the same losses.
func TestTrainingOnThePlugin(t *testing.T) {
	byPeers, throughHost := devicetest.CUDA(t, "cuda", false), devicetest.CUDA(t, "cuda, through the host", true)
	for _, name := range []string{"llama", "qwen3"} {
		want := run{model: name, ranks: 1, ulysses: 1, optimizer: "adamw", compute: tensor.F32, steps: 4}.train(t)
		for _, x := range []run{
			{ranks: 1, ulysses: 1, compute: tensor.F32, on: &byPeers},
			{ranks: 4, ulysses: 2, compute: tensor.BF16, on: &byPeers},
			{ranks: 2, ulysses: 2, compute: tensor.F32, on: &throughHost},
		} {
			x.model, x.optimizer, x.steps = name, "adamw", 4
			x.near(t, x.train(t), want, 1e-3)
		}
	}
}

// In BF16, the memory table has the master weights, compute weights have half the size, and master
// weights are finer than BF16.
func TestMasters(t *testing.T) {
	x := run{model: "llama", ranks: 1, ulysses: 1, optimizer: "adamw", compute: tensor.BF16}
	late := devicetest.Fake("late", fake.Options{})
	x.on = &late
	got := x.train(t)
	bytes := map[string]int64{}
	for _, c := range got.table {
		bytes[c.Name] = c.Bytes
	}
	if n := int64(len(got.weights)); bytes["weights"] != 2*n || bytes["master weights"] != 4*n ||
		bytes["gradients"] != 4*n || bytes["first moments"] != 4*n {
		t.Errorf("%d parameters: %v", n, got.table)
	}
	fine := 0
	for _, v := range got.weights {
		if tensor.BF16ToF32(tensor.F32ToBF16(v)) != v {
			fine++
		}
	}
	if fine < len(got.weights)/2 {
		t.Errorf("%d of %d master weights are finer than BF16", fine, len(got.weights))
	}
}

// Weight decay applies only to matrices. The ranges of adjacent matrices are joined.
func TestDecayRanges(t *testing.T) {
	d, err := cpu.New(cpu.Options{Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	groups := []*model.Group{
		{Params: []*model.Param{{Name: "a", Shape: []int64{2, 3}, Decay: true}, {Name: "b", Shape: []int64{3}}}},
		{Params: []*model.Param{{Name: "c", Shape: []int64{4, 1}, Decay: true},
			{Name: "d", Shape: []int64{1, 5}, Decay: true}, {Name: "e", Shape: []int64{2}}}},
	}
	w, err := NewReplicated(d, comm.Local(1)[0], groups, tensor.F32, &OptimizerConfig{Name: "sgd", WeightDecay: 0.5},
		Offload{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Free()
	s, _ := d.NewStream()
	if err := d.Fill(s, w.values, 1); err != nil {
		t.Fatal(err)
	}
	if err := w.Update(s, 0.5, 1, 1); err != nil {
		t.Fatal(err)
	}
	for i, v := range w.values.Float32s() {
		want := float32(1)
		if i < 6 || i >= 9 && i < 18 {
			want = 0.75
		}
		if v != want {
			t.Errorf("element %d is %v, want %v", i, v, want)
		}
	}
	if len(w.buckets[0].decay) != 2 {
		t.Errorf("ranges %v", w.buckets[0].decay)
	}
	// groups have values of their own, also for vectors; a bucket has one value
	grouped := &OptimizerConfig{Name: "sgd", WeightDecay: 0.5,
		Group: []GroupConfig{{[]string{"c", "e"}, 0.25}, {[]string{"re:[ad]"}, 0}, {[]string{"*"}, 0.5}}}
	for _, o := range []Offload{{}, {Step: StepStreamed, Bucket: 4}} {
		dev := device.Device(d)
		if o.Step == StepStreamed {
			f, err := fake.Open(fake.Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			dev = f
		}
		x, err := NewReplicated(dev, comm.Local(1)[0], groups, tensor.BF16, grouped, o)
		if err != nil {
			t.Fatal(err)
		}
		s, _ := dev.NewStream()
		if err := errors.Join(device.CopyAnywhere(dev, s, x.masters,
			tensor.OfFloat32(slices.Repeat([]float32{1}, 20), 20)), s.Sync(), x.Begin(s, 1), x.Update(s, 0.5, 1, 1),
			s.Sync()); err != nil {
			t.Fatal(err)
		}
		got := make([]float32, 20)
		if err := errors.Join(device.CopyAnywhere(dev, s, tensor.OfFloat32(got, 20), x.masters), s.Sync()); err != nil {
			t.Fatal(err)
		}
		want := slices.Concat(slices.Repeat([]float32{1}, 6), slices.Repeat([]float32{0.75}, 3),
			slices.Repeat([]float32{0.875}, 4), slices.Repeat([]float32{1}, 5), slices.Repeat([]float32{0.875}, 2))
		if !slices.Equal(got, want) {
			t.Errorf("%+v: %v, want %v", o, got, want)
		}
		if n := len(x.buckets); o.Step == StepOnDevice && n != 2 {
			t.Errorf("%d buckets", n)
		}
		x.Free()
	}
	if err := grouped.checkGroups(groups); err != nil {
		t.Error(err)
	}
	grouped.Group[1].Match = append(grouped.Group[1].Match, "embed*")
	if err := grouped.checkGroups(groups); status.Of(err) != status.InvalidConfig ||
		!strings.Contains(err.Error(), `optimizer.group: "embed*" matches no trained parameter`) {
		t.Error(err)
	}
	norms := &model.Group{Params: []*model.Param{{Name: "n", Shape: []int64{3}}}}
	if w, err = NewReplicated(d, comm.Local(1)[0], []*model.Group{norms}, tensor.F32, &OptimizerConfig{Name: "sgd"},
		Offload{}); err != nil || w.buckets[0].decay == nil {
		t.Errorf("no matrices: ranges %v, %v", w.buckets[0].decay, err)
	}
	w.Free()
}

// A plan that exceeds the memory of the device is refused before the first step. The error names
// the largest allocation and the fix, of which ZeRO is a part if it is not in use. Gradients have
// as many bytes as the master weights.
func TestPlanMustFit(t *testing.T) {
	text := strings.Repeat("all work and no play. ", 200)
	for _, x := range []struct {
		memory   int64
		sequence int64
		zero     int
		want     string
	}{
		{100 << 10, 48, 0, "the largest allocation is gradients with "},
		{2 << 20, 4000, 0, "the largest allocation is working memory with "},
		{2 << 20, 4000, 1,
			"MiB; divide the training state among the ranks with parallel.zero = 3 (it is 1), use more ranks"},
		{2 << 20, 4000, 3, "MiB; use more ranks"},
	} {
		dataset := config(x.sequence, file(t, t.TempDir(), "a.txt", text))
		err := comm.RunLocal(1, func(host comm.Comm) error {
			d, err := fake.Open(fake.Options{Memory: x.memory})
			if err != nil {
				return err
			}
			_, err = run{model: "llama", ranks: 1, ulysses: 1, zero: x.zero, optimizer: "adamw",
				compute: tensor.BF16}.with(d, fake.Communicator(d, host), func() error { return nil }, &dataset)
			return err
		})
		if status.Of(err) != status.OutOfMemory || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%d bytes: %v", x.memory, err)
		}
	}
}

// If the optimizer's states do not fit into a GPU, the fix names the option that moves them to the
// host. Small states, for which the slots of this option need more memory, and states of a CPU
// device stay where they are.
func TestFixOfStates(t *testing.T) {
	gpu, err := fake.Open(fake.Options{Memory: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	defer gpu.Close()
	host, err := cpu.New(cpu.Options{Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	const offload = "memory.optimizer = \"offload\""
	for _, x := range []struct {
		d     device.Device
		state model.Component
		want  bool
	}{
		{gpu, model.Component{Name: "first moments, shard", Bytes: 1 << 30}, true},
		{gpu, model.Component{Name: "expert master weights", Bytes: 1 << 30}, true},
		{gpu, model.Component{Name: "first moments (host)", Bytes: 1 << 30, Host: true}, false},
		{gpu, model.Component{Name: "first moments, first slot", Bytes: 4 * defaultBucket}, false},
		{host, model.Component{Name: "first moments", Bytes: 1 << 30}, false},
	} {
		plan := []model.Component{{Name: "gradients", Bytes: 1 << 30}, x.state}
		if got := fixOf(x.d, 3, plan); strings.Contains(got, offload) != x.want || !strings.HasSuffix(got, deviceFix) {
			t.Errorf("%s: %s", x.state.Name, got)
		}
	}
}

// When Step returns, the weights are updated: a read on another stream returns the new weights.
func TestStepIsComplete(t *testing.T) {
	dataset := config(48, file(t, t.TempDir(), "a.txt", strings.Repeat("to be or not to be. ", 20)))
	x := run{model: "llama", ranks: 1, ulysses: 1, optimizer: "sgd", compute: tensor.F32, steps: 1}
	host := comm.Local(1)[0]
	want, err := x.rank(host, &dataset)
	if err != nil {
		t.Fatal(err)
	}
	for seed := range uint64(8) {
		d, err := fake.Open(fake.Options{Seed: seed})
		if err != nil {
			t.Fatal(err)
		}
		got, err := x.with(d, fake.Communicator(d, host), func() error { return nil }, &dataset)
		if err != nil || !slices.Equal(got.weights, want.weights) {
			t.Errorf("seed %d: the weights are not updated (%v)", seed, err)
		}
		d.Close()
	}
}
