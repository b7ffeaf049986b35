package job

import (
	"bytes"
	"encoding/json"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// With --json, verify prints its verdict as JSON and nothing else on standard output.
func TestVerifyAsJSON(t *testing.T) {
	code, out, errs := call("verify", "../testdata/goldens/attention-gqa-packed/job.toml", "--json", "-n", "3", "--set",
		"device.backend=cpu",
		"--set", "attention.output="+filepath.Join(t.TempDir(), "out"))
	var r verdict
	if err := json.Unmarshal([]byte(out), &r); code != status.OK || err != nil {
		t.Fatalf("%v %v\n%s%s", code, err, out, errs)
	}
	if r.Ranks != 3 || r.Ulysses != 3 || r.Data != 1 || r.DType != "f32" || r.Kernels == "" || r.Limit != 2e-5 ||
		!r.Same || r.Verdict != "within tolerance" && r.Verdict != "bitwise" || len(r.Tensors) != 5 {
		t.Errorf("%+v", r)
	}
	for _, x := range r.Tensors {
		if x.Name == "" || len(x.Shape) == 0 || !x.Judged || !x.Within || x.Bits && x.Max != 0 ||
			!(float64(x.Relative) <= r.Limit) {
			t.Errorf("%+v", x)
		}
	}
	if code, _, errs := call("plan", "x.toml", "--json"); code != status.InvalidArgument ||
		!strings.Contains(errs, "--json is a flag of verify") {
		t.Errorf("%v %s", code, errs)
	}
}

// NaN and Inf are null in JSON, and a tensor out of tolerance is marked in both forms.
func TestVerdictOfABadRun(t *testing.T) {
	r := verdict{Ranks: 2, Ulysses: 2, Data: 1, Limit: 2e-5, Tensors: []compared{
		{Name: "out", Shape: []int64{2}, Max: quantity(math.Inf(1)), Mean: quantity(math.NaN()), Relative: 0.5,
			Judged: true},
		{Name: "lse", Shape: []int64{2}, Bits: true, Judged: true, Within: true}}}
	var text, table bytes.Buffer
	if err := r.printJSON(&text); err != nil {
		t.Fatal(err)
	}
	var back map[string]any
	if err := json.Unmarshal(text.Bytes(), &back); err != nil || back["same"] != false || back["verdict"] != "FAIL" {
		t.Fatal(err, text.String())
	}
	if x := back["tensors"].([]any)[0].(map[string]any); x["max"] != nil || x["mean"] != nil || x["relative"] != 0.5 ||
		x["within"] != false || x["bits_equal"] != false {
		t.Error(x)
	}
	err := r.print(&table, false)
	if s := table.String(); err != nil ||
		!strings.HasPrefix(s,
			"FAIL: 1 of 2 tensors on 2 ranks (ulysses 2 x data 1) and on one differ by more than 2e-05 of the largest element, by up to 5.0e-01") ||
		strings.Count(s, "FAIL") != 2 || strings.Contains(s, "lse") {
		t.Error(err, s)
	}
	if err := r.printJSON(failing{}); err == nil {
		t.Error("a failed write was not reported")
	}
	if err := r.print(failing{}, false); err == nil {
		t.Error("a failed write was not reported")
	}
}

// The verdict on the judged tensors comes first. A run that passes prints single tensors only with
// --all.
func TestVerdictFirst(t *testing.T) {
	same := compared{Name: "out", Bits: true, Judged: true, Within: true}
	near := compared{Name: "dq", Relative: 3e-7, Judged: true, Within: true}
	shown := compared{Name: "weight updated", Relative: 0.3}
	for _, x := range []struct {
		tensors []compared
		want    string
	}{
		{[]compared{same}, "bitwise: 1 tensor bitwise equal on 1 rank"},
		{[]compared{same, same, shown}, "bitwise: 2 tensors bitwise equal on 1 rank"},
		{[]compared{same, near, shown},
			"within tolerance: 2 tensors on 1 rank (ulysses 1 x data 1) and on one differ by at most 3.0e-07 of the largest element (limit 2e-05); 1 are bitwise equal"},
	} {
		r := verdict{Ranks: 1, Ulysses: 1, Data: 1, Limit: 2e-5, Tensors: x.tensors}
		var short, long bytes.Buffer
		if err := r.print(&short, false); err != nil || !strings.HasPrefix(short.String(), x.want) ||
			strings.Count(short.String(), "\n") != 1 {
			t.Errorf("%v: %q, want %q", err, short.String(), x.want)
		}
		if err := r.print(&long, true); err != nil || !strings.HasPrefix(long.String(), x.want) ||
			strings.Count(long.String(), "\n") != 3+len(x.tensors) {
			t.Errorf("%v: %s", err, long.String())
		}
	}
	dir, _ := newKept(t)
	for args, lines := range map[string]int{"": 1, "-q": 1, "--all": 30} {
		code, out, errs :=
			call(append([]string{"verify", filepath.Join(dir, "job.toml"), "-n", "2"}, strings.Fields(args)...)...)
		if n := strings.Count(out, "\n"); code != status.OK || !strings.HasPrefix(out, "within tolerance: ") ||
			n < lines || n > 1 && lines == 1 || strings.Contains(out, "differ\t") && lines == 1 {
			t.Errorf("%q: %v, %d lines\n%s%s", args, code, n, out, errs)
		}
	}
}

// Gradients that are zero by definition have rounding errors that depend on the ranks. A gradient
// that is small, but not zero up to rounding in both runs, is judged as others are. A large weight
// without a gradient is judged.
func TestZeroGradients(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	for name, x := range map[string]struct {
		kind       tensorKind
		zero       bool // the gradient of the parameter is zero up to rounding
		all, one   float32
		asZero, ok bool
	}{
		"rounding":                 {isGradient, false, 1e-12, 3e-12, true, true},
		"small, and wrong":         {isGradient, false, 1e-5, 1.1e-5, false, false},
		"small, and right":         {isGradient, false, 1e-5, 1.00001e-5, false, true},
		"at the bound":             {isGradient, false, -0x1p-23, 0x1p-24, true, true},
		"above the bound":          {isGradient, false, 0x1.001p-23, 0x1p-24, false, false},
		"above it on one rank":     {isGradient, false, 1e-12, 0x1.001p-23, false, false},
		"NaN":                      {isGradient, false, nan, 1e-12, false, false},
		"Inf":                      {isGradient, false, 1e-12, inf, false, false},
		"another tensor":           {isOther, true, 1e-12, 3e-12, false, false},
		"a weight that was zero":   {isUpdated, true, 1e-12, 3e-12, true, true},
		"a weight that was not":    {isUpdated, true, 1e-3, 1.1e-3, false, false},
		"a weight with a gradient": {isUpdated, false, 1e-12, 3e-12, false, false},
	} {
		run := func(v float32) []named {
			g := float32(1)
			if x.zero {
				g = 1e-12
			}
			return []named{{name: "large gradient", data: []float32{-2, 1}, judged: true, kind: isGradient,
				param: "large"},
				{name: "p gradient", data: []float32{g}, judged: true, kind: isGradient, param: "p"},
				{name: "large updated", data: []float32{2}, judged: true, kind: isUpdated, param: "large"},
				{name: "x", data: []float32{v, 0}, judged: true, kind: x.kind, param: "p"}}
		}
		r := verdict{Limit: 2e-5}
		if err := r.compareAll(run(x.all), run(x.one)); err != nil {
			t.Fatal(err)
		}
		if got := r.Tensors[3]; got.Zero != x.asZero || got.Within != x.ok {
			t.Errorf("%s: %+v", name, got)
		}
		_, far := r.judge()
		if said := strings.Contains(r.sentence(), "; 1 are zero up to rounding"); (far == 0) != x.ok ||
			said != x.asZero {
			t.Errorf("%s: %s", name, r.sentence())
		}
	}
}

// Keys without RoPE have biases without a gradient, and a router of one expert per token has none.
func TestVerifyModelsWithZeroGradients(t *testing.T) {
	for name, fields := range map[string]string{
		"k_proj.bias": `model_type="smollm3",attention_bias=true,intermediate_size=40,no_rope_layers=[1,0]`,
		"gate.weight": `model_type="mixtral",intermediate_size=16,num_local_experts=4,num_experts_per_tok=1,output_router_logits=false`,
	} {
		dir, _ := newKept(t)
		code, out, errs := call("verify", filepath.Join(dir, "job.toml"), "-n", "2", "--all", "--set",
			"optimizer.name=sgd", "--set", "parallel.ulysses=2",
			"--set", `model.new={`+fields+
				`,vocab_size=256,hidden_size=24,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2}`)
		found := false
		for line := range strings.Lines(out) {
			found = found || strings.Contains(line, name+" gradient") &&
				strings.Contains(line, "ok: zero up to rounding")
		}
		if code != status.OK || !found {
			t.Errorf("%s: %v\n%s%s", name, code, out, errs)
		}
	}
}

// In BF16, the biases of keys are measured by their matrices; a bias that is wrong by more fails.
func TestKeyBiasesInBF16(t *testing.T) {
	run := func(bias float32) []named {
		return []named{{name: "a.k_proj.bias gradient", data: []float32{bias}, judged: true, kind: isGradient,
			param: "a.k_proj.bias"},
			{name: "a.k_proj.weight gradient", data: []float32{-1, 0.5}, judged: true, kind: isGradient,
				param: "a.k_proj.weight"}}
	}
	for _, c := range []struct {
		dtype    string
		all, one float32
		ok       bool
	}{{"bf16", 1e-3, 2e-3, true}, {"f32", 1e-3, 2e-3, false}, {"bf16", 0.03, 0.06, false}, {"bf16", 3, 3.01, true},
		{"bf16", float32(math.NaN()), 1e-3, false}} {
		r := verdict{Limit: 2e-2, DType: c.dtype}
		if err := r.compareAll(run(c.all), run(c.one)); err != nil || r.Tensors[0].Within != c.ok {
			t.Errorf("%+v: %+v, %v", c, r.Tensors[0], err)
		}
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

// Losses and gradients of zero are equal on any number of ranks, so verify says that the comparison
// has no meaning.
func TestVerifyWithoutTargets(t *testing.T) {
	dir, _ := newKept(t)
	for _, x := range []struct {
		text, kind string
		warned     bool
	}{{"the cat sat", "train", false}, {"a", "train", true}, {"the cat sat", "eval", false}, {"a", "eval", true}} {
		put(t, filepath.Join(dir, "a.txt"), x.text)
		code, out, errs := call("verify", filepath.Join(dir, "job.toml"), "-n", "2", "--set", "kind="+x.kind)
		warnings := strings.Count(errs, "the comparison has no meaning")
		if code != status.OK || (warnings == 1) != x.warned || warnings > 1 {
			t.Errorf("%+v: exit %v\n%s%s", x, code, out, errs)
		}
	}
}

// A tensor beyond the limit is within tolerance if rounding explains it.
func TestRoundingIsAllowed(t *testing.T) {
	nan := float32(math.NaN())
	for name, x := range map[string]struct {
		all, changed float32 // on one rank the value is 1
		ok           bool
	}{
		"small":                {1 + 1e-5, 5, true},
		"as rounding":          {1 + 5e-5, 1 - 3e-5, true},
		"more than rounding":   {1 + 7e-5, 1 - 3e-5, false},
		"not by rounding":      {1 + 7e-5, 1, false},
		"far, and ill-defined": {1 + 5e-3, 1 + 4e-3, false},
		"NaN":                  {nan, 1 + 4e-3, false},
		"NaN in both":          {nan, nan, false},
	} {
		run := func(v float32) []named {
			return []named{{name: "x", data: []float32{v}, judged: true}, {name: "y", data: []float32{1}, judged: true}}
		}
		r := verdict{Limit: 2e-5}
		err := r.compareAll(run(x.all), run(1))
		if err == nil {
			err = r.allowRounding(run(x.changed), run(1))
		}
		_, far := r.judge()
		said := strings.Contains(r.sentence(), "; 1 beyond the limit differ by less than 2 times as much")
		if err != nil || (far == 0) != x.ok || said != (x.ok && name != "small") {
			t.Errorf("%s: %v, %s", name, err, r.sentence())
		}
	}
}

// A gradient that rounding changes by its own size is zero, also beyond the bound of other zeros.
func TestRoundingErrorsAreZero(t *testing.T) {
	for name, x := range map[string]struct {
		all, one, changed float32 // values of a gradient; the largest one of the model is 1
		ok                bool
	}{
		"noise":               {0x1p-22, 0x1.8p-22, -0x1p-22, true},
		"not by rounding":     {0x1p-22, 0x1.8p-22, 0x1.8p-22, false},
		"changed by a little": {0x1p-22, 0x1.8p-22, 0x1.4p-22, false},
		"too large":           {0x1p-20, 0x1.8p-20, -0x1p-20, false},
		"too large on ranks":  {0x1p-19, 0x1.8p-22, -0x1p-22, false},
		"NaN":                 {float32(math.NaN()), 0x1.8p-22, -0x1p-22, false},
	} {
		run := func(v float32) (out []named) {
			for _, kind := range []tensorKind{isGradient, isUpdated} {
				out = append(out, named{name: "x", param: "x", kind: kind, data: []float32{v}, judged: true},
					named{name: "y", param: "y", kind: kind, data: []float32{1}, judged: true})
			}
			return out
		}
		r := verdict{Limit: 2e-5}
		err := r.compareAll(run(x.all), run(x.one))
		if err == nil {
			err = r.allowRounding(run(x.changed), run(x.one))
		}
		if _, far := r.judge(); err != nil || (far == 0) != x.ok || r.Tensors[0].Zero != x.ok ||
			r.Tensors[2].Zero != x.ok {
			t.Errorf("%s: %v, %s", name, err, r.sentence())
		}
	}
}

// With a limit that every difference exceeds, verify measures what rounding does to each tensor.
func TestVerifyMeasuresRounding(t *testing.T) {
	kept := verifyLimits[tensor.F32]
	verifyLimits[tensor.F32] = 1e-12
	defer func() { verifyLimits[tensor.F32] = kept }()
	ring := []string{"--json", "-n", "2", "--set", "device.backend=cpu", "--set", "parallel.ulysses=1", "--set",
		"parallel.ring=2", "--set", "output.dir=" + t.TempDir()}
	run := func(job string, more ...string) (r verdict) {
		_, out, errs := call(slices.Concat([]string{"verify", job}, ring, more)...)
		if err := json.Unmarshal([]byte(out), &r); err != nil {
			t.Fatalf("%v\n%s%s", err, out, errs)
		}
		return r
	}
	r := run("../testdata/goldens/qwen3-adamw-packed/job.toml")
	measured := 0
	for _, x := range r.Tensors {
		if !x.Judged || x.Bits || x.Zero {
			continue
		}
		if measured++; !(x.Rounding > 0 && x.Rounding < 1e-4) || !x.Within &&
			!(float64(x.Relative) >= float64(x.Rounding)) {
			t.Errorf("%+v", x)
		}
	}
	if measured < 10 {
		t.Errorf("%d tensors were measured: %+v", measured, r)
	}
}

// nudge changes trained and frozen weights that are not zero, each by one bit.
func TestNudge(t *testing.T) {
	dir, base, _ := newLoRA(t, "qwen3_5")
	sets := []string{"model.new={}", "model.path=" + base, "lora.rank=3", "data.tokenizer=bytes", "data.sequence=40",
		"device.backend=cpu"}
	err := onRanks(Options{Path: filepath.Join(dir, "job.toml"), Sets: sets, Ranks: 1, Stdout: io.Discard,
		Stderr: io.Discard}, func(e *Env) error {
		s, err := prepare(e, false)
		if err != nil {
			return err
		}
		defer s.close()
		stream, err := e.Device.NewStream()
		if err != nil {
			return err
		}
		defer stream.Close()
		weights := func() (all []float32) {
			for _, x := range s.parts.Weights.Portions() {
				w, err := s.whole(x, false, stream)
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, w.Float32s()...)
			}
			return slices.Clone(all)
		}
		before := weights()
		if err := s.nudge(); err != nil {
			return err
		}
		for i, x := range weights() {
			if v := before[i]; (v == 0) != (x == v) || !(math.Abs(float64(x-v)) <= ulp(v)) {
				t.Errorf("weight %d: %v became %v", i, v, x)
				break
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
