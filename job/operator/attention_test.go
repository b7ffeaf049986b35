package operator

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/tensor"
	"ulysses/testkit/tensorfile"
)

// attend runs a job of kind "attention" on goroutine ranks.
func attend(ranks int, t *file.AttentionTable) error {
	j := file.Default()
	j.Kind, j.Attention = "attention", *t
	return onRanks(ranks, &j)
}

func attentionTable(input, output string) *file.AttentionTable {
	t := file.Default().Attention
	t.Input, t.Output = input, output
	return &t
}

// Results are within 2e-5 of PyTorch's in float64, relative to the largest element, and the file is
// the same on 1 and 2 ranks.
func TestAttentionGoldens(t *testing.T) {
	inputs, err := filepath.Glob("../../testdata/goldens/attention-*/in.safetensors")
	if err != nil || len(inputs) < 3 {
		t.Fatalf("goldens: %v, %v", inputs, err)
	}
	for _, input := range inputs {
		dir := filepath.Dir(input)
		t.Run(filepath.Base(dir), func(t *testing.T) {
			src, err := os.ReadFile(filepath.Join(dir, "job.toml"))
			if err != nil {
				t.Fatal(err)
			}
			j, err := file.Parse(src, filepath.Join(dir, "job.toml"), nil, os.LookupEnv)
			if err != nil {
				t.Fatal(err)
			}
			table := j.Attention
			var one []byte
			for _, ranks := range []int{1, 2, 3, 4, 8} {
				table.Output = filepath.Join(t.TempDir(), "out.safetensors")
				if err := attend(ranks, &table); err != nil {
					t.Fatalf("%d ranks: %v", ranks, err)
				}
				for _, name := range []string{"out", "lse", "dq", "dk", "dv"} {
					got, shape := tensorfile.Read(t, table.Output, name)
					want, wantShape := tensorfile.Read(t, filepath.Join(dir, "expected.safetensors"), name)
					if fmt.Sprint(shape) != fmt.Sprint(wantShape) {
						t.Fatalf("%d ranks: %s is %v, want %v", ranks, name, shape, wantShape)
					}
					if e := tensorfile.Relative(got, want); !(e <= 2e-5) {
						t.Errorf("%d ranks: %s is off by %.3g", ranks, name, e)
					}
				}
				// The file is bitwise equal on 1 and 2 ranks unless 2 ranks share a key head.
				if data, err := os.ReadFile(table.Output); err != nil {
					t.Fatal(err)
				} else if ranks == 1 {
					one = data
				} else if ranks == 2 && filepath.Base(dir) != "attention-dv" && !bytes.Equal(data, one) {
					t.Error("the files of 2 ranks and of 1 rank differ")
				}
			}
		})
	}
}

