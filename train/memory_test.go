package train

import (
	"strings"
	"sync"
	"testing"

	"ulysses/comm"
	"ulysses/internal/fake"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

// crowd runs a step of a long sequence on fake devices of these sizes, 0 = any, and says what is planned and which tiles were taken.
func crowd(t *testing.T, tiles model.Tiles, memory ...int64) (planned int64, taken []model.Tiles, losses []float64, err error) {
	t.Helper()
	data := config(4000, file(t, t.TempDir(), "a.txt", strings.Repeat("all work and no play. ", 200)))
	taken = make([]model.Tiles, len(memory))
	var mu sync.Mutex
	err = comm.RunLocal(len(memory), func(host comm.Comm) error {
		d, err := fake.Open(fake.Options{Memory: memory[host.Rank()]})
		if err != nil {
			return err
		}
		defer d.Close()
		x := run{model: "llama", ranks: len(memory), ulysses: len(memory), optimizer: "adamw", compute: tensor.BF16, steps: 1, tiles: tiles, taken: &taken[host.Rank()]}
		o, err := x.with(d, fake.Communicator(d, host), func() error { return nil }, &data)
		mu.Lock()
		defer mu.Unlock()
		if err == nil && host.Rank() == 0 {
			planned, losses = model.Bytes(o.table), o.losses
		}
		return err
	})
	return planned, taken, losses, err
}

// The MLP is in tiles by itself where the plan would else crowd a device, on all ranks though one of them alone is small; not where there
// is room, and not where the job says no.
func TestTilesWhereMemoryIsShort(t *testing.T) {
	whole, _, want, err := crowd(t, model.Tiles{}, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	tiled, _, _, err := crowd(t, model.Tiles{MLP: 4096}, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	if saved := int64(2 * 2 * 2 * 48 * 2000); whole-tiled < saved { // bytes, layers, gate and up
		t.Errorf("%d bytes are planned, in tiles %d: %d should go", whole, tiled, saved)
	}
	for _, x := range []struct {
		tiles  model.Tiles
		memory []int64
		want   int64 // tile of the MLP
		code   status.Code
	}{
		{model.Tiles{}, []int64{2 * whole, 0}, model.TileAuto, status.OK},
		{model.Tiles{}, []int64{2 * whole, whole + 200<<10}, 4096, status.OK}, // its other buffers need room too
		{model.Tiles{MLP: model.TileOff}, []int64{2 * whole, whole + 200<<10}, model.TileOff, status.OK},
		{model.Tiles{MLP: model.TileOff}, []int64{2 * whole, (whole + tiled) / 2}, model.TileOff, status.OutOfMemory},
		{model.Tiles{MLP: 7}, []int64{2 * whole, 0}, 7, status.OK},
	} {
		_, taken, losses, err := crowd(t, x.tiles, x.memory...)
		if status.Of(err) != x.code {
			t.Errorf("%v in %v: %v", x.tiles, x.memory, err)
		}
		for r, got := range taken {
			if got.MLP != x.want || got.Loss != model.TileAuto {
				t.Errorf("%v in %v: rank %d takes tiles %v, want %d", x.tiles, x.memory, r, got, x.want)
			}
		}
		if err == nil && losses[0] != want[0] {
			t.Errorf("%v in %v: loss %v, want %v", x.tiles, x.memory, losses[0], want[0])
		}
	}
}
