package train

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
	"ulysses/testkit/devicetest"
	"ulysses/testkit/fake"
)

// onFake trains on test devices, whose streams run in an order that depends on the seed.
func (x run) onFake(t *testing.T, seed uint64, o fake.Options) (out outcome, err error) {
	t.Helper()
	text := strings.Repeat("the cat sat on the mat, and the dog sat on the log. ", 12)
	dataset := config(48, file(t, t.TempDir(), "a.txt", text[:500]))
	dataset.Accumulate = 4 / int64(x.ranks/x.ulysses)
	var mu sync.Mutex
	err = comm.RunLocal(x.ranks, func(host comm.Comm) error {
		options := o
		options.Seed = seed + uint64(host.Rank())
		if host.Rank() != 0 {
			options.HostMemory = 0
		}
		d, err := fake.Open(options)
		if err != nil {
			return err
		}
		defer d.Close()
		got, err := x.with(d, fake.Communicator(d, host), func() error { return nil }, &dataset)
		if err == nil && host.Rank() == 0 {
			mu.Lock()
			defer mu.Unlock()
			out = got
		}
		return err
	})
	return out, err
}

// Offloaded states give bitwise the losses and weights of states on the device, for every ZeRO
// stage, optimizer and compute type, with buckets that divide parameters. A step on the host does
// so because the test device computes with the kernels of the CPU.
func TestOffloadedOptimizerIsBitwiseEqual(t *testing.T) {
	streamed, onHost := Offload{Step: StepStreamed, Bucket: 1000},
		Offload{Step: StepOnHost, Bucket: 1000, Host: hostStepper{}}
	with := func(o Offload) Offload { o.Gradients = true; return o }
	for i, x := range []struct {
		run
		offloads []Offload
	}{
		{run{ranks: 1, ulysses: 1, optimizer: "adamw", compute: tensor.BF16},
			[]Offload{streamed, onHost, with(streamed), with(onHost)}},
		{run{ranks: 1, ulysses: 1, optimizer: "sgd", compute: tensor.BF16}, []Offload{streamed}},
		{run{ranks: 1, ulysses: 1, optimizer: "adamw", compute: tensor.F32}, []Offload{streamed, onHost}},
		{run{ranks: 2, ulysses: 1, optimizer: "adamw", compute: tensor.BF16, zero: 0}, []Offload{streamed, onHost}},
		{run{ranks: 2, ulysses: 2, optimizer: "adamw", compute: tensor.BF16, zero: 1}, []Offload{streamed}},
		{run{ranks: 2, ulysses: 2, optimizer: "sgd", compute: tensor.BF16, zero: 1}, []Offload{onHost}},
		{run{ranks: 2, ulysses: 2, optimizer: "adamw", compute: tensor.F32, zero: 2},
			[]Offload{streamed, with(streamed), with(onHost)}},
		{run{ranks: 4, ulysses: 2, optimizer: "adamw", compute: tensor.BF16, zero: 2}, []Offload{streamed}},
		{run{ranks: 4, ulysses: 2, optimizer: "adamw", compute: tensor.BF16, zero: 3},
			[]Offload{streamed, onHost, with(streamed), with(onHost)}},
		{run{ranks: 2, ulysses: 2, optimizer: "sgd", compute: tensor.BF16, zero: 3}, []Offload{streamed, with(onHost)}},
		{run{ranks: 2, ulysses: 1, ring: 2, optimizer: "adamw", compute: tensor.BF16, zero: 3},
			[]Offload{streamed, with(onHost)}},
	} {
		x.model, x.steps = "llama", 3
		want, err := x.onFake(t, uint64(100*i), fake.Options{})
		if err != nil {
			t.Fatal(err)
		}
		if model.HostBytes(want.table) != 0 {
			t.Errorf("%+v: %d bytes of the host", x.run, model.HostBytes(want.table))
		}
		for k, o := range x.offloads {
			x.offload = o
			got, err := x.onFake(t, uint64(100*i+10*k+10), fake.Options{})
			if err != nil {
				t.Fatalf("%+v: %v", x.run, err)
			}
			if !slices.Equal(got.losses, want.losses) || !slices.Equal(got.weights, want.weights) ||
				got.eval != want.eval {
				t.Errorf("%+v: losses %v, on the device %v", x.run, got.losses, want.losses)
			}
			// one rank sums the squares of whole gradients in another order
			if !slices.Equal(got.norms, want.norms) && (x.ranks > 1 || !(worst(got.norms, want.norms) <= 1e-12)) {
				t.Errorf("%+v: norms %v, on the device %v", x.run, got.norms, want.norms)
			}
			gradients := slices.ContainsFunc(got.table, func(c model.Component) bool {
				return c.Name == gradientShard+" (host)"
			})
			if model.HostBytes(got.table) == 0 || gradients != o.Gradients {
				t.Errorf("%+v: the table is %v", x.run, got.table)
			}
		}
	}
}