// Each fault has an error with its fix and the right code, on every number of ranks, and no file
// remains.
func TestAttentionFaults(t *testing.T) {
	with := func(more map[string][]int64) map[string][]int64 {
		m := map[string][]int64{"q": {6, 4, 8}, "k": {6, 2, 8}, "v": {6, 2, 8}}
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
		spoil  func(t *file.AttentionTable)
		code   status.Code
		want   []string
	}{
		{name: "scale", shapes: good, spoil: func(t *file.AttentionTable) { t.Scale = math.Inf(1) },
			code: status.InvalidConfig, want: []string{"scale"}},
		{name: "a tiny cap", shapes: good, spoil: func(t *file.AttentionTable) { t.Softcap = 1e-31 },
			code: status.InvalidConfig, want: []string{"attention.softcap = 1e-31: set a number from 1e-30 to 1e+30"}},
		{name: "a huge cap", shapes: good, spoil: func(t *file.AttentionTable) { t.Softcap = 1e31 },
			code: status.InvalidConfig, want: []string{"attention.softcap = 1e+31"}},
		{name: "not there", shapes: good, spoil: func(t *file.AttentionTable) { t.Input += "x" }, code: status.IO,
			want: []string{"no such file"}},
		{name: "no folder", shapes: good, spoil: func(t *file.AttentionTable) {
			t.Output = filepath.Join(t.Output, "no", "out")
		}, code: status.IO, want: []string{"attention.output"}},
		{name: "a pipe", shapes: good, spoil: func(t *file.AttentionTable) {
			t.Output = filepath.Join(filepath.Dir(t.Input), "pipe")
			if err := syscall.Mkfifo(t.Output, 0o600); err != nil {
				panic(err)
			}
		}, code: status.IO, want: []string{"pipe is a device or a pipe"}},
		{name: "over the input", shapes: good, spoil: func(t *file.AttentionTable) { t.Output = t.Input },
			code: status.InvalidConfig, want: []string{"is attention.input"}},
		{name: "sinks", shapes: with(map[string][]int64{"sinks": {5}}), code: status.InvalidConfig,
			want: []string{"sinks F32[5]", "each head of q, [4]"}},
		{name: "alibi", shapes: with(map[string][]int64{"alibi": {4, 1}}), code: status.InvalidConfig,
			want: []string{"alibi F32[4, 1]", "the axes [heads]"}},
		{name: "block_mask", shapes: with(map[string][]int64{"block_mask": {4, 1, 1}}), code: status.InvalidConfig,
			want: []string{"block_mask F32[4, 1, 1]", "U8"}},
		{name: "blocks without a mask", shapes: good, spoil: func(t *file.AttentionTable) { t.Block = [2]int64{3, 3} },
			code: status.InvalidConfig, want: []string{"attention.block = [3, 3]", "no tensor block_mask"}},
		{name: "unknown", shapes: with(map[string][]int64{"Q": {4}}), code: status.InvalidConfig,
			want: []string{"Q F32[4]", "the names are q, k"}},
		{name: "missing", shapes: map[string][]int64{"q": {6, 4, 8}}, code: status.InvalidConfig,
			want: []string{"no tensor k", "no tensor v"}},
		{name: "axes", shapes: with(map[string][]int64{"q": {6, 32}}), code: status.InvalidConfig,
			want: []string{"q F32[6, 32]", "the axes [tokens, heads, features]"}},
		{name: "empty", shapes: with(map[string][]int64{"q": {0, 4, 8}}), code: status.InvalidConfig,
			want: []string{"q F32[0, 4, 8]", "empty"}},
		{name: "widths", shapes: with(map[string][]int64{"q": {6, 4, 9}}), code: status.InvalidConfig,
			want: []string{"q F32[6, 4, 9]", "same width"}},
		{name: "rows", shapes: with(map[string][]int64{"v": {7, 2, 8}}), code: status.InvalidConfig,
			want: []string{"v F32[7, 2, 8]", "same tokens and heads"}},
		{name: "heads", shapes: with(map[string][]int64{"q": {6, 5, 8}}), code: status.InvalidConfig,
			want: []string{"multiple"}},
		{name: "dout", shapes: with(map[string][]int64{"dout": {6, 4, 9}}), code: status.InvalidConfig,
			want: []string{"dout F32[6, 4, 9]", "[6 4 8]"}},
		{name: "two at once", shapes: with(map[string][]int64{"sinks": {3}, "dout": {6, 4, 9}}),
			spoil: func(t *file.AttentionTable) { t.Scale = math.Inf(1) }, code: status.InvalidConfig,
			want: []string{"sinks", "dout", "scale"}},
		{name: "cu_seqlens start", shapes: good, ints: map[string][]int64{"cu_seqlens": {1, 6}},
			code: status.InvalidConfig, want: []string{"in.safetensors", "start at 0"}},
		{name: "cu_seqlens end", shapes: good, ints: map[string][]int64{"cu_seqlens": {0, 7}},
			code: status.InvalidConfig, want: []string{"end at 6"}},
		{name: "cu_seqlens order", shapes: good, ints: map[string][]int64{"cu_seqlens": {0, 4, 4, 6}},
			code: status.InvalidConfig, want: []string{"must increase"}},
		{name: "cu_seqlens huge", shapes: good, ints: map[string][]int64{"cu_seqlens": make([]int64, 9)},
			code: status.InvalidConfig, want: []string{"cu_seqlens I64[9]"}},
		{name: "keys alone", shapes: good, ints: map[string][]int64{"cu_seqlens_k": {0, 6}}, code: status.InvalidConfig,
			want: []string{"cu_seqlens"}},
		{name: "positions", shapes: good, ints: map[string][]int64{"position_ids": {0, 1, 2}},
			code: status.InvalidConfig, want: []string{"list of 6 integers"}},
		{name: "disagreement", shapes: good,
			ints: map[string][]int64{"position_ids": {0, 1, 2, 0, 1, 2}, "cu_seqlens": {0, 2, 6}},
			code: status.InvalidConfig, want: []string{"disagree", "token 2"}},
		{name: "cross", shapes: map[string][]int64{"q": {6, 4, 8}, "k": {5, 2, 8}, "v": {5, 2, 8}},
			ints: map[string][]int64{"cu_seqlens": {0, 2, 6}}, code: status.InvalidConfig,
			want: []string{"cu_seqlens_k"}},
	} {
		t.Run(x.name, func(t *testing.T) {
			table := attentionTable(tensorfile.Small(t, x.shapes, x.ints),
				filepath.Join(t.TempDir(), "out.safetensors"))
			dir := filepath.Dir(table.Output)
			if x.spoil != nil {
				x.spoil(table)
			}
			for _, ranks := range []int{1, 3} {
				expectError(t, attend(ranks, table), x.code, x.want)
			}
			if left, _ := os.ReadDir(dir); len(left) > 0 {
				t.Errorf("files remain: %v", left)
			}
		})
	}
}

