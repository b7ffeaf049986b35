package model

import (
	"testing"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/device"
	"ulysses/internal/clock"
)

// BenchmarkQuickstart runs one forward and backward pass of the quickstart's model, on one rank
// with two workers.
func BenchmarkQuickstart(b *testing.B) {
	cfg, err := ConfigFromMap(map[string]any{"model_type": "llama", "vocab_size": 256, "hidden_size": 128,
		"intermediate_size": 384,
		"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": true})
	must(err)
	s := documents(256, 2048, 2048)
	ranks(b, 1, func(c comm.Comm) error {
		dev, err := cpu.New(cpu.Options{Workers: 2})
		must(err)
		m, err := New(dev, c, cfg, Options{})
		must(err)
		r := &rank{Model: m}
		r.bind()
		must(r.Init(1))
		table, err := m.Memory(4096, 4096, true)
		must(err)
		b.Log(table)
		arena, err := device.NewArena(dev, "activations", Bytes(table))
		must(err)
		stream, err := dev.NewStream()
		must(err)
		r.c = &Ctx{Stream: stream, Arena: arena}
		batch := shard(c, s)
		batch.GradScale = 1.0 / 4096
		_, err = r.ForwardBackward(r.c, batch)
		must(err)
		r.c.Clock = clock.New()
		b.ResetTimer()
		for b.Loop() {
			if _, err := r.ForwardBackward(r.c, batch); err != nil {
				return err
			}
		}
		for _, p := range r.c.Clock.Phases() {
			b.ReportMetric(p.Seconds/float64(b.N)*1e3, "ms-"+p.Name)
		}
		b.ReportMetric(4096/(b.Elapsed().Seconds()/float64(b.N)), "tokens/s")
		b.ReportMetric(cfg.Flops(4096, 2*2048*2048/2)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GF/s")
		return nil
	})
}
