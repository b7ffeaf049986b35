package model

import (
	"ulysses/device"
	"ulysses/tensor"
)

// Stage is the layers [First, Last) of a Decoder on several ranks: a rank has the weights and the
// caches of its layers, and the residual stream passes from rank to rank. The first stage embeds
// the tokens, and the last one computes the logits.
type Stage struct {
	First, Last int64
	// Receive stores the residual stream [n, hidden] of the previous stage; Send passes it to the
	// next one. The first stage calls no Receive, the last one no Send.
	Receive, Send func(x []float32) error
}

// Stages divides the layers of the model evenly over ranks, and returns the layers of one.
func (m *Model) Stages(ranks, rank int64) Stage {
	n := int64(len(m.blocks))
	return Stage{First: n * rank / ranks, Last: n * (rank + 1) / ranks}
}

// Uses reports whether a stage reads a group of parameters.
func (m *Model) Uses(s Stage, group int) bool {
	last := s.Last == int64(len(m.blocks))
	switch {
	case group == 0:
		return s.First == 0 || last && m.Config.TieWordEmbeddings
	case group == len(m.groups)-1:
		return last
	}
	return int64(group-1) >= s.First && int64(group-1) < s.Last
}

// hidden is the residual stream that passes between stages.
type hidden struct {
	device tensor.Tensor // [most, hidden] F32
	host   []float32
}

// receive copies the residual stream of n tokens from the previous stage to the device.
func (d *Decoder) receive(n int64) error {
	if d.stage.First == 0 {
		return nil
	}
	x := d.hidden.host[:n*d.m.Config.HiddenSize]
	if err := d.stage.Receive(x); err != nil {
		return err
	}
	return d.m.dev.Copy(d.ctx.Stream, d.hidden.device.Slice(0, 0, n), tensor.OfFloat32(x, n, d.m.Config.HiddenSize))
}

// send copies the results of n tokens to the host: the logits, or the residual stream, which goes
// to the next stage.
func (d *Decoder) send(n int64) error {
	if d.isLast() {
		err := d.m.dev.Copy(d.ctx.Stream, tensor.OfFloat32(d.host, 1, int64(len(d.host))), d.logits)
		if err == nil {
			err = d.ctx.Stream.Sync()
		}
		return err
	}
	x := d.hidden.host[:n*d.m.Config.HiddenSize]
	err := d.m.dev.Copy(d.ctx.Stream, tensor.OfFloat32(x, n, d.m.Config.HiddenSize), d.hidden.device.Slice(0, 0, n))
	if err == nil {
		err = d.ctx.Stream.Sync()
	}
	if err == nil {
		err = d.stage.Send(x)
	}
	return err
}

func (d *Decoder) isLast() bool { return d.stage.Last == int64(len(d.m.blocks)) }

// enter begins the pass of a stage: it embeds the tokens, or takes the received residual stream.
func (d *Decoder) enter(p *pass, x tensor.Tensor) {
	if d.stage.First == 0 {
		p.Embed(x, d.batch.IDs, d.m.embed)
		p.Scale(x, d.m.scale)
		return
	}
	d.copyHidden(p, x, d.hidden.device.Slice(0, 0, x.Dim(0)))
}

// copyHidden copies between the residual stream and its F32 copy. A BF16 value is exact in F32.
func (d *Decoder) copyHidden(p *pass, dst, src tensor.Tensor) {
	if p.err == nil && !p.dry {
		p.err = p.dev.Copy(p.ctx.Stream, dst, src)
	}
}

// allocateHidden allocates the residual stream that passes between stages, if there are several.
func (d *Decoder) allocateHidden(arena *device.Arena) (err error) {
	if d.stage.First == 0 && d.isLast() {
		return nil
	}
	d.hidden.host = make([]float32, d.most*d.m.Config.HiddenSize)
	d.hidden.device, err = arena.Tensor(tensor.F32, d.most, d.m.Config.HiddenSize)
	return err
}
