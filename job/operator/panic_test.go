package operator

import (
	"testing"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/tensor"
)

// countingDevice counts the buffers that are allocated and freed.
type countingDevice struct {
	device.Device
	allocated, freed int
}

type countedBuffer struct {
	device.Buffer
	of *countingDevice
}

func (d *countingDevice) Alloc(bytes int64) (device.Buffer, error) {
	b, err := d.Device.Alloc(bytes)
	d.allocated++
	return countedBuffer{b, d}, err
}

func (b countedBuffer) Free() {
	b.of.freed++
	b.Buffer.Free()
}

// broken is an operation whose compute may panic.
type broken struct {
	run
	panics bool
}

func (k *broken) tokens() int64                             { return 1 }
func (k *broken) scratch() (saved, workspace tensor.Tensor) { return saved, workspace }
func (k *broken) read() error                               { return nil }
func (k *broken) results() []shardedTensor                  { return nil }

func (k *broken) layout(a *device.Arena) error {
	_, err := a.Tensor(tensor.F32, 10)
	return err
}

func (k *broken) compute() error {
	if k.panics {
		panic("of a test")
	}
	return nil
}

// A rank that panics does not free its memory, which other ranks may read. Otherwise all memory is
// freed.
func TestPanicLeavesMemory(t *testing.T) {
	for _, panics := range []bool{false, true} {
		under, _, err := backends.Open(backends.Choice{Backend: "cpu", Threads: 1, RanksOnNode: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer under.Close()
		d := &countingDevice{Device: under}
		k := &broken{run{in: &inputFile{kind: "attention"}, dev: d, comm: comm.Local(1)[0], clock: clock.New()}, panics}
		func() {
			defer func() {
				if p := recover(); (p != nil) != panics {
					panic(p)
				}
			}()
			if _, err := do(k, t.TempDir()+"/out", func(err error) error { return err }); err != nil {
				t.Error(err)
			}
		}()
		if d.allocated == 0 || (d.freed == d.allocated) == panics {
			t.Errorf("panics %v: %d buffers allocated, %d freed", panics, d.allocated, d.freed)
		}
	}
}