func expectError(t *testing.T, err error, code status.Code, want []string) {
	t.Helper()
	if status.Of(err) != code {
		t.Errorf("%v: code %v, want %v", err, status.Of(err), code)
	}
	for _, w := range want {
		if err == nil || !strings.Contains(err.Error(), w) {
			t.Errorf("%v: want it to say %q", err, w)
		}
	}
	if err != nil && regexp.MustCompile(`\b(sp|gdn|tensor)\.[A-Z]`).MatchString(err.Error()) {
		t.Errorf("%v: it names a Go function", err)
	}
}

// All ranks return the error of the rank that reads NaN or Inf.
func TestAttentionRefusesNaN(t *testing.T) {
	x := make([]float32, 6*2*4)
	x[(5*2+1)*4+3] = float32(math.NaN())
	y := make([]float32, 6*2*4)
	path := filepath.Join(t.TempDir(), "in.safetensors")
	err := tensor.WriteSafetensors(path, nil, []tensor.Item{{Name: "q", Tensor: tensor.OfFloat32(y, 6, 2, 4)},
		{Name: "k", Tensor: tensor.OfFloat32(x, 6, 2, 4)}, {Name: "v", Tensor: tensor.OfFloat32(y, 6, 2, 4)}})
	if err != nil {
		t.Fatal(err)
	}
	for _, ranks := range []int{1, 3} {
		expectError(t, attend(ranks, attentionTable(path, path+".out")), status.Numeric, []string{"k[5, 1, 3] is NaN"})
	}
	if _, err := os.Stat(path + ".out"); err == nil {
		t.Error("an output was written")
	}
}

