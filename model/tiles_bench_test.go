package model

import (
	"slices"
	"testing"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/device"
	"ulysses/internal/clock"
)

// BenchmarkTiles runs forward and backward passes with and without tiles of MLP or loss,
// alternately, and reports the time and memory of tiles. One rank with two workers; the figures are
// in benchmarks/results/tiles.md.
func BenchmarkTiles(b *testing.B) {
	for _, x := range []struct {
		name                      string
		vocabulary, hidden, width int64
		documents                 []int64
	}{
		{"quickstart", 256, 128, 384, []int64{2048, 2048}},
		{"wide", 8192, 256, 1024, []int64{1024, 1024}},
		{"long", 8192, 256, 1024, []int64{8192}},
	} {
		cfg, err := ConfigFromMap(map[string]any{"model_type": "llama", "vocab_size": x.vocabulary,
			"hidden_size":       x.hidden,
			"intermediate_size": x.width, "num_hidden_layers": 2, "num_attention_heads": 4,
			"tie_word_embeddings": true})
		must(err)
		for _, pair := range []struct {
			name, phase   string
			without, with Tiles
		}{
			{"loss", "loss", Tiles{MLP: TileOff, Loss: TileOff}, Tiles{MLP: TileOff}},
			{"mlp", "mlp", Tiles{MLP: TileOff, Loss: TileOff}, Tiles{MLP: 1024, Loss: TileOff}},
			// a single tile recomputes as well
			{"mlp-without-computing-again", "mlp", Tiles{MLP: 1 << 30, Loss: TileOff}, Tiles{MLP: 1024, Loss: TileOff}},
		} {
			b.Run(x.name+"/"+pair.name, func(b *testing.B) {
				benchTiles(b, cfg, documents(x.vocabulary, x.documents...), pair.phase,
					[2]Tiles{pair.without, pair.with})
			})
		}
	}
}

// benchTiles runs pairs of passes, so that both have the same conditions, and reports the median of
// their ratios.
func benchTiles(b *testing.B, cfg *Config, s *sequence, phase string, settings [2]Tiles) {
	ranks(b, 1, func(c comm.Comm) error {
		dev, err := cpu.New(cpu.Options{Workers: 2})
		must(err)
		defer dev.Close()
		m, err := New(dev, c, cfg, Options{})
		must(err)
		r := &rank{Model: m}
		r.bind()
		must(r.Init(1))
		stream, err := dev.NewStream()
		must(err)
		batch := shard(c, s)
		batch.GradScale = 1 / float64(len(s.ids))
		var arenas [2]*device.Arena
		for i, x := range settings {
			must(r.SetTiles(x))
			table, err := m.Memory(int64(len(s.ids)), int64(len(s.ids)), true)
			must(err)
			arenas[i], err = device.NewArena(dev, "activations", Bytes(table))
			must(err)
			defer arenas[i].Free()
		}
		pass := func(i int) (all, part float64) {
			must(r.SetTiles(settings[i]))
			account := clock.New()
			_, err := r.ForwardBackward(&Ctx{Stream: stream, Arena: arenas[i], Clock: account}, batch)
			must(err)
			for _, p := range account.Phases() {
				if all += p.Seconds; p.Name == phase {
					part += p.Seconds
				}
			}
			return all, part
		}
		pass(0)
		pass(1)
		var seconds, whole, parts []float64
		for n := 0; b.Loop(); n++ {
			var all, part [2]float64
			for _, i := range [2]int{n % 2, 1 - n%2} {
				all[i], part[i] = pass(i)
			}
			seconds, whole, parts = append(seconds, all[0]), append(whole, all[1]/all[0]),
				append(parts, part[1]/part[0])
		}
		median := func(x []float64) float64 { slices.Sort(x); return x[len(x)/2] }
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(1e3*median(seconds), "ms-without")
		b.ReportMetric(median(whole), "pass-ratio")
		b.ReportMetric(median(parts), phase+"-ratio")
		b.ReportMetric(float64(arenas[0].Bytes())/(1<<20), "MiB-without")
		b.ReportMetric(float64(arenas[1].Bytes())/(1<<20), "MiB-tiled")
		return nil
	})
}
