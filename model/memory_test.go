package model

import (
	"slices"
	"testing"

	"ulysses/comm"
	"ulysses/cpu"
)

// Memory runs one layer of each kind. It returns what running each layer returns, for frozen
// layers, adapters, tiles and all policies.
func TestMemoryOfAlikeLayers(t *testing.T) {
	dev, err := cpu.New(cpu.Options{Workers: 1})
	must(err)
	defer dev.Close()
	const layers = 7
	var each []int
	for i := range layers {
		each = append(each, i)
	}
	for name, cfg := range configs(t) {
		for _, o := range []Options{{}, {Freeze: []string{"model.layers.1.*", "*layers.4.*layernorm*"}},
			{LoRA: &LoRA{Rank: 2, Alpha: 2, Targets: []string{AllLinear}}}} {
			m, err := New(dev, comm.Local(1)[0], deeper(cfg, layers), o)
			if err != nil {
				t.Fatalf("%s %+v: %v", name, o, err)
			}
			kinds := m.kinds()
			if slices.Max(kinds) > 4 {
				t.Errorf("%s %+v: kinds of layers %v", name, o, kinds)
			}
			for _, a := range append(policies(), Activations{}) {
				must(m.SetActivations(a))
				for _, mlp := range []int64{TileOff, 3} {
					must(m.SetTiles(Tiles{MLP: mlp}))
					m.layerKinds = kinds
					got, err := m.Memory(20, 20, true)
					must(err)
					m.layerKinds = each
					want, err := m.Memory(20, 20, true)
					must(err)
					if !slices.Equal(got, want) {
						t.Errorf("%s %+v, %v, MLP in tiles of %d: %v, of each layer %v", name, o, a, mlp, got, want)
					}
				}
			}
			m.Close()
		}
	}
}