// hostStepper opens a CPU device for each step, so that ranks may share it.
type hostStepper struct{}

func (hostStepper) with(f func(d device.Device, s device.Stream) error) error {
	d, err := cpu.New(cpu.Options{Workers: 1})
	if err != nil {
		return err
	}
	defer d.Close()
	s, err := d.NewStream()
	if err != nil {
		return err
	}
	return f(d, s)
}

func (h hostStepper) AdamW(_ device.Stream, a *device.AdamW) error {
	return h.with(func(d device.Device, s device.Stream) error { return d.AdamW(s, a) })
}

func (h hostStepper) SGD(_ device.Stream, a *device.SGD) error {
	return h.with(func(d device.Device, s device.Stream) error { return d.SGD(s, a) })
}

// A run resumes from a checkpoint of the other kind with the results of a run without interruption.
func TestResumeWithOffloadedOptimizer(t *testing.T) {
	x := run{model: "llama", ranks: 2, ulysses: 2, optimizer: "adamw", compute: tensor.BF16, zero: 3, steps: 2}
	offloaded := Offload{Step: StepStreamed, Bucket: 1000}
	want, err := x.onFake(t, 1, fake.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, first := range []Offload{{}, offloaded} {
		second := offloaded
		if first.Step == StepStreamed {
			second = Offload{}
		}
		dir := t.TempDir()
		a := x
		a.offload, a.stop = first, true
		a.keep = &Checkpoints{Dir: dir, Every: 1, Keep: 2, Model: func(string) error { return nil }}
		if _, err := a.onFake(t, 3, fake.Options{}); err != nil {
			t.Fatal(err)
		}
		b := x
		b.offload, b.resume = second, true
		b.keep = &Checkpoints{Dir: dir, Keep: 2, Model: func(string) error { return nil }}
		got, err := b.onFake(t, 5, fake.Options{})
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got.losses, want.losses[1:]) || !slices.Equal(got.weights, want.weights) {
			t.Errorf("resumed: losses %v, want %v", got.losses, want.losses[1:])
		}
	}
}

// A step with a NaN in a gradient changes neither weights nor moments in host memory, and the steps
// after it have the results of a run with states on the device.
func TestSkippedStepOfAnOffloadedOptimizer(t *testing.T) {
	const bad = 2
	for _, x := range []run{
		{ranks: 1, ulysses: 1, zero: 0, optimizer: "adamw", compute: tensor.BF16},
		{ranks: 4, ulysses: 2, zero: 3, optimizer: "adamw", compute: tensor.BF16},
	} {
		x.model, x.steps, x.onNaN = "llama", 4, "skip"
		var want outcome
		for i, o := range []Offload{{}, {Step: StepStreamed, Bucket: 1000},
			{Step: StepOnHost, Bucket: 1000, Host: hostStepper{}},
			{Step: StepStreamed, Bucket: 1000, Gradients: true},
			{Step: StepOnHost, Bucket: 1000, Gradients: true, Host: hostStepper{}}} {
			x.offload = o
			var before sync.Map // by the weights of a rank
			x.probe = func(w Weights, step int64) error {
				if step != bad {
					return nil
				}
				before.Store(w, hostStates(w))
				return spoilGradient(w)
			}
			x.after = func(w Weights, step int64) error {
				if was, ok := before.Load(w); ok && step == bad &&
					!slices.EqualFunc(was.([][]float32), hostStates(w), slices.Equal) {
					t.Errorf("%+v: a skipped step changed states", x)
				}
				return nil
			}
			got, err := x.onFake(t, uint64(10*i), fake.Options{})
			if err != nil {
				t.Fatal(err)
			}
			if !math.IsNaN(got.norms[bad-1]) ||
				slices.ContainsFunc(slices.Delete(slices.Clone(got.norms), bad-1, bad), math.IsNaN) {
				t.Fatalf("%+v: norms %v", x, got.norms)
			}
			if i == 0 {
				want = got
			} else if !slices.Equal(got.losses, want.losses) || !slices.Equal(got.weights, want.weights) {
				t.Errorf("%+v: losses %v, on the device %v", x, got.losses, want.losses)
			}
		}
	}
}

// hostStates returns copies of the states of a rank that are in host memory.
func hostStates(w Weights) (all [][]float32) {
	var states []tensor.Tensor
	switch w := w.(type) {
	case *Replicated:
		states = []tensor.Tensor{w.masters, w.m, w.v}
	case *ZeRO:
		states = []tensor.Tensor{w.masters, w.m, w.v}
	}
	for _, x := range states {
		if x.Where == tensor.Host {
			all = append(all, slices.Clone(x.Float32s()))
		}
	}
	return all
}

