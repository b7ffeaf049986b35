package train

import (
	"fmt"
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
	"ulysses/testkit/near"
)

// runOn runs two steps of a long sequence, on ranks with a device each. It returns the outcome and
// the choice of each rank.
func runOn(t *testing.T, x run, ranks int, open func(rank int) (device.Device, error)) (o outcome, chosen []Choice,
	err error) {
	t.Helper()
	dataset := config(4000, file(t, t.TempDir(), "a.txt", strings.Repeat("all work and no play. ", 110)))
	chosen = make([]Choice, ranks)
	var mu sync.Mutex
	err = comm.RunLocal(ranks, func(host comm.Comm) error {
		d, err := open(host.Rank())
		if err != nil {
			return err
		}
		defer d.Close()
		x := x
		if x.free < 0 { // only rank 0 knows its free memory
			x.free *= -int64(1 - min(1, host.Rank()))
		}
		x.model, x.ranks, x.ulysses, x.optimizer, x.compute, x.steps, x.choice = "deep", ranks, ranks, "adamw",
			tensor.F32, 2, &chosen[host.Rank()]
		c := host
		if f, ok := d.(*fake.Device); ok {
			c = fake.Communicator(f, host)
		}
		got, err := x.with(d, c, func() error { return nil }, &dataset)
		mu.Lock()
		defer mu.Unlock()
		if err == nil && host.Rank() == 0 {
			o = got
		}
		return err
	})
	return o, chosen, err
}

// runWith is runOn on test devices with the given bytes of memory, 0 = unlimited.
func runWith(t *testing.T, x run, memory ...int64) (o outcome, chosen []Choice, err error) {
	t.Helper()
	return runOn(t, x, len(memory), func(rank int) (device.Device, error) {
		return fake.Open(fake.Options{Memory: memory[rank], Free: x.unused})
	})
}

// Ranks with other numbers of threads, for which the times of copies differ, choose alike.
func TestUnequalRanksChooseAlike(t *testing.T) {
	on := func(x run) (outcome, []Choice) {
		t.Helper()
		o, chosen, err := runOn(t, x, 2, func(rank int) (device.Device, error) {
			return cpu.New(cpu.Options{Workers: 1 + 15*rank})
		})
		if err != nil {
			t.Fatal(err)
		}
		return o, chosen
	}
	whole, _ := on(run{})
	offloads := 0
	for share := 0.995; share > 0.945; share -= 0.01 {
		_, chosen := on(run{memory: MemoryConfig{Device: share * float64(model.Bytes(whole.table)) / gib, Host: 1}})
		if chosen[0] != chosen[1] {
			t.Errorf("%.3f of the memory: rank 0 chose %+v, rank 1 %+v", share, chosen[0], chosen[1])
		}
		if chosen[0].Offloads() {
			offloads++
		}
	}
	if offloads == 0 {
		t.Error("nothing was offloaded")
	}
}

