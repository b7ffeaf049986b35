package job

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/tensor"
	"ulysses/train"
)

// Logits is the verb logits: it evaluates a folder as the verb eval does, writes the results of
// each token to a file, and compares them with the results of another folder.
func Logits(o Options) error {
	o.verb = "logits"
	var others []string
	if o.compare != "" {
		others, o.fault = o.evaluationOf(o.compare)
	}
	sets, err := o.evaluationOf(o.folder())
	o.Sets, o.fault = sets, cmp.Or(err, o.fault)
	return onRanks(o, func(e *Env) error {
		if err := comm.Agree(e.Mesh.World, o.checkTensorsFile(e.Mesh.World.Rank())); err != nil {
			return err
		}
		t, err := evaluateTokens(e, o.logits)
		if err != nil {
			return err
		}
		var other *tokenTable
		if others != nil {
			if other, err = e.evaluateOther(&o, others); err != nil {
				return err
			}
		}
		if e.world.Rank() == 0 {
			if _, n := t.mean(); n == 0 {
				e.Log.Warn().Msg("logits: " + noTargets)
			}
			err = t.report(e.Result, &o, other)
		}
		return comm.Agree(e.world, err)
	})
}

// tokenTable has the results of all tokens of an evaluation, in order.
type tokenTable struct {
	from   string // what was evaluated
	sets   []string
	tokens []train.TokenResult
	vocab  int64
}

// evaluateTokens evaluates the job and returns the results of all tokens. Collective.
func evaluateTokens(e *Env, logits bool) (*tokenTable, error) {
	s, err := prepare(e, false)
	if err != nil {
		return nil, err
	}
	defer s.close()
	t, err := s.evaluateTokens(logits)
	if err = e.leave(err); err != nil {
		return nil, err
	}
	return t, nil
}

func (s *session) evaluateTokens(logits bool) (*tokenTable, error) {
	var own []train.TokenResult
	s.trainer.Hooks.Logits = logits
	s.trainer.Hooks.Tokens = func(results []train.TokenResult) error { own = append(own, results...); return nil }
	if err := s.inStep(func() error { _, err := s.trainer.Evaluate(train.EvaluationStep); return err }); err != nil {
		return nil, err
	}
	t := &tokenTable{from: s.from, vocab: s.parts.Config.VocabSize}
	if t.from == "" {
		t.from = s.Job.Model.Path
	}
	if s.Job.LoRA.Init != "" {
		t.from = s.Job.LoRA.Init
	}
	for _, set := range s.trainer.Data.Evals {
		t.sets = append(t.sets, set.Name)
	}
	var err error
	t.tokens, err = tokenResults(s.Mesh.World, own)
	return t, err
}

// evaluateOther evaluates the job with other --set arguments, on the same ranks. Collective.
func (e *Env) evaluateOther(o *Options, sets []string) (*tokenTable, error) {
	j, err := file.Parse([]byte(e.source), o.Path, sets, os.LookupEnv)
	if err == nil {
		j.ByVerb = true
		j.Choose(e.Job.Mesh)
		err = j.Resolve(e.world.Size())
	}
	if err = comm.Agree(e.world, err); err != nil {
		return nil, err
	}
	other := *e
	other.Job = j
	if err := other.openMesh(e.world); err != nil {
		return nil, err
	}
	t, err := evaluateTokens(&other, o.logits)
	e.alone = other.alone
	return t, err
}

// report writes the file and prints a summary, on rank 0.
func (t *tokenTable) report(w io.Writer, o *Options, other *tokenTable) error {
	var d *tokenDifferences
	if other != nil {
		var err error
		if d, err = t.differences(other); err != nil {
			return err
		}
	}
	if o.tensors != "" {
		if err := tensor.WriteSafetensors(o.tensors, map[string]string{"format": "pt"}, t.items(other)); err != nil {
			return err
		}
	}
	loss, n := t.mean()
	if o.json {
		summary := map[string]any{"folder": t.from, "tokens": len(t.tokens), "targets": n, "loss": train.Float(loss)}
		if d != nil {
			summary["compared"] = d
		}
		text, err := json.Marshal(summary)
		if err != nil {
			return status.Errorf(status.Internal, "logits: %w", err)
		}
		return written(fmt.Fprintln(w, string(text)))
	}
	text := fmt.Sprintf("%s: loss %.6f of %d targets\n", t.from, loss, n)
	if d != nil {
		text += d.String()
	}
	if o.tensors != "" {
		text += "tensors          " + o.tensors + "\n"
	}
	return written(io.WriteString(w, text))
}

// mean returns the mean loss and the number of targets.
func (t *tokenTable) mean() (float64, int64) {
	sum, n := 0.0, int64(0)
	for i := range t.tokens {
		if t.tokens[i].Target >= 0 {
			sum, n = sum+float64(t.tokens[i].Loss), n+1
		}
	}
	return sum / float64(max(1, n)), n
}

