package operator

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/tensor"
	"ulysses/testkit/tensorfile"
)

// delta runs a job of kind "gdn" on goroutine ranks.
func delta(ranks int, table *file.GDNTable) error {
	j := file.Default()
	j.Kind, j.GDN = "gdn", *table
	return onRanks(ranks, &j)
}

// compute runs an operator job on the ranks of c.
func compute(j *file.Job, d device.Device, c comm.Comm) (*Report, error) {
	mesh, err := comm.NewMesh(c, 0, int(j.Parallel.Ring), comm.NewLedger(), nil, nil)
	if err != nil {
		return nil, err
	}
	r, err := Open(j, d, mesh, nil, tensor.F32, c.Rank() == 0)
	if err != nil {
		return nil, err
	}
	_, output := j.OperatorFiles()
	return r.Do(*output, 0, func(err error) error { return err })
}

// onRanks runs an operator job on goroutine ranks and compares the bytes sent with the formula.
func onRanks(ranks int, j *file.Job) error {
	return comm.RunLocal(ranks, func(c comm.Comm) error {
		d, _, err := backends.Open(backends.Choice{Backend: "cpu", Threads: 1, RanksOnNode: ranks})
		if err != nil {
			return err
		}
		defer d.Close()
		r, err := compute(j, d, c)
		if err == nil && (r.Sent != r.Formula || ranks > 1 && r.Sent == 0 && c.Rank() == 0) {
			err = fmt.Errorf("%d bytes sent in the passes, planned %d", r.Sent, r.Formula)
		}
		return err
	})
}

func gdnTable(input, output string) *file.GDNTable {
	t := file.Default().GDN
	t.Input, t.Output = input, output
	return &t
}

// Results of both strategies are within 2e-5 of PyTorch's recurrence in float64, relative to the
// largest element. With strategy heads the file is the same on any number of ranks.
func TestGDNGoldens(t *testing.T) {
	inputs, err := filepath.Glob("../../testdata/goldens/gdn-*/in.safetensors")
	if err != nil || len(inputs) < 3 {
		t.Fatalf("goldens: %v, %v", inputs, err)
	}
	for _, input := range inputs {
		dir := filepath.Dir(input)
		src, err := os.ReadFile(filepath.Join(dir, "job.toml"))
		if err != nil {
			t.Fatal(err)
		}
		for _, strategy := range []string{"heads", "state"} {
			t.Run(filepath.Base(dir)+"/"+strategy, func(t *testing.T) {
				j, err := file.Parse(src, filepath.Join(dir, "job.toml"), []string{"gdn.strategy=" + strategy},
					os.LookupEnv)
				if err != nil {
					t.Fatal(err)
				}
				table := j.GDN
				var one []byte
				for _, ranks := range []int{1, 2, 3, 4, 8} {
					table.Output = filepath.Join(t.TempDir(), "out.safetensors")
					if err := delta(ranks, &table); err != nil {
						t.Fatalf("%d ranks: %v", ranks, err)
					}
					data := sameAs(t, fmt.Sprintf("%d ranks", ranks), table.Output,
						filepath.Join(dir, "expected.safetensors"))
					if ranks == 1 {
						one = data
					} else if strategy == "heads" && !bytes.Equal(data, one) {
						t.Errorf("the files of %d ranks and of 1 rank differ", ranks)
					}
				}
			})
		}
	}
}

