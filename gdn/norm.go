package gdn

import (
	"ulysses/device"
	"ulysses/tensor"
)

// The gated norm of a layer is local to a token. It works on the caller's tokens, after the rule's
// output has come back to them.

// hasNorm reports whether a call ends with the gated norm.
func (p *Plan) hasNorm(kind callKind) bool { return kind.layer && p.layer.GatedNorm }

// allocateNorm allocates the tensors of the gated norm.
func (p *Plan) allocateNorm(c *call) {
	l, f, batch, rows := &p.layer, &c.buffers, c.layout.batch.Batch(), c.layout.batch.Rows()
	values := func(a *device.Allocator) tensor.Tensor { return a.Take(l.DType, batch, rows, l.ValueHeads, l.ValueDim) }
	if c.keep {
		f.mixed = values(&c.saved)
	}
	f.rstd = c.kept().Take(tensor.F32, batch, rows*l.ValueHeads)
	if c.backward {
		f.dmixed = values(&c.workspace)
	}
}

// normalize computes out from the rule's output.
func (p *Plan) normalize(c *call, out tensor.Tensor) error {
	a := &c.layerArgs
	for i := range out.Shape[0] {
		if out.Numel() == 0 {
			return nil
		}
		p.norm = device.GatedRMSNorm{X: a.Out.Select(0, i), Gate: a.Z.Select(0, i), Y: out.Select(0, i), W: a.Norm,
			RStd: c.buffers.rstd.Select(0, i), Eps: a.Eps}
		if err := p.dev.GatedRMSNormForward(c.stream, &p.norm); err != nil {
			return err
		}
	}
	return nil
}

// normalizeGrad computes the gradient of the rule's output from the caller's, and the gradients of
// the gate and of the norm's weight.
func (p *Plan) normalizeGrad(c *call) error {
	a, g, f := &c.layerArgs, &c.layerGrads, &c.buffers
	for i := range g.DOut.Shape[0] {
		if g.DOut.Numel() == 0 {
			return nil
		}
		p.normGrad = device.GatedRMSNormGrad{X: f.mixed.Select(0, i), Gate: a.Z.Select(0, i), W: a.Norm,
			RStd: f.rstd.Select(0, i), DY: g.DOut.Select(0, i), DX: f.dmixed.Select(0, i), DGate: g.DZ.Select(0, i),
			DW: g.DNorm}
		if err := p.dev.GatedRMSNormBackward(c.stream, &p.normGrad); err != nil {
			return err
		}
	}
	return nil
}
