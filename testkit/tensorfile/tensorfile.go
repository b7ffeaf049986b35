// Package tensorfile writes and reads safetensors files in tests.
package tensorfile

import (
	"maps"
	"math"
	"path/filepath"
	"slices"
	"testing"

	"ulysses/tensor"
)

// Read returns the values and the shape of a tensor in a file.
func Read(t *testing.T, path, name string) ([]float32, []int64) {
	t.Helper()
	f, err := tensor.OpenSafetensors(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	e, ok := f.Entry(name)
	if !ok {
		t.Fatalf("%s has no %s", path, name)
	}
	x := make([]float32, e.Numel())
	if err := f.ReadFloat32(e, 0, x); err != nil {
		t.Fatal(err)
	}
	return x, e.Shape
}

// Relative returns max|got-want| / max|want|. Equal infinities are skipped. NaN in either slice
// gives NaN.
func Relative(got, want []float32) float64 {
	delta, largest := 0.0, 0.0
	for i, w := range want {
		if math.IsInf(float64(w), 0) && got[i] == w {
			continue
		}
		d := math.Abs(float64(got[i]) - float64(w))
		if d != d {
			return math.NaN()
		}
		delta, largest = max(delta, d), max(largest, math.Abs(float64(w)))
	}
	return delta / largest
}

// Small writes a file of F32 tensors with small numbers, and of I64 tensors with ints, and returns
// its path.
func Small(t *testing.T, shapes map[string][]int64, ints map[string][]int64) string {
	t.Helper()
	var items []tensor.Item
	for _, name := range slices.Sorted(maps.Keys(shapes)) {
		shape := shapes[name]
		x := make([]float32, tensor.Of(nil, tensor.F32, shape...).Numel())
		for i := range x {
			x[i] = float32((i*37+len(name))%17-8) / 8
		}
		items = append(items, tensor.Item{Name: name, Tensor: tensor.OfFloat32(x, shape...)})
	}
	for name, x := range ints {
		items = append(items, tensor.Item{Name: name, Tensor: tensor.OfInt64(x, int64(len(x)))})
	}
	path := filepath.Join(t.TempDir(), "in.safetensors")
	if err := tensor.WriteSafetensors(path, nil, items); err != nil {
		t.Fatal(err)
	}
	return path
}

// Filled writes a file of F32 tensors, each filled with its value and then changed by its function
// in spoil, and returns its path.
func Filled(t *testing.T, shapes map[string][]int64, value map[string]float32,
	spoil map[string]func(x []float32)) string {
	t.Helper()
	var items []tensor.Item
	for _, name := range slices.Sorted(maps.Keys(shapes)) {
		x := slices.Repeat([]float32{value[name]}, int(tensor.Of(nil, tensor.F32, shapes[name]...).Numel()))
		if f := spoil[name]; f != nil {
			f(x)
		}
		items = append(items, tensor.Item{Name: name, Tensor: tensor.OfFloat32(x, shapes[name]...)})
	}
	path := filepath.Join(t.TempDir(), "in.safetensors")
	if err := tensor.WriteSafetensors(path, nil, items); err != nil {
		t.Fatal(err)
	}
	return path
}

// WriteTokens writes a data set of token ids: a safetensors file with the given tensors of
// input_ids, labels and position_ids, each I32 [sequences, length]. It returns the path.
func WriteTokens(t testing.TB, path string, sequences, length int64, tensors map[string][]int64) string {
	t.Helper()
	var list []tensor.Item
	for _, n := range slices.Sorted(maps.Keys(tensors)) {
		x := make([]int32, len(tensors[n]))
		for i, v := range tensors[n] {
			x[i] = int32(v)
		}
		list = append(list, tensor.Item{Name: n, Tensor: tensor.OfInt32(x, sequences, length)})
	}
	if err := tensor.WriteSafetensors(path, nil, list); err != nil {
		t.Fatal(err)
	}
	return path
}