// spoilGradient sets the first gradient of each rank to NaN.
func spoilGradient(w Weights) error {
	var o *optimizer
	var grads tensor.Tensor
	var streams []device.Stream
	switch w := w.(type) {
	case *Replicated:
		o, grads = &w.optimizer, w.grads
	case *ZeRO:
		o, grads, streams = &w.optimizer, w.grads, []device.Stream{w.commStream}
	}
	if o.toHost != nil {
		streams = append(streams, o.toHost)
	}
	for _, s := range streams {
		if err := s.Sync(); err != nil {
			return err
		}
	}
	if grads.Where == tensor.Host {
		grads.Float32s()[0] = float32(math.NaN())
		return nil
	}
	s, err := o.dev.NewStream()
	if err != nil {
		return err
	}
	defer s.Close()
	return o.dev.Fill(s, grads.Slice(0, 0, 1), math.NaN())
}

// Steps of an offloaded optimizer, and gradients that are stored on the host, allocate nothing.
func TestOffloadedStepAllocatesNothing(t *testing.T) {
	plugin := devicetest.CUDA(t, "cuda", false)
	for _, o := range []Offload{{Step: StepStreamed}, {Step: StepOnHost}, {Step: StepStreamed, Gradients: true},
		{Step: StepOnHost, Gradients: true}} {
		err := comm.RunLocal(1, func(host comm.Comm) error {
			d, c, done, err := plugin.Open(host)
			if err != nil {
				return err
			}
			defer d.Close()
			threads, err := cpu.New(cpu.Options{Workers: 2})
			if err != nil {
				return err
			}
			defer threads.Close()
			o.Host, o.Bucket = threads, 1000
			groups := []*model.Group{{Params: []*model.Param{{Shape: []int64{70, 50}, Decay: true}}},
				{Params: []*model.Param{{Shape: []int64{900}}}}}
			opt := &OptimizerConfig{Name: "adamw", Betas: [2]float64{0.9, 0.95}, Eps: 1e-8, WeightDecay: 0.1}
			w, err := NewWeights(d, &comm.Mesh{World: comm.NewCounted(c, "world", nil, nil, nil)}, groups, tensor.BF16,
				opt, 0, o)
			if err != nil {
				return err
			}
			defer w.Free()
			s, err := d.NewStream()
			if err != nil {
				return err
			}
			defer s.Close()
			step := func() error {
				if z, ok := w.(*ZeRO); ok && o.Gradients {
					if err := z.storeGradients(z.groups[0].shardOf(z.grads), z.groups[0].ownIn(z.reducedMem[0], 0),
						true, z.reduced.all[0].filled); err != nil {
						return err
					}
				}
				if err := w.Update(s, 1e-3, 1, 1); err != nil {
					return err
				}
				return s.Sync()
			}
			if n := testing.AllocsPerRun(20, func() { err = cmp.Or(err, step()) }); err != nil || n > 0 {
				t.Errorf("%+v: a step allocates %v times: %v", o, n, err)
			}
			return done()
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// Impossible and failing settings are errors on all ranks.
func TestOffloadedOptimizerIsRefused(t *testing.T) {
	x := run{model: "llama", ranks: 2, ulysses: 2, optimizer: "adamw", compute: tensor.BF16, zero: 3, steps: 1,
		offload: Offload{Step: StepStreamed}}
	if _, err := x.onFake(t, 1, fake.Options{HostMemory: 64}); status.Of(err) != status.OutOfMemory ||
		!strings.Contains(err.Error(), "master weights, shard (host)") {
		t.Errorf("an allocation fails on rank 0: %v", err)
	}
	x.offload.FreeHost = 1 << 10
	if _, err := x.onFake(t, 1, fake.Options{}); status.Of(err) != status.OutOfMemory ||
		!strings.Contains(err.Error(), "of host memory are planned") {
		t.Errorf("the host has too little memory: %v", err)
	}
	x.offload.FreeHost, x.optimizer, x.compute = 0, "sgd", tensor.F32
	if _, err := x.onFake(t, 1, fake.Options{}); status.Of(err) != status.InvalidConfig ||
		!strings.Contains(err.Error(), "no state beside the weights") {
		t.Errorf("sgd in f32: %v", err)
	}
	x.ranks, x.ulysses, x.optimizer = 1, 1, "adamw"
	dataset := config(48, file(t, t.TempDir(), "a.txt", strings.Repeat("text ", 99)))
	dataset.Accumulate = 1
	if _, err := x.rank(comm.Local(1)[0], &dataset); status.Of(err) != status.InvalidConfig ||
		!strings.Contains(err.Error(), "there already") {
		t.Errorf("on the CPU: %v", err)
	}
}
