package train

import (
	"math"
	"sort"

	"ulysses/comm"
	"ulysses/data"
	"ulysses/model"
	"ulysses/sp"
	"ulysses/tensor"
)

// TokenResult has the results of a pass for one token.
type TokenResult struct {
	Set        int   // index of the evaluation set; 0 in training
	Sequence   int64 // its number in the training order, or in the evaluation set
	Index      int64 // of the token in the sequence
	ID, Target int32 // Target is the next id, or data.Ignore
	Loss       float32
	Logits     []float32 // [V], capped if the model has a cap; nil without Hooks.Logits
}

// tokenCollector copies the logits and the losses of a pass to the host.
type tokenCollector struct {
	*Trainer
	logits, losses []float32
}

// passWithTokens is ForwardBackward, or Forward without backward, and calls Hooks.Tokens with the
// results of this rank's tokens, which are the given ranges of the micro-batch.
func (t *Trainer) passWithTokens(m *data.MicroBatch, ranges []sp.Range, c *model.Ctx, b *model.Batch,
	backward bool) (model.Loss, error) {
	x := tokenCollector{Trainer: t}
	c.Inspect = x.look
	run := t.Model.Forward
	if backward {
		run = t.Model.ForwardBackward
	}
	loss, err := run(c, b)
	if err != nil {
		return loss, err
	}
	return loss, t.Hooks.Tokens(x.results(m, ranges))
}

// look copies a tensor of the head. It is the model's Inspect function. A pass inspects the logits
// of all tiles in order, before it overwrites them.
func (x *tokenCollector) look(at string, v tensor.Tensor) (err error) {
	switch at {
	case model.LogitsName:
		if !x.Hooks.Logits {
			return nil
		}
		from := len(x.logits)
		x.logits, err = x.append(x.logits, v)
		capLogits(x.logits[from:], x.Model.Config.LogitSoftcap)
	case model.TokenLossName:
		x.losses, err = x.append(x.losses, v)
	}
	return err
}

// capLogits replaces each logit z by c·tanh(z/c), which the operation of the loss does itself.
// c = 0 is no cap.
func capLogits(logits []float32, c float64) {
	if c == 0 {
		return
	}
	for i, z := range logits {
		logits[i] = float32(c * math.Tanh(float64(z)/c))
	}
}

func (x *tokenCollector) append(to []float32, v tensor.Tensor) ([]float32, error) {
	if v.Numel() == 0 && x.Device.Info().Place == tensor.Host {
		return to, nil
	}
	if x.Device.Info().Place != tensor.Host {
		if err := comm.BarrierBeforeSync(x.Mesh.Seq); err != nil {
			return to, err
		}
	}
	values := make([]float32, v.Numel())
	if err := x.Device.Copy(x.stream, tensor.OfFloat32(values, v.Dims()...), v); err != nil {
		return to, err
	}
	return append(to, values...), x.stream.Sync()
}

// results returns the results of the tokens in ranges of a micro-batch.
func (x *tokenCollector) results(m *data.MicroBatch, ranges []sp.Range) []TokenResult {
	all := make([]TokenResult, 0, len(x.losses))
	vocabulary := int(x.Model.Config.VocabSize)
	for _, r := range ranges {
		for at := r.Lo; at < r.Hi; at++ {
			s := m.Sequences[sort.Search(len(m.Sequences), func(i int) bool { return m.Sequences[i].At > at })-1]
			i := len(all)
			r := TokenResult{Set: x.evalSet, Sequence: s.Number, Index: at - s.At, ID: m.IDs[at], Target: m.Targets[at],
				Loss: x.losses[i]}
			if x.Hooks.Logits {
				r.Logits = x.logits[i*vocabulary : (i+1)*vocabulary]
			}
			all = append(all, r)
		}
	}
	return all
}