// items returns the tensors of the file.
func (t *tokenTable) items(other *tokenTable) []tensor.Item {
	n := int64(len(t.tokens))
	whole := func(name string, of func(*train.TokenResult) int64) tensor.Item {
		x := make([]int64, n)
		for i := range t.tokens {
			x[i] = of(&t.tokens[i])
		}
		return tensor.Item{Name: name, Tensor: tensor.OfInt64(x, n)}
	}
	items := []tensor.Item{
		whole("sequence", func(r *train.TokenResult) int64 { return r.Sequence }),
		whole("index", func(r *train.TokenResult) int64 { return r.Index }),
		whole("input_ids", func(r *train.TokenResult) int64 { return int64(r.ID) }),
		whole("targets", func(r *train.TokenResult) int64 { return int64(r.Target) }),
	}
	if len(t.sets) > 1 {
		items = append(items, whole("set", func(r *train.TokenResult) int64 { return int64(r.Set) }))
	}
	for _, x := range []struct {
		of     *tokenTable
		suffix string
	}{{t, ""}, {other, " of the other"}} {
		if x.of == nil {
			continue
		}
		losses := make([]float32, n)
		for i := range x.of.tokens {
			losses[i] = x.of.tokens[i].Loss
		}
		items = append(items, tensor.Item{Name: "token loss" + x.suffix, Tensor: tensor.OfFloat32(losses, n)})
		if n > 0 && len(x.of.tokens[0].Logits) > 0 {
			items = append(items, tensor.Item{Name: "logits" + x.suffix,
				Tensor: tensor.Of(nil, tensor.F32, n, x.of.vocab), Write: x.of.writeLogits})
		}
	}
	return items
}

// writeLogits writes the logits of all tokens.
func (t *tokenTable) writeLogits(w io.Writer) error {
	for i := range t.tokens {
		if _, err := w.Write(tensor.OfFloat32(t.tokens[i].Logits, t.vocab).RawBytes()); err != nil {
			return err
		}
	}
	return nil
}

// tokenDifferences compares the losses of two folders.
type tokenDifferences struct {
	Folder string      `json:"folder"` // the other folder
	Loss   train.Float `json:"loss"`   // of it
	Mean   train.Float `json:"mean"`   // mean |Δ| of the losses
	Max    train.Float `json:"max"`
	Equal  bool        `json:"bitwise"` // the losses are bitwise equal
	// the token with the largest difference
	Set      string `json:"set,omitempty"`
	Sequence int64  `json:"sequence"`
	Index    int64  `json:"index"`
	// of the logits, max |Δ|; null without --logits
	Logits *train.Float `json:"logits"`
	// tokens whose most probable next token is the same; null without --logits
	Same *int64 `json:"same_token"`

	tokens int
	of     *tokenTable
	losses [2]float32 // of the token
}

// differences compares two evaluations of the same tokens.
func (t *tokenTable) differences(other *tokenTable) (*tokenDifferences, error) {
	if len(t.tokens) != len(other.tokens) {
		return nil, status.Errorf(status.InvalidConfig,
			"logits: %s has %d tokens of the data, %s has %d: their tokenizers differ; set data.tokenizer", t.from,
			len(t.tokens), other.from, len(other.tokens))
	}
	loss, n := other.mean()
	d := &tokenDifferences{Folder: other.from, Loss: train.Float(loss), Equal: true, tokens: len(t.tokens), of: t}
	sum, worst, top, same := 0.0, -1.0, 0.0, int64(0)
	for i := range t.tokens {
		a, b := &t.tokens[i], &other.tokens[i]
		if a.Sequence != b.Sequence || a.Index != b.Index || a.ID != b.ID || a.Target != b.Target {
			return nil, status.Errorf(status.InvalidConfig,
				"logits: token %d of sequence %d is %d in %s and %d in %s: their tokenizers differ; set data.tokenizer",
				a.Index, a.Sequence, a.ID, t.from, b.ID, other.from)
		}
		if len(a.Logits) > 0 {
			if len(a.Logits) != len(b.Logits) {
				return nil,
					status.Errorf(status.InvalidConfig,
						"logits: %s has a vocabulary of %d, %s of %d; leave out --logits", t.from, t.vocab, other.from,
						other.vocab)
			}
			for j := range a.Logits {
				if delta := math.Abs(float64(a.Logits[j]) - float64(b.Logits[j])); !(delta <= top) && !math.IsNaN(top) {
					top = delta
				}
			}
			if largest(a.Logits) == largest(b.Logits) {
				same++
			}
		}
		if a.Target < 0 {
			continue
		}
		d.Equal = d.Equal && math.Float32bits(a.Loss) == math.Float32bits(b.Loss)
		delta := math.Abs(float64(a.Loss) - float64(b.Loss))
		if sum += delta; !(delta <= worst) && !math.IsNaN(worst) {
			worst, d.Sequence, d.Index, d.losses = delta, a.Sequence, a.Index, [2]float32{a.Loss, b.Loss}
			d.Set = t.sets[a.Set]
		}
	}
	d.Mean, d.Max = train.Float(sum/float64(max(1, n))), train.Float(max(0, worst))
	if len(t.tokens) > 0 && len(t.tokens[0].Logits) > 0 {
		x := train.Float(top)
		d.Logits, d.Same = &x, &same
	}
	return d, nil
}

// largest returns the index of the largest logit, the first of equals.
func largest(x []float32) int {
	best := 0
	for i, v := range x {
		if v > x[best] {
			best = i
		}
	}
	return best
}

// String returns the comparison as lines.
func (d *tokenDifferences) String() string {
	text := fmt.Sprintf("%s: loss %.6f\n", d.Folder, float64(d.Loss))
	if d.Equal {
		text += "the losses of all targets are bitwise equal\n"
	} else {
		of := ""
		if d.Set != "" {
			of = " of " + d.Set
		}
		text += fmt.Sprintf(
			"losses           mean |Δ| %.3g, max |Δ| %.3g at token %d of sequence %d%s (%.6f and %.6f)\n",
			float64(d.Mean), float64(d.Max), d.Index, d.Sequence, of, d.losses[0], d.losses[1])
	}
	if d.Logits != nil {
		text += fmt.Sprintf("logits           max |Δ| %.3g; the most probable token is the same for %d of %d tokens\n",
			float64(*d.Logits), *d.Same, d.tokens)
	}
	return text
}
