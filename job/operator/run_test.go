package operator

import (
	"os"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/internal/status"
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
			if _, err := do(k, t.TempDir()+"/out", 0, func(err error) error { return err }); err != nil {
				t.Error(err)
			}
		}()
		if d.allocated == 0 || (d.freed == d.allocated) == panics {
			t.Errorf("panics %v: %d buffers allocated, %d freed", panics, d.allocated, d.freed)
		}
	}
}

// A rank without the host memory for a job refuses it on all ranks, before it allocates.
func TestFreeMemory(t *testing.T) {
	for free, want := range map[int64]status.Code{0: status.OK, 1 << 20: status.OK, 1: status.OutOfMemory} {
		var allocated [2]int
		err := comm.RunLocal(2, func(c comm.Comm) error {
			under, _, err := backends.Open(backends.Choice{Backend: "cpu", Threads: 1, RanksOnNode: 2})
			if err != nil {
				return err
			}
			defer under.Close()
			d := &countingDevice{Device: under}
			k := &broken{run{in: &inputFile{kind: "attention"}, dev: d, comm: c, clock: clock.New()}, false}
			_, err = do(k, t.TempDir()+"/out", free*int64(1+c.Rank()*(1<<20)), func(err error) error { return err })
			allocated[c.Rank()] = d.allocated
			return err
		})
		if code := status.Of(err); code != want || want != status.OK &&
			(allocated[0] > 0 ||
				!strings.Contains(err.Error(),
					"attention: 40 B are planned on this rank, and the host has 1 B free for it")) {
			t.Errorf("%d free: %v, allocated %v", free, err, allocated)
		}
	}
}

// large is an operation with 16 MiB that reports how much of it the system has given.
type large struct {
	broken
	given, pages int
}

func (k *large) layout(a *device.Arena) error {
	_, err := a.Tensor(tensor.U8, 16<<20)
	return err
}

func (k *large) compute() error {
	memory := k.arena.All().RawBytes()
	in := make([]byte, len(memory)/os.Getpagesize())
	if _, _, errno := syscall.Syscall(syscall.SYS_MINCORE, uintptr(unsafe.Pointer(&memory[0])), uintptr(len(memory)),
		uintptr(unsafe.Pointer(&in[0]))); errno != 0 {
		return errno
	}
	k.pages = len(in)
	for _, page := range in {
		k.given += int(page & 1)
	}
	return nil
}

// The memory is used for the first time before the time of an operation is measured.
func TestFirstUseIsNotMeasured(t *testing.T) {
	d, _, err := backends.Open(backends.Choice{Backend: "cpu", Threads: 2, RanksOnNode: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	k := &large{broken: broken{run: run{in: &inputFile{kind: "attention"}, dev: d, comm: comm.Local(1)[0],
		clock: clock.New()}}}
	if _, err := do(k, t.TempDir()+"/out", 0, func(err error) error { return err }); err != nil {
		t.Fatal(err)
	}
	if k.pages < 4096*4096/os.Getpagesize() || k.given != k.pages {
		t.Errorf("of %d pages, %d are in memory", k.pages, k.given)
	}
}
