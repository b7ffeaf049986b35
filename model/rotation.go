package model

import "ulysses/tensor"

// rotation has RoPE's frequencies on the device.
type rotation struct {
	rope        *Rope         // nil: layers of this kind rotate as in full attention
	dim         int64         // rotated features of a head
	length      int64         // for which frequencies was computed
	frequencies []float32     // [dim/2] on the host
	freq        tensor.Tensor // the same, F32 on the device
}

func newRotation(rope *Rope, dim int64) rotation {
	return rotation{rope: rope, dim: dim, frequencies: rope.Frequencies(dim, 0)}
}

// table computes cos and sin of the batch's positions, also for queries with a gain. If RoPE
// switches, it first copies the frequencies for the batch to the device, unless they are there.
func (r *rotation) table(p *pass, t *angles) {
	if n := p.batch.Length; r.rope.Switches() && n != r.length && !p.skip() {
		r.rope.frequencies(r.frequencies, r.dim, n)
		p.Copy(r.freq, tensor.OfFloat32(r.frequencies, int64(len(r.frequencies))))
		r.length = n
	}
	p.RopeTable(t.cos, t.sin, p.batch.Positions, r.freq, r.rope.Scale, 0, 0)
	if !t.qCos.IsNil() {
		p.RopeTable(t.qCos, t.qSin, p.batch.Positions, r.freq, r.rope.Scale, r.rope.QueryBeta, r.rope.QueryLength)
	}
}
