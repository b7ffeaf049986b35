package train

import (
	"errors"
	"fmt"
	"math"
	"os"
	"regexp"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/data"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
	"ulysses/testkit/devicetest"
	"ulysses/testkit/fake"
)

// faulty is a device that overwrites results of two operations. A backward pass has one SwiGLU for
// each layer, in reverse order, and one embedding.
type faulty struct {
	device.Device
	swiglu, embeds int
	spoil          spoil
}

// spoil has the values to write. swiglu and embedding return the value for a call, counted from 1;
// here = false and nil overwrite nothing.
type spoil struct {
	swiglu, embedding func(call int) (value float64, here bool)
	norm              bool // the sum of the squared gradients is NaN
}

func (d *faulty) SumSquares(s device.Stream, out, x tensor.Tensor) error {
	if d.spoil.norm {
		return d.Device.Fill(s, out, math.NaN())
	}
	return d.Device.SumSquares(s, out, x)
}

func (d *faulty) SwiGLUBackward(s device.Stream, o *device.SwiGLUGrad) error {
	d.swiglu++
	return errors.Join(d.Device.SwiGLUBackward(s, o), d.write(s, d.spoil.swiglu, d.swiglu, o.DGate))
}

func (d *faulty) EmbeddingBackward(s device.Stream, o *device.EmbeddingGrad) error {
	d.embeds++
	return errors.Join(d.Device.EmbeddingBackward(s, o), d.write(s, d.spoil.embedding, d.embeds, o.DTable))
}

func (d *faulty) write(s device.Stream, f func(int) (float64, bool), call int, t tensor.Tensor) error {
	if f != nil {
		if value, here := f(call); here {
			return d.Device.Fill(s, t.Slice(0, 0, min(1, t.Dim(0))), value)
		}
	}
	return nil
}

// faultyRun is a run in which a value becomes NaN or Inf.
type faultyRun struct {
	run
	onNaN   string
	weights func(put func(name string, at int64, value float64))
	spoil   func(rank int) spoil
	eval    bool
	// lengths of documents of the letter Q, each a sequence of its own; nil = one text
	documents []int
}

// result is the result of a run on a rank. why has the messages about skipped steps; updates is the
// number of updates.
type result struct {
	err     error
	records []Record
	why     []string
	updates int64
}