// Tensors in BF16 and F16 give the same result as the same numbers in F32.
func TestAttentionReadsHalfPrecision(t *testing.T) {
	dir := t.TempDir()
	want := ""
	for i, dtype := range []tensor.DType{tensor.F32, tensor.BF16, tensor.F16} {
		var items []tensor.Item
		for _, name := range []string{"q", "k", "v"} {
			raw := make([]byte, 0, 6*2*4*4)
			for j := range 6 * 2 * 4 {
				v := float32(j%7) - 3 // exact in all three
				switch u := math.Float32bits(v); dtype {
				case tensor.F32:
					raw = append(raw, byte(u), byte(u>>8), byte(u>>16), byte(u>>24))
				case tensor.BF16:
					raw = append(raw, byte(u>>16), byte(u>>24))
				case tensor.F16:
					h := halfBits[v]
					raw = append(raw, byte(h), byte(h>>8))
				}
			}
			items = append(items,
				tensor.Item{Name: name, Tensor: tensor.Of(nil, dtype, 6, 2, 4), Write: writeBytes(raw)})
		}
		in, out := filepath.Join(dir, fmt.Sprint(i)), filepath.Join(dir, fmt.Sprint("out", i))
		if err := tensor.WriteSafetensors(in, nil, items); err != nil {
			t.Fatal(err)
		}
		if err := attend(2, attentionTable(in, out)); err != nil {
			t.Fatal(err)
		}
		got, _ := tensorfile.Read(t, out, "out")
		if i == 0 {
			want = fmt.Sprint(got)
		} else if fmt.Sprint(got) != want {
			t.Errorf("%v: %v, want %v", dtype, got, want)
		}
	}
}

func writeBytes(raw []byte) func(io.Writer) error {
	return func(w io.Writer) error { _, err := w.Write(raw); return err }
}

var halfBits = map[float32]uint16{-3: 0xc200, -2: 0xc000, -1: 0xbc00, 0: 0, 1: 0x3c00, 2: 0x4000, 3: 0x4200}

// The forward and backward pass of 32,768 tokens run in a process with a limit of 384 MiB. The
// matrix of scores would have 4 GiB.
func TestAttentionLongInLittleMemory(t *testing.T) {
	const rows, limit = 32768, 384 << 20
	if dir := os.Getenv("ULYSSES_TEST_LONG"); dir != "" {
		err := comm.RunLocal(1, func(c comm.Comm) error {
			d, _, err := backends.Open(backends.Choice{Backend: "cpu"})
			if err != nil {
				return err
			}
			j := file.Default()
			j.Kind, j.Attention = "attention", *attentionTable(filepath.Join(dir, "in"), filepath.Join(dir, "out"))
			_, err = compute(&j, d, c)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		text, _ := os.ReadFile("/proc/self/status")
		fmt.Printf("%s", text)
		return
	}
	if testing.Short() {
		t.Skip("takes several seconds")
	}
	dir := t.TempDir()
	var items []tensor.Item
	for i, name := range []string{"q", "k", "v", "dout"} {
		x := make([]float32, rows*64)
		for j := range x {
			x[j] = float32((j*(2*i+3)+j/64*7)%33-16) / 16
		}
		items = append(items, tensor.Item{Name: name, Tensor: tensor.OfFloat32(x, rows, 1, 64)})
	}
	if err := tensor.WriteSafetensors(filepath.Join(dir, "in"), nil, items); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c",
		fmt.Sprintf("ulimit -d %d && exec %s -test.run TestAttentionLongInLittleMemory", limit>>10, os.Args[0]))
	cmd.Env = append(os.Environ(), "ULYSSES_TEST_LONG="+dir)
	text, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	peak := int64(-1)
	for line := range strings.Lines(string(text)) {
		fmt.Sscanf(line, "VmHWM: %d kB", &peak)
	}
	if peak < 0 || peak<<10 > limit {
		t.Errorf("the peak memory of the process is %d KiB", peak)
	}
	t.Logf("peak %d KiB", peak)
	if out, _ := tensorfile.Read(t, filepath.Join(dir, "out"), "dq"); tensorfile.Relative(out, out) != 0 {
		t.Error("dq has NaN")
	}
}
