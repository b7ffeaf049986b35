package gdn

import (
	"fmt"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/devicetest"
	"ulysses/testkit/mpitest"
)

// On the CUDA plug-in with its communicators, in a small case because an emulated GPU is slow:
// Heads is bitwise equal to one rank, and both strategies are close to float64, for the core and
// the layer.
func TestPlugin(t *testing.T) {
	cuda := devicetest.CUDA(t, "cuda", false)
	w := sweep{kinds: []devicetest.Kind{cuda}, dtypes: []tensor.DType{tensor.F32, tensor.BF16},
		cases: []string{"short rows"}, most: 3, brief: true}
	w.run(t, func(b *bench, k *testCase, scan bool) error {
		if k.layer.Strategy == Heads {
			k.layer.Deterministic = true
			if err := b.bitsOfOne(k, cuda); err != nil {
				return err
			}
		}
		r, layer := prepare(b, k, true, scan), prepareLayer(b, k, scan)
		must(r.run())
		must(layer.run())
		var plain map[string]float64
		if k.layer.DType == tensor.BF16 { // the kernels keep values in BF16 as well
			plain = r.plainErrors(k)
		}
		for _, x := range r.results() {
			if err := near(b, r.x, []result{x}, r.reference(k), max(k.limit(x), 2*plain[x.name])); err != nil {
				return err
			}
		}
		if err := layer.compare(k); err != nil {
			return err
		}
		return b.gapsIntact()
	})
}

// Heads that are wider than the device's kernels support are an error of NewPlan on all ranks, with
// both strategies.
func TestWideHeadsAreRefused(t *testing.T) {
	kind := devicetest.CUDA(t, "cuda", false)
	refused := func(host comm.Comm) error {
		d, c, done, err := kind.Open(host)
		must(err)
		defer d.Close()
		widest := d.Info().DeltaHead
		for _, strategy := range []Strategy{Heads, State} {
			for _, x := range []struct {
				key, value int64
				fine       bool
			}{{widest, widest, true}, {widest + 1, 64, false}, {64, widest + 1, false}} {
				_, err := NewPlan(d, c,
					Layer{KeyHeads: 1, ValueHeads: 1, KeyDim: x.key, ValueDim: x.value, Strategy: strategy})
				if (err == nil) != x.fine || !x.fine &&
					(status.Of(err) != status.Unsupported ||
						!strings.Contains(err.Error(),
							fmt.Sprintf("key_dim %d, value_dim %d: device cuda", x.key, x.value))) {
					return fmt.Errorf("%v, heads of %d and %d: %v", strategy, x.key, x.value, err)
				}
			}
		}
		return done()
	}
	for _, n := range mpitest.Sizes() {
		mpitest.Ranks(t, n, refused)
	}
}
