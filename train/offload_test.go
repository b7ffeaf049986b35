package train

import (
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
// stage, optimizer and compute type, with buckets that divide parameters.
func TestStreamedOptimizerIsBitwiseEqual(t *testing.T) {
	for i, x := range []run{
		{ranks: 1, ulysses: 1, optimizer: "adamw", compute: tensor.BF16},
		{ranks: 1, ulysses: 1, optimizer: "sgd", compute: tensor.BF16},
		{ranks: 1, ulysses: 1, optimizer: "adamw", compute: tensor.F32},
		{ranks: 2, ulysses: 1, optimizer: "adamw", compute: tensor.BF16, zero: 0},
		{ranks: 2, ulysses: 2, optimizer: "adamw", compute: tensor.BF16, zero: 1},
		{ranks: 2, ulysses: 2, optimizer: "adamw", compute: tensor.F32, zero: 2},
		{ranks: 4, ulysses: 2, optimizer: "adamw", compute: tensor.BF16, zero: 2},
		{ranks: 4, ulysses: 2, optimizer: "adamw", compute: tensor.BF16, zero: 3},
		{ranks: 2, ulysses: 2, optimizer: "sgd", compute: tensor.BF16, zero: 3},
	} {
		x.model, x.steps = "llama", 3
		want, err := x.onFake(t, uint64(100*i), fake.Options{})
		if err != nil {
			t.Fatal(err)
		}
		x.offload = Offload{Step: StepStreamed, Bucket: 1000}
		got, err := x.onFake(t, uint64(100*i+10), fake.Options{})
		if err != nil {
			t.Fatalf("%+v: %v", x, err)
		}
		if !slices.Equal(got.losses, want.losses) || !slices.Equal(got.norms, want.norms) || !slices.Equal(got.weights, want.weights) || got.eval != want.eval {
			t.Errorf("%+v: losses %v, on the device %v", x, got.losses, want.losses)
		}
		host := model.HostBytes(got.table)
		if host == 0 || model.HostBytes(want.table) != 0 {
			t.Errorf("%+v: %d bytes of the host", x, host)
		}
	}
}

// A step that the host computes gives bitwise the results of the test device, which computes with
// the kernels of the CPU.
func TestOptimizerStepOnHost(t *testing.T) {
	for i, x := range []run{
		{ranks: 1, ulysses: 1, optimizer: "adamw", compute: tensor.F32},
		{ranks: 2, ulysses: 2, optimizer: "sgd", compute: tensor.BF16, zero: 1},
		{ranks: 2, ulysses: 2, optimizer: "adamw", compute: tensor.BF16, zero: 3},
	} {
		x.model, x.steps = "llama", 3
		want, err := x.onFake(t, uint64(i), fake.Options{})
		if err != nil {
			t.Fatal(err)
		}
		x.offload = Offload{Step: StepOnHost, Bucket: 1000, Host: hostStepper{}}
		got, err := x.onFake(t, uint64(i+10), fake.Options{})
		if err != nil {
			t.Fatalf("%+v: %v", x, err)
		}
		if !slices.Equal(got.losses, want.losses) || !slices.Equal(got.weights, want.weights) {
			t.Errorf("%+v: losses %v, on the device %v", x, got.losses, want.losses)
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

// Impossible and failing settings are errors on all ranks.
func TestOffloadedOptimizerIsRefused(t *testing.T) {
	x := run{model: "llama", ranks: 2, ulysses: 2, optimizer: "adamw", compute: tensor.BF16, zero: 3, steps: 1, offload: Offload{Step: StepStreamed}}
	if _, err := x.onFake(t, 1, fake.Options{HostMemory: 64}); status.Of(err) != status.OutOfMemory || !strings.Contains(err.Error(), "master weights, shard (host)") {
		t.Errorf("an allocation fails on rank 0: %v", err)
	}
	x.offload.FreeHost = 1 << 10
	if _, err := x.onFake(t, 1, fake.Options{}); status.Of(err) != status.OutOfMemory || !strings.Contains(err.Error(), "of host memory are planned") {
		t.Errorf("the host has too little memory: %v", err)
	}
	x.offload.FreeHost, x.optimizer, x.compute = 0, "sgd", tensor.F32
	if _, err := x.onFake(t, 1, fake.Options{}); status.Of(err) != status.InvalidConfig || !strings.Contains(err.Error(), "no state beside the weights") {
		t.Errorf("sgd in f32: %v", err)
	}
	x.ranks, x.ulysses, x.optimizer = 1, 1, "adamw"
	dataset := config(48, file(t, t.TempDir(), "a.txt", strings.Repeat("text ", 99)))
	dataset.Accumulate = 1
	if _, err := x.rank(comm.Local(1)[0], &dataset); status.Of(err) != status.InvalidConfig || !strings.Contains(err.Error(), "there already") {
		t.Errorf("on the CPU: %v", err)
	}
}
