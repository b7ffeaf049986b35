package model

import (
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Matrices in MXFP4 are read as the numbers that they are, and written as BF16 with the names of
// transformers. The first bytes have the values that transformers 5.23 computes from them.
func TestMXFP4(t *testing.T) {
	cfg, err := configs(t)["gpt_oss_moe"].Override(map[string]any{"hidden_size": int64(64),
		"intermediate_size": int64(32), "num_local_experts": int64(3), "num_hidden_layers": int64(2)})
	must(err)
	text, err := cfg.JSON()
	must(err)
	quantized := with(t, string(text),
		`"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, "torch_dtype": "bfloat16"`)
	cfg, err = ParseConfig(quantized)
	must(err)
	const e, in, f, block = 3, 64, 32, 32
	random := rand.New(rand.NewPCG(5, 6))
	write := func(t *testing.T, change func(items []tensor.Item) []tensor.Item) (dir string,
		matrices map[string][]byte) {
		dir, matrices = t.TempDir(), map[string][]byte{}
		must(os.WriteFile(filepath.Join(dir, configFile), quantized, 0o600))
		ranks(t, 1, func(c comm.Comm) error {
			r := newRank(c, cfg, 1, false)
			defer r.close()
			w := weights(r.Model)
			var items []tensor.Item
			for _, g := range r.Groups() {
				for _, p := range g.Params {
					if !p.expert {
						items = append(items,
							tensor.Item{Name: p.Name, Tensor: tensor.OfFloat32(w[p.Name], p.Shape...)})
					}
				}
			}
			for layer := range int64(2) {
				for kind, shape := range map[string][2]int64{ossGateUp: {in, 2 * f}, ossDown: {f, in}} {
					name := "model.layers." + string(rune('0'+layer)) + ossExperts + kind
					bytes, scales := make([]byte, e*shape[1]*shape[0]/2), make([]byte, e*shape[1]*shape[0]/block)
					for i := range bytes {
						bytes[i] = byte(random.Uint32())
					}
					for i := range scales {
						scales[i] = byte(120 + random.IntN(9))
					}
					copy(bytes, []byte{0x21, 0xf7, 0x9b})
					scales[0] = 127
					matrices[name+mxBlocks], matrices[name+mxScales] = bytes, scales
					items = append(items,
						tensor.Item{Name: name + mxBlocks,
							Tensor: bytesTensor(bytes, e, shape[1], shape[0]/block, block/2)},
						tensor.Item{Name: name + mxScales,
							Tensor: bytesTensor(scales, e, shape[1], shape[0]/block)},
						tensor.Item{Name: name + ossBias,
							Tensor: tensor.OfFloat32(make([]float32, e*shape[1]), e, shape[1])})
				}
			}
			return tensor.WriteSafetensors(filepath.Join(dir, weightsFile), nil, change(items))
		})
		return dir, matrices
	}
	dir, matrices := write(t, func(items []tensor.Item) []tensor.Item { return items })
	folder, err := OpenFolder(dir, nil)
	must(err)
	defer folder.Close()
	out := filepath.Join(t.TempDir(), "saved")
	ranks(t, 1, func(c comm.Comm) error {
		r := newRank(c, cfg, 1, false)
		defer r.close()
		must(folder.Load(r.Model))
		for _, g := range r.Groups() {
			for _, p := range g.Params {
				layer, expert, kind, ok := cfg.ossParam(p.Name)
				if !ok || strings.HasSuffix(kind, ossBias) {
					continue
				}
				name, rows, columns := layer+ossExperts+kind, p.Shape[0], p.Shape[1]
				for i, x := range p.Value.View(p.Numel()).Float32s() {
					row, column := int64(i)/columns, int64(i)%columns
					if kind == ossGateUp { // gate has the even columns of the file, up the odd ones
						column = column%f*2 + column/f
					}
					at := (expert*columns+column)*rows + row // [expert, out, in]
					half := matrices[name+mxBlocks][at/2] >> (4 * (at % 2)) & 15
					want := float64([]float32{0, .5, 1, 1.5, 2, 3, 4, 6}[half&7]) * math.Ldexp(1,
						int(matrices[name+mxScales][at/block])-127)
					if half > 7 {
						want = -want
					}
					if float64(x) != want {
						t.Fatalf("%s[%d] = %v, want %v", p.Name, i, x, want)
					}
				}
				if kind == ossDown && expert == 0 {
					var first []float32
					for i := range int64(6) {
						first = append(first, p.Value.Float32s()[i*columns])
					}
					if !slices.Equal(first, []float32{.5, 1, 6, -6, -1.5, -.5}) {
						t.Errorf("%s begins with %v", p.Name, first)
					}
				}
			}
		}
		return r.Save(out, Source{Base: dir}, r.whole)
	})
	saved, err := OpenFolder(out, nil)
	must(err)
	defer saved.Close()
	for name, at := range folder.where {
		if other := saved.where[name]; other.decode != nil || at.decode != nil && other.entry.DType != tensor.BF16 {
			t.Errorf("%s is saved as %v", name, other.entry)
		}
		a, b := make([]float32, at.entry.Numel()), make([]float32, at.entry.Numel())
		must(folder.Read(name, 0, a))
		must(saved.Read(name, 0, b))
		if !slices.Equal(a, b) {
			t.Errorf("%s changes when it is saved", name)
		}
	}
	if written, err := os.ReadFile(filepath.Join(out, configFile)); err != nil ||
		strings.Contains(string(written), "quantization_config") {
		t.Errorf("%s, %v", written, err)
	}

	for what, change := range map[string]struct {
		change func(items []tensor.Item) []tensor.Item
		want   string
	}{
		"no scales": {func(items []tensor.Item) []tensor.Item {
			return slices.DeleteFunc(items, func(x tensor.Item) bool {
				return strings.HasSuffix(x.Name, "1"+ossExperts+ossDown+mxScales)
			})
		}, "has blocks without scales"},
		"another shape": {func(items []tensor.Item) []tensor.Item {
			for i, x := range items {
				if strings.HasSuffix(x.Name, ossGateUp+mxScales) {
					items[i].Tensor = x.Tensor.View(e*2*f, in/block)
				}
			}
			return items
		}, "config.json says U8[3 64 2 16] and U8[3 64 2]"},
		"a scale that is not a number": {func(items []tensor.Item) []tensor.Item {
			for _, x := range items {
				if strings.HasSuffix(x.Name, ossDown+mxScales) {
					*(*byte)(x.Tensor.Data) = 255
				}
			}
			return items
		}, "the weights are damaged"},
	} {
		dir, _ := write(t, change.change)
		f, err := OpenFolder(dir, nil)
		if err == nil {
			ranks(t, 1, func(c comm.Comm) error {
				r := newRank(c, cfg, 1, false)
				defer r.close()
				err = f.Load(r.Model)
				return nil
			})
			f.Close()
		}
		if code := status.Of(err); code != status.InvalidConfig && code != status.Numeric ||
			!strings.Contains(err.Error(), change.want) {
			t.Errorf("%s: %v, want %q", what, err, change.want)
		}
	}
	if _, err := ParseConfig(with(t, string(text),
		`"quantization_config": {"quant_method": "bitsandbytes"}`)); status.Of(err) != status.Unsupported {
		t.Errorf("another quantization: %v", err)
	}
}

func bytesTensor(x []byte, shape ...int64) tensor.Tensor {
	return tensor.Of(unsafe.Pointer(unsafe.SliceData(x)), tensor.U8, shape...)
}