// start runs three steps with two micro-batches for each replica. Only the tokens of the last rank
// have the letter Q.
func (x faultyRun) start(t *testing.T) (o result) {
	t.Helper()
	dir := t.TempDir()
	text := strings.Repeat(strings.Repeat("abcdefghijk ", 4)[:44]+"Qabc", 5)
	dataset := config(48, file(t, dir, "a.txt", text))
	if x.documents != nil {
		var lines strings.Builder
		for _, n := range x.documents {
			lines.WriteString(`{"text": "` + strings.Repeat("Q", n) + "\"}\n")
		}
		dataset = config(1600, file(t, dir, "a.jsonl", lines.String()))
		dataset.Pack = false
	}
	dataset.Accumulate, dataset.Batch, dataset.Shuffle = 2, 1, false
	results := make([]result, x.ranks)
	err := comm.RunLocal(x.ranks, func(host comm.Comm) error {
		r := &results[host.Rank()]
		r.err = x.rank(host, &dataset, r)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range results[1:] {
		if fmt.Sprint(r.err, r.why) != fmt.Sprint(results[0].err, results[0].why) {
			t.Errorf("%+v: the ranks return %v %q and %v %q", x.run, results[0].err, results[0].why, r.err, r.why)
		}
	}
	return results[0]
}

func (x faultyRun) rank(host comm.Comm, dataset *data.Config, o *result) error {
	d, c, err := device.Device(nil), host, error(nil)
	if x.on != nil {
		d, c, _, err = x.on.Open(host)
	} else {
		d, err = cpu.New(cpu.Options{Workers: 1})
	}
	if err != nil {
		return err
	}
	defer d.Close()
	f := &faulty{Device: d}
	ledger := comm.NewLedger()
	mesh, err := comm.NewMesh(c, x.ulysses, 1, ledger, clock.New(), nil)
	if err != nil {
		return err
	}
	cfg, err := model.ConfigFromMap(tiny[x.model])
	if err != nil {
		return err
	}
	m, err := model.New(f, mesh.Seq, cfg, model.Options{})
	if err != nil {
		return err
	}
	defer m.Close()
	opt := &OptimizerConfig{Name: "sgd", LR: 1e-3, Schedule: "constant"}
	w, err := NewWeights(f, mesh, m.Groups(), tensor.F32, opt, x.zero, x.offload)
	if err != nil {
		return err
	}
	defer w.Free()
	if err := m.Init(7); err != nil {
		return err
	}
	s, err := f.NewStream()
	if err != nil {
		return err
	}
	defer s.Close()
	if x.weights != nil {
		x.weights(func(name string, at int64, value float64) {
			for _, g := range m.Groups() {
				for _, p := range g.Params {
					if p.Name == name && at >= p.Owned.Lo && at < p.Owned.Hi {
						if e := f.Fill(s, p.Owned.Value.Slice(0, at-p.Owned.Lo, at-p.Owned.Lo+1), value); e != nil {
							err = e
						}
					}
				}
			}
		})
		if err == nil {
			err = s.Sync()
		}
		if err != nil {
			return err
		}
	}
	if x.spoil != nil {
		f.spoil = x.spoil(host.Rank())
	}
	set, err := data.Open(*dataset, data.EvalConfig{}, data.Options{Vocab: cfg.VocabSize, Seed: 1})
	if err != nil {
		return err
	}
	defer set.Close()
	setup := Setup{Device: f, Mesh: mesh, Model: m, Weights: w, Optimizer: opt, Clock: clock.New(),
		Data: Data{Train: set.Train(), Config: dataset}, Loop: Loop{Steps: 3, OnNaN: x.onNaN},
		Hooks: Hooks{Step: func(r *Record) error { o.records = append(o.records, *r); return nil },
			Skipped: func(why string) { o.why = append(o.why, why) }}}
	if x.eval {
		setup.Data.Evals = []data.NamedSet{{Set: set.Train()}}
	}
	t, err := New(setup)
	if err != nil {
		return err
	}
	defer t.Free()
	if x.eval {
		_, err = t.Evaluate(0)
		return err
	}
	err = t.Run()
	o.updates = t.updates
	if err == nil { // the formulas include the search
		err = checkTraffic(ledger, t.Traffic())
	}
	return err
}

// The error for a loss or gradient norm that is NaN or Inf names the first tensor with such a
// value, in order of execution, and a rank that has it.
func TestNotFinite(t *testing.T) {
	late := devicetest.Fake("late", fake.Options{})
	host, _ := os.Hostname()
	inf := func(here bool) (float64, bool) { return math.Inf(1), here }
	for _, x := range []struct {
		name string
		faultyRun
		rank  func(ranks, ulysses int) int // rank with the value; nil = any rank
		want  string                       // text before the rank; "" = no rank is named
		what  string                       // text after the rank
		count func(ranks, ulysses int) int // number of ranks with such values
	}{
		{name: "a weight", faultyRun: faultyRun{weights: func(put func(string, int64, float64)) {
			put("model.layers.1.mlp.up_proj.weight", 3*32+5, math.NaN())
		}}, want: "layer 1, weight model.layers.1.mlp.up_proj.weight, before the step",
			what: "NaN at [3 5], 1 of this rank's "},
		{name: "an infinite weight", faultyRun: faultyRun{weights: func(put func(string, int64, float64)) {
			put("model.embed_tokens.weight", 'a'*32+31, math.Inf(-1))
		}}, want: "embed, weight model.embed_tokens.weight, before the step",
			what: "-Inf at [97 31], 1 of this rank's "},
		// only the embedding of Q has feature 9, and gate · up overflows
		{name: "one rank's tokens", faultyRun: faultyRun{weights: func(put func(string, int64, float64)) {
			for i := range int64(256) {
				put("model.embed_tokens.weight", i*32+9, 0)
			}
			put("model.embed_tokens.weight", 'Q'*32+9, 1)
			for i := range int64(32) {
				put("model.layers.0.self_attn.o_proj.weight", 9*32+i, 0)
			}
			put("model.layers.0.mlp.gate_proj.weight", 9, 1e30)
			put("model.layers.0.mlp.up_proj.weight", 9, 1e30)
		}}, rank: func(_, ulysses int) int { return ulysses - 1 }, want: "micro-batch 1 of 2, layer 0, mlp output",
			count: func(ranks, ulysses int) int { return ranks / ulysses }},
		// the second call of each pass is for the first layer
		{name: "backward", faultyRun: faultyRun{spoil: func(rank int) spoil {
			return spoil{swiglu: func(call int) (float64, bool) { return inf(rank == 0 && call%4 == 2) }}
		}}, rank: func(int, int) int { return 0 },
			want:  "micro-batch 1 of 2, layer 0, gradient of model.layers.0.mlp.gate_proj.weight",
			count: func(int, int) int { return 1 }},
		{name: "the second micro-batch", faultyRun: faultyRun{spoil: func(rank int) spoil {
			return spoil{swiglu: func(call int) (float64, bool) { return inf(rank == 0 && call%4 == 3) }}
		}}, rank: func(int, int) int { return 0 },
			want: "micro-batch 2 of 2, layer 1, gradient of model.layers.1.mlp.gate_proj.weight"},
		// finite on every rank and in every micro-batch
		{name: "a sum", faultyRun: faultyRun{spoil: func(rank int) spoil {
			return spoil{embedding: func(int) (float64, bool) { return 3e38, true }}
		}}, want: "embed, gradient of model.embed_tokens.weight, summed over micro-batches and ranks",
			what:  "+Inf at [0 0]",
			count: func(ranks, _ int) int { return ranks }},
		{name: "the hardware", faultyRun: faultyRun{spoil: func(rank int) spoil {
			return spoil{swiglu: func(call int) (float64, bool) { return inf(rank == 0 && call == 2) }}
		}}, what: "not reproducible"},
	} {
		// ranks, ulysses, stage
		for i, mesh := range [][3]int{{1, 1, 0}, {2, 2, 0}, {2, 1, 3}, {4, 2, 0}, {4, 4, 3}, {4, 2, 2}, {2, 2, 1}} {
			if x.name == "a sum" && mesh[0] == 1 {
				continue
			}
			x.run = run{model: "llama", ranks: mesh[0], ulysses: mesh[1], zero: mesh[2]}
			if i%2 == 1 {
				x.on = &late
			}
			for _, x.onNaN = range []string{"stop", "skip"} {
				got := x.start(t)
				text := fmt.Sprint(got.err)
				if x.onNaN == "skip" {
					updates := int64(0)
					if x.name == "the hardware" {
						updates = 2
					}
					if len(got.why) != 1 || got.err != nil || len(got.records) != 3 || !got.records[0].Skipped ||
						got.updates != updates {
						t.Errorf("%s, %v, skip: %v, %q, %d updates, %+v", x.name, mesh, got.err, got.why, got.updates,
							got.records)
						continue
					}
					text = got.why[0]
				} else if status.Of(got.err) != status.Numeric || len(got.records) > 0 {
					t.Errorf("%s, %v: %v (%v)", x.name, mesh, got.err, status.Of(got.err))
				}
				who := `\d`
				if x.rank != nil {
					who = fmt.Sprint(x.rank(mesh[0], mesh[1]))
				}
				want := "^(train: )?step 1: loss .*" + regexp.QuoteMeta(x.what)
				if x.want != "" {
					want = "^(train: )?step 1: loss .*first seen in " + regexp.QuoteMeta(x.want) + ", on rank " + who +
						" \\(host " + regexp.QuoteMeta(host) + "\\): .*" + regexp.QuoteMeta(x.what)
				}
				if x.count != nil {
					want += fmt.Sprintf(".*found on %d of %d ranks", x.count(mesh[0], mesh[1]), mesh[0])
				}
				if !regexp.MustCompile(want).MatchString(text) {
					t.Errorf("%s, %v, %s: %s\nwant %s", x.name, mesh, x.onNaN, text, want)
				}
			}
		}
	}
}

// If the norm is NaN on one rank only, although all ranks have the same gradients, all ranks return
// the error.
func TestOneRankDiffers(t *testing.T) {
	for _, onNaN := range []string{"stop", "skip"} {
		x := faultyRun{run: run{model: "llama", ranks: 4, ulysses: 2}, onNaN: onNaN, spoil: func(rank int) spoil {
			return spoil{norm: rank == 2}
		}}
		got := x.start(t)
		if status.Of(got.err) != status.Numeric || !Shared(got.err) ||
			!strings.Contains(got.err.Error(), "hardware of rank 2") || len(got.records) > 0 {
			t.Errorf("%s: %v", onNaN, got.err)
		}
	}
}

// The error of an evaluation names the tensor, also if replicas have different numbers of
// sequences.
func TestEvaluationNotFinite(t *testing.T) {
	for _, mesh := range [][3]int{{1, 1, 0}, {2, 1, 3}, {4, 2, 1}} {
		x := faultyRun{run: run{model: "llama", ranks: mesh[0], ulysses: mesh[1], zero: mesh[2]}, eval: true,
			weights: func(put func(string, int64, float64)) {
				put("model.embed_tokens.weight", 'Q'*32+9, 3e38)
				put("model.layers.0.mlp.gate_proj.weight", 9, 3e38)
				put("model.layers.0.mlp.up_proj.weight", 9, 3e38)
			}}
		got := x.start(t)
		if text := fmt.Sprint(got.err); status.Of(got.err) != status.Numeric ||
			!strings.Contains(text, "evaluation after step 0") || !strings.Contains(text, "first seen in layer 0, ") {
			t.Errorf("%v: %s", mesh, text)
		}
	}
}

// likeNCCL is a communicator with the name of NCCL's, for which ranks wait for each other before
// the host waits for a stream.
type likeNCCL struct{ comm.Comm }

func (c likeNCCL) Kind() string { return "nccl" }

func (c likeNCCL) Split(color, key int) (comm.Comm, error) {
	sub, err := c.Comm.Split(color, key)
	if err != nil || sub == nil {
		return nil, err
	}
	return likeNCCL{sub}, nil
}

// The search for NaN does not wait for a rank that has no sequence, or a shorter one, in a round of
// sequences that ranks evaluate alone.
func TestEvaluationNotFiniteAlone(t *testing.T) {
	late := devicetest.Fake("late", fake.Options{})
	on := devicetest.Kind{Name: "nccl", Open: func(host comm.Comm) (device.Device, comm.Comm, func() error, error) {
		d, c, done, err := late.Open(host)
		return d, likeNCCL{c}, done, err
	}}
	for _, zero := range []int{0, 3} {
		x := faultyRun{run: run{model: "llama", ranks: 2, ulysses: 2, zero: zero, on: &on}, eval: true,
			documents: []int{1600, 390, 130, 60},
			weights: func(put func(string, int64, float64)) {
				put("model.embed_tokens.weight", 'Q'*32+9, 1)
				put("model.layers.0.mlp.gate_proj.weight", 9, 1e30) // gate · up overflows
				put("model.layers.0.mlp.up_proj.weight", 9, 1e30)
			}}
		got := x.start(t)
		if text := fmt.Sprint(got.err); status.Of(got.err) != status.Numeric ||
			!strings.Contains(text, "evaluation after step 0") || !strings.Contains(text, "first seen in layer 0, ") {
			t.Errorf("zero %d: %s", zero, text)
		}
	}
}

// The scanner finds the first value in row-major order and counts all, in blocks of any size, in
// strided memory.
func TestScanner(t *testing.T) {
	d, err := cpu.New(cpu.Options{Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	const rows, wide = 5, 60
	memory := make([]float32, rows*wide)
	for _, column := range []int{3, 41} {
		memory[column] = float32(math.NaN()) // outside of x
	}
	x := tensor.OfFloat32(memory, rows, wide).Slice(1, 4, 40)
	for _, block := range []int{1, 7, 36, 50, 1000} {
		sc := scanner{dev: d, stream: s, block: make([]float32, block)}
		if bad, err := sc.scan(x, true); err != nil || bad.count != 0 || bad.of != rows*36 {
			t.Errorf("blocks of %d: %+v, %v", block, bad, err)
		}
		// the last of these is the first in row-major order
		for _, at := range [][2]int{{4, 0}, {2, 35}, {2, 34}} {
			memory[at[0]*wide+4+at[1]] = float32(math.Inf(at[1] - 35 + 1))
		}
		if bad, err := sc.scan(x, true); err != nil || bad.count != 3 || bad.first != 2*36+34 ||
			!math.IsInf(float64(bad.value), 1) {
			t.Errorf("blocks of %d: %+v, %v", block, bad, err)
		}
		for i := range memory {
			if i != 3 && i != 41 {
				memory[i] = 0
			}
		}
	}
}