// sameAs compares the tensors of a file with the tensors of the same names in another file, and
// returns the bytes of the first.
func sameAs(t *testing.T, what, path, expected string) []byte {
	t.Helper()
	f, err := tensor.OpenSafetensors(expected)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, e := range f.Entries() {
		want, wantShape := tensorfile.Read(t, expected, e.Name)
		got, shape := tensorfile.Read(t, path, e.Name)
		if fmt.Sprint(shape) != fmt.Sprint(wantShape) {
			t.Fatalf("%s: %s is %v, want %v", what, e.Name, shape, wantShape)
		}
		if e := tensorfile.Relative(got, want); !(e <= 2e-5) {
			t.Errorf("%s: %s is off by %.3g", what, f.Path, e)
		}
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// Each fault has an error with its fix and the right code, on every number of ranks, and no file
// remains.
func TestGDNFaults(t *testing.T) {
	with := func(more map[string][]int64) map[string][]int64 {
		m := map[string][]int64{"q": {6, 2, 8}, "k": {6, 2, 8}, "v": {6, 4, 5}, "g": {6, 4}, "beta": {6, 4}}
		for k, v := range more {
			m[k] = v
		}
		return m
	}
	good := with(nil)
	for _, x := range []struct {
		name   string
		shapes map[string][]int64
		ints   map[string][]int64
		spoil  func(t *file.GDNTable)
		code   status.Code
		want   []string
	}{
		{name: "scale", shapes: good, spoil: func(t *file.GDNTable) { t.Scale = math.Inf(1) },
			code: status.InvalidConfig, want: []string{"gdn.scale"}},
		{name: "chunk", shapes: good, spoil: func(t *file.GDNTable) { t.Chunk = 8 }, code: status.InvalidConfig,
			want: []string{"chunk 8", "16"}},
		{name: "not there", shapes: good, spoil: func(t *file.GDNTable) { t.Input += "x" }, code: status.IO,
			want: []string{"gdn.input", "no such file"}},
		{name: "over the input", shapes: good, spoil: func(t *file.GDNTable) { t.Output = t.Input },
			code: status.InvalidConfig, want: []string{"is gdn.input"}},
		{name: "unknown", shapes: with(map[string][]int64{"z": {4}}), code: status.InvalidConfig,
			want: []string{"z F32[4]", "the names are q, k"}},
		{name: "missing", shapes: map[string][]int64{"q": {6, 4, 8}, "k": {6, 4, 8}, "v": {6, 4, 8}},
			code: status.InvalidConfig, want: []string{"no tensor g", "no tensor beta"}},
		{name: "axes", shapes: with(map[string][]int64{"g": {6, 4, 1}}), code: status.InvalidConfig,
			want: []string{"g F32[6, 4, 1]", "[tokens, heads]"}},
		{name: "heads", shapes: with(map[string][]int64{"v": {6, 3, 5}, "g": {6, 3}, "beta": {6, 3}}),
			code: status.InvalidConfig, want: []string{"multiple"}},
		{name: "keys", shapes: with(map[string][]int64{"k": {6, 2, 9}}), code: status.InvalidConfig,
			want: []string{"k F32[6, 2, 9]", "[6 2 8]"}},
		{name: "rows", shapes: with(map[string][]int64{"beta": {5, 4}}), code: status.InvalidConfig,
			want: []string{"beta F32[5, 4]", "[6 4]"}},
		{name: "dout", shapes: with(map[string][]int64{"dout": {6, 4, 8}}), code: status.InvalidConfig,
			want: []string{"dout F32[6, 4, 8]", "[6 4 5]"}},
		{name: "state", shapes: with(map[string][]int64{"state_in": {2, 4, 8, 5}}), code: status.InvalidConfig,
			want: []string{"state_in", "[1 4 8 5]"}},
		{name: "states", shapes: with(map[string][]int64{"state_in": {1, 4, 8, 5}}),
			ints: map[string][]int64{"cu_seqlens": {0, 2, 6}}, code: status.InvalidConfig,
			want: []string{"state_in", "[2 4 8 5]"}},
		{name: "dstate_out alone", shapes: with(map[string][]int64{"dstate_out": {1, 4, 8, 5}}),
			code: status.InvalidConfig, want: []string{"without dout"}},
		{name: "cu_seqlens end", shapes: good, ints: map[string][]int64{"cu_seqlens": {0, 7}},
			code: status.InvalidConfig, want: []string{"in.safetensors", "end at 6"}},
		{name: "negative positions", shapes: good, ints: map[string][]int64{"position_ids": {0, 1, 2, -1, 0, 1}},
			code: status.InvalidConfig, want: []string{"position -1 of token 3"}},
	} {
		t.Run(x.name, func(t *testing.T) {
			table := gdnTable(tensorfile.Small(t, x.shapes, x.ints), filepath.Join(t.TempDir(), "out.safetensors"))
			dir := filepath.Dir(table.Output)
			if x.spoil != nil {
				x.spoil(table)
			}
			for _, ranks := range []int{1, 3} {
				expectError(t, delta(ranks, table), x.code, x.want)
			}
			if left, _ := os.ReadDir(dir); len(left) > 0 {
				t.Errorf("files remain: %v", left)
			}
		})
	}
}

// All ranks return the error of the rank that reads a decay above 0 or a beta of NaN, before any
// all-to-all.
func TestGDNRefusesValues(t *testing.T) {
	for _, x := range []struct {
		name  string
		value float32
		want  []string
	}{
		{"g", 0.25, []string{"g[4, 1] is 0.25", "at most 0", "-exp(A_log)"}},
		{"beta", float32(math.NaN()), []string{"beta[4, 1] is NaN", "finite"}},
		{"state_in", float32(math.Inf(1)), []string{"state_in[0, 1, 0, 0] is +Inf"}},
	} {
		shapes := map[string][]int64{"q": {6, 2, 4}, "k": {6, 2, 4}, "v": {6, 2, 4}, "g": {6, 2}, "beta": {6, 2},
			"state_in": {1, 2, 4, 4}}
		var items []tensor.Item
		for name, shape := range shapes {
			values := make([]float32, tensor.Of(nil, tensor.F32, shape...).Numel())
			if name == x.name {
				values[map[bool]int{true: 16, false: 9}[name == "state_in"]] = x.value
			}
			items = append(items, tensor.Item{Name: name, Tensor: tensor.OfFloat32(values, shape...)})
		}
		path := filepath.Join(t.TempDir(), "in.safetensors")
		if err := tensor.WriteSafetensors(path, nil, items); err != nil {
			t.Fatal(err)
		}
		for _, ranks := range []int{1, 3} {
			expectError(t, delta(ranks, gdnTable(path, path+".out")), status.Numeric, x.want)
		}
		if _, err := os.Stat(path + ".out"); err == nil {
			t.Error("an output was written")
		}
	}
}
