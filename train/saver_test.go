package train

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/model"
	"ulysses/tensor"
	"ulysses/testkit/devicetest"
	"ulysses/testkit/fake"
	"ulysses/testkit/gathers"
)

// The copy of the training state that is written while steps run is in the plan: in the device's
// memory if that is the host's memory, otherwise in the host's memory. A run that writes
// checkpoints only when it is stopped has no copy, and writes the same files.
func TestCopyIsPlanned(t *testing.T) {
	late := devicetest.Fake("late", fake.Options{})
	for _, x := range []run{
		{ranks: 1, ulysses: 1, optimizer: "adamw"}, {ranks: 2, ulysses: 1, optimizer: "sgd", zero: 1},
		{ranks: 4, ulysses: 2, optimizer: "adamw", zero: 3},
		{ranks: 2, ulysses: 2, optimizer: "adamw", on: &late},
		{ranks: 2, ulysses: 2, optimizer: "adamw", on: &late, zero: 3},
	} {
		x.model, x.compute, x.steps = "llama", tensor.F32, 3
		var files [2]map[string]string
		for every := range int64(2) {
			dir := t.TempDir()
			// the run is stopped after the first step, which is written in both cases
			x.stop = true
			x.keep = &Checkpoints{Dir: dir, Every: every, Keep: 1, Model: func(dir string) error {
				return os.WriteFile(filepath.Join(dir, "config.json"), []byte("{}"), 0o600)
			}}
			got := x.train(t) // it compares the plan with the peak
			numel, copies := int64(len(got.weights)), map[string]int64{"sgd": 1, "adamw": 3}[x.optimizer]
			var found []model.Component
			for _, c := range got.table {
				if strings.HasPrefix(c.Name, "checkpoint copy") {
					found = append(found, c)
				}
			}
			share := 4 * copies * numel / int64(x.ranks)
			switch {
			case every == 0 && len(found) > 0:
				t.Errorf("%+v: a copy is planned: %v", x, found)
			case every == 1 && (len(found) != 1 || found[0].Bytes < share || found[0].Bytes > share+1000):
				t.Errorf("%+v: planned %v, this rank's share is %d bytes", x, found, share)
			case every == 1 &&
				(found[0].Host != (x.on != nil) || strings.HasSuffix(found[0].Name, "(host)") != found[0].Host):
				t.Errorf("%+v: the memory of %v is on the wrong side", x, found)
			}
			if len(got.losses) != 1 {
				t.Errorf("%+v: %d steps", x, len(got.losses))
			}
			files[every] = map[string]string{}
			for rank := range x.ranks {
				name := fmt.Sprintf("rank-%05d.safetensors", rank)
				text, err := os.ReadFile(filepath.Join(dir, "step-00000001", name))
				if err != nil {
					t.Fatal(err)
				}
				files[every][name] = string(text)
			}
		}
		for name := range files[0] {
			if files[0][name] != files[1][name] || len(files[0][name]) < 1000 {
				t.Errorf("%+v: %s is not the same with and without a copy", x, name)
			}
		}
	}
}

// If memory is short, the copy is left out before anything is recomputed, unless checkpoints are so
// frequent that recomputation takes less time, or checkpoint.copy says "on". Results do not change.
func TestCopyIsLeftOut(t *testing.T) {
	late := devicetest.Fake("late", fake.Options{})
	for _, on := range []*devicetest.Kind{nil, &late} {
		train := func(copy string, every int64, limit float64) (o outcome, chosen Choice, files map[string]string) {
			t.Helper()
			dir := t.TempDir()
			x := run{model: "llama", compute: tensor.F32, ranks: 2, ulysses: 2, optimizer: "adamw", zero: 1, steps: 2,
				on: on, choice: &chosen, stop: true,
				keep: &Checkpoints{Dir: dir, Every: every, Keep: 1, Copy: copy, Model: func(string) error {
					return nil
				}}}
			switch {
			case on == nil:
				x.memory.Device = limit / gib
			default:
				x.memory.Host = limit / gib
				x.memory.MLP = "offload" // so that both need host memory
			}
			o, files = x.train(t), map[string]string{}
			for rank := range x.ranks {
				name := fmt.Sprintf("rank-%05d.safetensors", rank)
				text, err := os.ReadFile(filepath.Join(dir, "step-00000001", name))
				if err != nil {
					t.Fatal(err)
				}
				files[name] = string(text)
			}
			return o, chosen, files
		}
		copyOf := func(o outcome) (n int64) {
			for _, c := range o.table {
				if strings.HasPrefix(c.Name, "checkpoint copy") {
					n += c.Bytes
				}
			}
			return n
		}
		const seldom = 1e8 // steps, so that the wait is short beside them
		want, whole, files := train("auto", seldom, 0)
		size := copyOf(want)
		if size == 0 || whole.Waits {
			t.Fatalf("a copy of %d bytes, choice %+v", size, whole)
		}
		bytes := model.Bytes(want.table)
		if on != nil {
			bytes = model.HostBytes(want.table)
		}
		limit := float64(bytes - size/100)
		for _, x := range []struct {
			copy         string
			every        int64
			limit        float64
			waits, again bool
		}{
			{"auto", seldom, limit, true, false}, {"on", seldom, limit, false, true}, {"off", seldom, 0, false, false},
			{"auto", 1, limit, false, true}, {"", seldom, limit, true, false},
		} {
			if on != nil && !x.waits && x.limit > 0 {
				continue // what is offloaded by the job's word cannot be recomputed instead
			}
			o, c, got := train(x.copy, x.every, x.limit)
			if c.Waits != x.waits || (copyOf(o) == 0) != (x.waits || x.copy == "off") ||
				c.Extra > whole.Extra+1e-3 != x.again {
				t.Errorf("%+v: %+v, with a copy of %d bytes", x, c, copyOf(o))
			}
			if !x.again && (fmt.Sprint(o.losses, o.weights) != fmt.Sprint(want.losses, want.weights)) {
				t.Errorf("%+v: losses %v, want %v", x, o.losses, want.losses)
			}
			for name := range files {
				if !x.again && got[name] != files[name] {
					t.Errorf("%+v: %s differs", x, name)
				}
			}
		}
	}
}

// While a rank writes its files of a checkpoint, the ranks communicate, with a copy of the state
// and without: a rank that waited for it in one call would end the job after parallel.timeout.
func TestSlowFilesOfARank(t *testing.T) {
	for every := range int64(2) {
		calls, dir := make(chan struct{}), t.TempDir()
		x := run{model: "llama", ranks: 2, ulysses: 2, optimizer: "sgd", compute: tensor.F32, steps: 2, stop: true,
			keep: &Checkpoints{Dir: dir, Every: every, Keep: 1,
				Model: func(string) error { return gathers.Wait(calls) }}}
		dataset := config(48, file(t, dir, "a.txt", strings.Repeat("the cat sat on the mat. ", 20)))
		dataset.Accumulate, dataset.Batch = 1, 1
		if err := comm.RunLocal(x.ranks, func(c comm.Comm) error {
			_, err := x.rank(gathers.New(c, calls), &dataset)
			return err
		}); err != nil {
			t.Errorf("checkpoint.every = %d: %v", every, err)
		}
	}
}