// If the memory suffices, all activations are kept. If the plan exceeds nine tenths of a device or
// a limit of [memory], all ranks make the same choice, also if only one device is small, and the
// losses do not change. The keys of [memory] and [tile] are honoured, or refused if they do not
// fit.
func TestMemoryIsChosen(t *testing.T) {
	want, _, err := runWith(t, run{}, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	whole := model.Bytes(want.table)
	keep := MemoryConfig{BlockInput: "keep", Attention: "keep", QKV: "keep", MLP: "keep"}
	share := func(x float64) float64 { return x * float64(whole) / gib }
	for name, x := range map[string]struct {
		run    run
		memory []int64
		holds  func(c *Choice, o *outcome) bool
		code   status.Code
	}{
		"room": {run{}, []int64{2 * whole, 0}, func(c *Choice, o *outcome) bool {
			return !c.Offloads() && c.MLP == model.Keep && c.Attention == model.Keep && c.QKV == model.Keep &&
				c.Extra == 0
		}, status.OK},
		"one rank is small": {run{}, []int64{2 * whole, whole + 200<<10}, func(c *Choice, o *outcome) bool {
			return c.Extra > 0 && model.Bytes(o.table) <= (whole+200<<10)*9/10 && c.Host == 0
		}, status.OK},
		"another process on the device": {run{unused: whole + 200<<10}, []int64{2 * whole, 2 * whole},
			func(c *Choice, o *outcome) bool {
				return c.Extra > 0 && model.Bytes(o.table) <= (whole+200<<10)*9/10 && c.Host == 0
			}, status.OK},
		"a limit": {run{memory: MemoryConfig{Device: share(0.8)}}, []int64{0, 0}, func(c *Choice, o *outcome) bool {
			return c.Extra > 0 && float64(model.Bytes(o.table)) <= 0.8*float64(whole)
		}, status.OK},
		"offloading fits": {
			run{memory: MemoryConfig{BlockInput: "keep", Attention: "keep", QKV: "offload", MLP: "offload",
				Device: share(0.8), Host: 1}}, []int64{0, 0}, func(c *Choice, o *outcome) bool {
				return c.Host > 0 && c.Extra > 0 && float64(model.Bytes(o.table)) <= 0.8*float64(whole)
			}, status.OK},
		"a free host that one rank knows": {run{memory: MemoryConfig{Device: share(0.8)}, free: -gib}, []int64{0, 0},
			func(c *Choice, o *outcome) bool {
				return c.Extra > 0 && c.Host == 0
			}, status.OK},
		"as asked": {run{memory: MemoryConfig{BlockInput: "offload", Attention: "recompute", MLP: "offload"}},
			[]int64{0, 0}, func(c *Choice, o *outcome) bool {
				return c.BlockInput == model.Offload && c.Attention == model.Recompute && c.QKV == model.Recompute &&
					c.MLP == model.Offload
			}, status.OK},
		"segments": {run{memory: MemoryConfig{BlockInput: "recompute"}}, []int64{0, 0},
			func(c *Choice, o *outcome) bool { return c.Segment == 2 && c.MLP == model.Recompute }, status.OK},
		"head groups": {run{memory: MemoryConfig{HeadGroups: 2, QKV: "recompute"}}, []int64{0, 0},
			func(c *Choice, o *outcome) bool { return c.HeadGroups == 2 }, status.OK},
		"tiles as asked": {run{tiles: model.Tiles{MLP: 7}}, []int64{2 * whole, 0},
			func(c *Choice, o *outcome) bool { return c.Tiles.MLP == 7 }, status.OK},
		"no tiles and everything kept": {run{tiles: model.Tiles{MLP: model.TileOff}, memory: keep},
			[]int64{2 * whole, whole / 2}, nil, status.OutOfMemory},
		"tiles are left": {run{memory: keep}, []int64{2 * whole, whole * 99 / 100},
			func(c *Choice, o *outcome) bool { return c.Tiles.MLP > 0 }, status.OK},
		"too small a limit": {run{memory: MemoryConfig{Device: share(0.3)}}, []int64{0, 0}, nil,
			status.OutOfMemory},
		"too small a host": {
			run{memory: MemoryConfig{BlockInput: "recompute", Attention: "offload", Host: 1e-6}}, []int64{0, 0}, nil,
			status.OutOfMemory},
		"no divisor": {run{memory: MemoryConfig{HeadGroups: 3}}, []int64{0, 0}, nil,
			status.InvalidConfig},
		"nothing is left": {run{memory: MemoryConfig{Attention: "recompute", QKV: "keep"}}, []int64{0, 0},
			nil, status.InvalidConfig},
	} {
		o, chosen, err := runWith(t, x.run, x.memory...)
		if status.Of(err) != x.code {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil {
			continue
		}
		for r := range chosen {
			if c := chosen[r]; c != chosen[0] || x.holds == nil || !x.holds(&c, &o) {
				t.Errorf("%s: rank %d chose %+v; %d bytes are planned, %d if everything is kept", name, r, c,
					model.Bytes(o.table), whole)
			}
		}
		for i, l := range want.losses {
			near.Value(t, fmt.Sprintf("%s: loss of step %d", name, i+1), o.losses[i], l, 1e-6*l)
		}
		if x.run.tiles.MLP == 0 && o.peak > model.Bytes(o.table) {
			t.Errorf("%s: %d bytes used, %d planned", name, o.peak, model.Bytes(o.table))
		}
	}
}

// States of the optimizer in host memory, and a copy of them for checkpoints, are not copied in a
// pass: they add nothing to the expected time of a choice. Gradients that are summed on the host
// are copied beside offloaded activations.
func TestTimeOfHostMemory(t *testing.T) {
	keep := &Checkpoints{Dir: t.TempDir(), Every: 1, Keep: 1, Model: func(string) error { return nil }}
	states := Offload{Step: StepStreamed, Bucket: 1000}
	gradients := states
	gradients.Gradients = true
	choice := func(x run) Choice {
		t.Helper()
		_, chosen, err := runWith(t, x, 0)
		if err != nil {
			t.Fatal(err)
		}
		return chosen[0]
	}
	for _, x := range []run{{}, {offload: states}, {keep: keep}} {
		if c := choice(x); c.Extra != 0 || (c.Host > 0) != (x.offload.Step != StepOnDevice || x.keep != nil) {
			t.Errorf("%+v with %d bytes of the host: %g of a step is added", c.Activations, c.Host, c.Extra)
		}
	}
	offloaded := MemoryConfig{BlockInput: "offload", Attention: "offload", QKV: "offload", MLP: "offload"}
	alone, beside := choice(run{memory: offloaded, offload: states}), choice(run{memory: offloaded, offload: gradients})
	if !(alone.Extra > 0 && beside.Extra > alone.Extra) {
		t.Errorf("copies of activations add %g of a step, with gradients %g", alone.Extra, beside.Extra)
	}
}

// With less memory, the chosen plan takes at least as much time and fits, until no choice fits.
func TestLessMemoryTakesMoreTime(t *testing.T) {
	o, _, err := runWith(t, run{}, 0)
	if err != nil {
		t.Fatal(err)
	}
	whole, last, refused := float64(model.Bytes(o.table)), -1.0, false
	for share := 1.0; share > 0.05; share -= 0.13 {
		o, chosen, err := runWith(t, run{memory: MemoryConfig{Device: share * whole / gib}}, 0)
		switch {
		case status.Of(err) == status.OutOfMemory:
			refused = true
		case err != nil:
			t.Fatal(err)
		case refused || chosen[0].Extra < last || float64(model.Bytes(o.table)) > share*whole:
			t.Errorf("%.2f of %.0f bytes: %+v, after %v and %v", share, whole, chosen[0], last, refused)
		default:
			last = chosen[0].Extra
		}
	}
	if !refused || last <= 0 {
		t.Errorf("refused %v, last %v", refused, last)
	}
}

// On a CPU, activations that are offloaded are in the same memory as everything else. A plan that
// exceeds the free memory is refused, whatever memory.device allows.
func TestFreeMemoryOfACPU(t *testing.T) {
	on := func(x run) (outcome, Choice, error) {
		t.Helper()
		o, chosen, err := runOn(t, x, 1, func(int) (device.Device, error) { return cpu.New(cpu.Options{Workers: 1}) })
		return o, chosen[0], err
	}
	o, _, err := on(run{memory: MemoryConfig{Device: 1e300, Host: 1e300}})
	if err != nil {
		t.Fatal(err)
	}
	whole, weights := model.Bytes(o.table), int64(0)
	for _, c := range o.table {
		if c.Name == "weights" {
			weights = c.Bytes
		}
	}
	offload := MemoryConfig{BlockInput: "offload", Attention: "offload", QKV: "offload", MLP: "offload"}
	for name, x := range map[string]struct {
		run  run
		code status.Code
	}{
		"room":       {run{free: 2 * whole}, status.OK},
		"recomputed": {run{free: whole}, status.OK},
		"a limit that is free": {run{free: whole, memory: MemoryConfig{Device: 2 * float64(whole) / gib}},
			status.OK},
		"offloaded":                   {run{free: whole * 2 / 3, memory: offload}, status.OutOfMemory},
		"no choice fits":              {run{free: whole / 3}, status.OutOfMemory},
		"a limit that is not free":    {run{free: whole / 3, memory: MemoryConfig{Device: 1}}, status.OutOfMemory},
		"weights, before the planner": {run{free: weights, offload: Offload{FreeHost: weights}}, status.OutOfMemory},
	} {
		o, c, err := on(x.run)
		if status.Of(err) != x.code || err == nil && model.Bytes(o.table)+model.HostBytes(o.table) > x.run.free ||
			err != nil && !strings.Contains(err.Error(), "the host has free for it") {
			t.Errorf("%s: %v, %+v, %d bytes planned and %d on the host, %d free, %d if everything is kept", name, err,
				c, model.Bytes(o.table), model.HostBytes(o.table), x.run.free, whole)
		}
	}
}
