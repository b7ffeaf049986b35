package operator

import (
	"testing"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/tensor"
)

// tally counts the buffers that a device gave and took back.
type tally struct {
	device.Device
	given, back int
}

type tallied struct {
	device.Buffer
	of *tally
}

func (d *tally) Alloc(bytes int64) (device.Buffer, error) {
	b, err := d.Device.Alloc(bytes)
	d.given++
	return tallied{b, d}, err
}

func (b tallied) Free() {
	b.of.back++
	b.Buffer.Free()
}

// broken panics in its passes, if it is to.
type broken struct {
	run
	panics bool
}

func (k *broken) tokens() int64                             { return 1 }
func (k *broken) scratch() (saved, workspace tensor.Tensor) { return saved, workspace }
func (k *broken) read() error                               { return nil }
func (k *broken) results() []sharded                        { return nil }

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

// A rank that panics amid its passes leaves its memory to peers that read it; what ends in order
// gives everything back.
func TestPanicLeavesMemory(t *testing.T) {
	for _, panics := range []bool{false, true} {
		under, _, err := backends.Open(backends.Choice{Backend: "cpu", Threads: 1, RanksOnNode: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer under.Close()
		d := &tally{Device: under}
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
		if d.given == 0 || (d.back == d.given) == panics {
			t.Errorf("panics %v: %d buffers given, %d given back", panics, d.given, d.back)
		}
	}
}
