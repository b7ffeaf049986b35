package model

import (
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/mpitest"
)

// MoveBiases moves the bias of each expert of a layer towards equal loads by the rate. An expert
// with the mean load keeps its bias.
func TestMoveBiases(t *testing.T) {
	ranks(t, 1, func(c comm.Comm) error {
		r := newRank(c, configs(t)["biased"], 1, false)
		defer r.close()
		m := r.Model
		m.bias.make(m.Config, true)
		for i, n := range []float64{4, 0, 8, 4, 4 /* layer 1: */, 0, 0, 0, 0, 0} {
			m.Choices()[i] = n
		}
		if load := m.ExpertLoad(); load != 2 {
			t.Errorf("the largest load is %v times the mean, want 2", load)
		}
		m.MoveBiases(0.25)
		want := [][]float32{{0, 0.25, -0.25, 0, 0}, {0, 0, 0, 0, 0}}
		for i, b := range m.Biases() {
			if !slices.Equal(b.Values, want[i]) {
				t.Errorf("%s is %v, want %v", b.Name, b.Values, want[i])
			}
		}
		if m.ExpertLoad() != 0 {
			t.Error("choices are counted again after MoveBiases")
		}
		if err := m.SetBiases(m.Biases()[1:]); status.Of(err) != status.InvalidConfig {
			t.Errorf("biases of one layer: %v", err)
		}
		return nil
	})
}

// Choices has the choices of each layer by tokens with a target, of the whole sequence on each of
// its ranks, and the sum over passes. Here the biases alone choose.
func TestChoices(t *testing.T) {
	cfg := configs(t)["biased"]
	s := documents(cfg.VocabSize, 9, 1, 13, 4)
	for _, n := range append(mpitest.Sizes(), 1) {
		ranks(t, n, func(c comm.Comm) error {
			r := newRank(c, cfg, int64(len(s.ids)), true)
			defer r.close()
			r.set(weights(r.Model))
			r.bias.make(cfg, true)
			r.SetSequences(mostDocuments)
			copy(r.bias.values, []float32{0, 0, 10, 0, 10 /* layer 1: */, 10, 10, 0, 0, 0})
			b := shard(c, s)
			table, err := r.Memory(b.SP.Rows(), int64(len(s.ids)), true)
			must(err)
			r.c.Arena.Free()
			r.c.Arena, err = device.NewArena(r.dev, "activations", Bytes(table))
			must(err)
			for pass := 1.0; pass <= 2; pass++ {
				if _, err := r.ForwardBackward(r.c, b); err != nil {
					return err
				}
				all := pass * float64(s.valid())
				if want := []float64{0, 0, all, 0, all, all, all, 0, 0, 0}; !slices.Equal(r.Choices(), want) {
					t.Errorf("rank %d of %d: choices %v after pass %v, want %v", c.Rank(), n, r.Choices(), pass, want)
				}
			}
			return nil
		})
	}
}

// A folder has the biases beside the routers in F32. Biases that are missing, of another shape, not
// finite or not in the configuration are refused. A configuration that gets biases begins with 0.
func TestFoldersWithBiases(t *testing.T) {
	ranks(t, 1, func(c comm.Comm) error {
		r := newRank(c, configs(t)["biased"], 1, false)
		defer r.close()
		dir := filepath.Join(t.TempDir(), "model")
		must(r.Save(dir, Source{}, func(p Portion) (tensor.Tensor, error) {
			n := r.Groups()[p.Index].Numel()
			return tensor.OfFloat32(r.values[p.Index], n), nil
		}))
		load := func(dir string, change func(*Config)) ([]BiasTensor, error) {
			f, err := OpenFolder(dir, nil)
			if err != nil {
				return nil, err
			}
			defer f.Close()
			change(f.Config)
			x := newRank(c, f.Config, 1, false)
			defer x.close()
			if err := f.Load(x.Model); err != nil {
				return nil, err
			}
			return x.Biases(), nil
		}
		same := func(*Config) {}
		got, err := load(dir, same)
		if err != nil {
			return err
		}
		for i, b := range r.Biases() {
			if got[i].Name != b.Name || !slices.Equal(got[i].Values, b.Values) {
				t.Errorf("%+v was read, %+v written", got[i], b)
			}
		}
		const name = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
		f, err := tensor.OpenSafetensors(filepath.Join(dir, weightsFile))
		if err != nil {
			return err
		}
		defer f.Close()
		if e, ok := f.Entry(name); !ok || e.DType != tensor.F32 || !slices.Equal(e.Shape, []int64{5}) {
			t.Errorf("%v in the file", e)
		}
		all := map[string]tensor.Tensor{}
		for _, e := range f.Entries() {
			x := make([]float32, e.Numel())
			must(f.ReadFloat32(e, 0, x))
			all[e.Name] = tensor.OfFloat32(x, e.Shape...)
		}
		text, err := os.ReadFile(filepath.Join(dir, configFile))
		if err != nil {
			return err
		}
		write := func(tensors map[string]tensor.Tensor, config string) string {
			to := t.TempDir()
			must(os.WriteFile(filepath.Join(to, configFile), []byte(config), 0o666))
			var items []tensor.Item
			for _, name := range slices.Sorted(maps.Keys(tensors)) {
				items = append(items, tensor.Item{Name: name, Tensor: tensors[name]})
			}
			must(tensor.WriteSafetensors(filepath.Join(to, weightsFile), nil, items))
			return to
		}
		with := func(x ...float32) map[string]tensor.Tensor {
			all := maps.Clone(all)
			delete(all, name)
			if len(x) > 0 {
				all[name] = tensor.OfFloat32(x, int64(len(x)))
			}
			return all
		}
		config := string(text)
		if !strings.Contains(config, `"use_expert_bias": true`) {
			t.Fatalf("config.json: %s", config)
		}
		plain := strings.Replace(config, `"use_expert_bias": true`, `"use_expert_bias": false`, 1)
		for what, x := range map[string]struct {
			dir, want string
			code      status.Code
		}{
			"missing": {write(with(), config), name + "[5] is missing", status.InvalidConfig},
			"another shape": {write(with(1, 2), config), "config.json says [5] (num_local_experts)",
				status.InvalidConfig},
			"not finite": {write(with(1, 2, float32(math.NaN()), 4, 5), config), "NaN", status.Numeric},
			"not wanted": {write(all, plain), "is not a parameter of a mixtral", status.InvalidConfig},
		} {
			if _, err := load(x.dir, same); status.Of(err) != x.code || !strings.Contains(err.Error(), x.want) {
				t.Errorf("%s: %v, want %q", what, err, x.want)
			}
		}
		none := maps.Clone(all)
		for _, b := range r.Biases() {
			delete(none, b.Name)
		}
		got, err = load(write(none, plain), func(c *Config) { must(c.AddExpertBias()) })
		if err != nil || len(got) != 2 || !slices.Equal(got[1].Values, make([]float32, 5)) {
			t.Errorf("new biases %v: %v", got, err)
		}
		if err := configs(t)["llama"].AddExpertBias(); status.Of(err) != status.InvalidConfig {
			t.Errorf("a model without experts: %v", err)
		}
		return nil
	})
}
