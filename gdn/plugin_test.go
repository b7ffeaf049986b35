package gdn

import (
	"testing"

	"ulysses/internal/devicetest"
	"ulysses/tensor"
)

// On the CUDA plug-in, in a small case as the host may stand in for a GPU, thread by thread, with its communicators: Heads give the bits of one rank, and both ways are near to float64, the core and the layer.
func TestPlugin(t *testing.T) {
	cuda := devicetest.CUDA(t, "cuda", false)
	w := sweep{kinds: []devicetest.Kind{cuda}, dtypes: []tensor.DType{tensor.F32, tensor.BF16}, cases: []string{"short rows"}, most: 3, brief: true}
	w.run(t, func(b *bench, k *kase, scan bool) error {
		if k.layer.Strategy == Heads {
			if err := b.bitsOfOne(k, cuda); err != nil {
				return err
			}
		}
		r, layer := prepare(b, k, true, scan), prepareLayer(b, k, scan)
		must(r.run())
		must(layer.run())
		for _, x := range r.results() {
			if err := near(b, r.x, []result{x}, r.reference(k), k.limit(x)); err != nil {
				return err
			}
		}
		limit := 2e-5
		if k.layer.DType == tensor.BF16 {
			limit = 1.0 / 64
		}
		if err := near(b, layer.x, append(layer.activations(), layer.weights(hostOf(b.comm))...), layer.reference(k), limit); err != nil {
			return err
		}
		return b.gapsIntact()
	})
}
