package plan

import (
	"fmt"
	"runtime"
	"slices"
	"testing"

	"ulysses/device"
	"ulysses/job/file"
	"ulysses/tensor"
	"ulysses/train"
)

// The ranks that a plan looks at are those that need most: no rank needs more memory or more time.
func TestHeaviest(t *testing.T) {
	for _, c := range []struct {
		heads, keys, tokens, ulysses int64
		want                         []int
	}{
		{8, 8, 100, 1, []int{0}}, {8, 2, 64, 4, []int{0}}, {32, 8, 30, 6, []int{0}}, {28, 4, 800, 8, []int{0, 1}},
		{12, 4, 10, 5, []int{0, 3}}, {4, 4, 4, 9, []int{0}},
	} {
		if got := Heaviest([]int64{c.tokens}, [][2]int64{{c.heads, c.keys}}, c.ulysses, 1); !slices.Equal(got, c.want) {
			t.Errorf("%+v: ranks %v", c, got)
		}
	}
}

type noSizes struct{}

func (noSizes) AttentionWorkspace(*device.Attention, bool) int64 { return 0 }

func (noSizes) GatedDeltaSizes(*device.GatedDelta) (none device.DeltaSizes) { return none }

const llama8B = `
[parallel]
zero = 3
[model.new]
model_type = "llama"
vocab_size = 128256
hidden_size = 4096
intermediate_size = 14336
num_hidden_layers = 32
num_attention_heads = 32
num_key_value_heads = 8
[data]
path = ["a.txt"]
`

// Steps of Llama-8B that others have published come out within 15 %: Arctic Long Sequence Training
// (Bekman et al. 2025, arXiv:2506.13996, tables 1, 2 and 4) on H100s: block inputs offloaded,
// everything else recomputed, FlashAttention-2, which does 360 and 330 TFLOP/s there.
func TestPublishedSteps(t *testing.T) {
	for _, c := range []struct {
		tokens  int64
		ranks   int
		seconds float64
	}{{500_000, 1, 1010}, {1_100_000, 8, 564}, {2_400_000, 8, 2610}, {3_700_000, 8, 6455}, {15_000_000, 32, 26709}} {
		j, err := file.Parse([]byte(llama8B+fmt.Sprintf("sequence = %d\n", c.tokens)+
			"[memory]\nblock_input = \"offload\"\nattention = \"recompute\"\nqkv = \"recompute\"\nmlp = \"recompute\"\nsegment = 1\n"),
			"job.toml", nil, nil)
		if err == nil {
			err = j.Resolve(c.ranks)
		}
		if err != nil {
			t.Fatal(err)
		}
		config, err := j.ReadConfig()
		if err != nil {
			t.Fatal(err)
		}
		m := &Machine{Info: device.Info{Kind: "cuda", Name: "H100", Align: 256, Place: tensor.CUDA,
			Compute: []tensor.DType{tensor.BF16}, TokenMajor: true}, Sizes: noSizes{},
			Rates: gpuByName["h100"].rates[tensor.BF16]}
		m.Rates.Attention, m.Rates.Gradient, m.Rates.PerNode = 360e12, 330e12, 8
		f, err := Predict(j, m, SubjectOfModel(config), true)
		if err != nil {
			t.Fatal(err)
		}
		if ratio := f.Seconds / c.seconds; !(ratio > 0.85 && ratio < 1.15) {
			t.Errorf("%d tokens on %d ranks: %.0f s planned, %.0f s published", c.tokens, c.ranks, f.Seconds, c.seconds)
		}
		f.Close()
	}
}

// As many ranks as have cores of their own are measured at a time. The other ranks share these
// cores.
func TestSharedBy(t *testing.T) {
	cores := runtime.NumCPU()
	for _, c := range []struct {
		perNode, workers, atOnce int
		share                    float64
	}{{1, 1, 1, 1}, {cores, 1, cores, 1}, {1, cores, 1, 1}, {4 * cores, 1, cores, 4}, {2, cores, 1, 2}, {0, 0, 1, 1}} {
		if atOnce, share := sharedBy(c.perNode, c.workers); atOnce != c.atOnce || share != c.share {
			t.Errorf("%d ranks of %d threads on %d cores: %d at a time, %v to a core", c.perNode, c.workers, cores,
				atOnce, share)
		}
	}
}

// On GPUs, the reductions of gradients overlap backward in ZeRO stages 0 and 1: a step is shorter
// than the sum of its phases. After backward remain the reduction of the embedding, which is
// complete last, and in stage 1 the all-gather of the updated weights, which has as many bytes as
// the reduction in F32 has halves. On CPUs, a step takes the sum of its phases.
func TestReductionsAreHidden(t *testing.T) {
	for _, c := range []struct {
		zero   int
		hidden float64 // the least share of the communication
	}{{0, 0.8}, {1, 0.5}} {
		j, x := parsed(t, llama8B, fmt.Sprintf("parallel.zero=%d", c.zero), "parallel.ulysses=1",
			"model.new.num_hidden_layers=8", "model.new.vocab_size=8192", "data.sequence=16384")
		if err := j.Resolve(2); err != nil {
			t.Fatal(err)
		}
		m := h200s(8)
		for _, place := range []tensor.Place{tensor.CUDA, tensor.Host} {
			m.Info.Place = place
			f, err := Predict(j, m, x, true)
			if err != nil {
				t.Fatal(err)
			}
			sum := 0.0
			for _, seconds := range f.Phases {
				sum += seconds
			}
			hidden := (sum - f.Seconds) / f.Phases["reduce"]
			if place == tensor.CUDA && !(hidden >= c.hidden && hidden < 1) || place == tensor.Host && !(hidden < 0.01) {
				t.Errorf("zero %d, place %v: %.2f of %.4f s are hidden in a step of %.4f s: %v", c.zero, place, hidden,
					f.Phases["reduce"], f.Seconds, f.Phases)
			}
			f.Close()
		}
	}
}

// The dry run of both forms of an offloaded step takes the time by which a run chooses between
// them, and the choice is the faster one.
func TestStepOfAnOffloadedOptimizer(t *testing.T) {
	for _, c := range []struct {
		perNode int
		want    string
	}{{1, "host"}, {8, "stream"}} {
		seconds := map[string]float64{}
		expected := func(word string, gradients bool) float64 {
			where := "device"
			if gradients {
				where = "offload"
			}
			j, x := parsed(t, llama8B+"sequence = 64\n[memory]\n", "parallel.zero=0", "memory.optimizer="+word,
				"memory.gradients="+where, "train.steps=1")
			if err := j.Resolve(1); err != nil {
				t.Fatal(err)
			}
			m := h200s(c.perNode)
			m.Rates.Host = gpu{}.hostRate(0, 0, c.perNode)
			f, err := Predict(j, m, x, true)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			step := train.StepOnHost
			if word == "stream" {
				step = train.StepStreamed
			}
			rates := m.stepRates()
			want := rates.StepSeconds(step, &j.Optimizer, tensor.BF16, gradients, 8_030_261_248)
			if seconds[word] = f.Seconds; (word == "stream" || word == "host") && !gradients {
				if took := f.Seconds - seconds["device"]; !(took > 0.9*want && took < 1.15*want) {
					t.Errorf("%d ranks a node, %s: a step takes %.3f s longer, expected %.3f s", c.perNode, word,
						took, want)
				}
			}
			return f.Seconds
		}
		expected("device", false)
		for _, gradients := range []bool{false, true} {
			stream, host := expected("stream", gradients), expected("host", gradients)
			if faster := map[bool]string{true: "host", false: "stream"}[host < stream]; faster != c.want {
				t.Errorf("%d ranks a node: %s is faster, want %s", c.perNode, faster, c.want)
			}
			if got := expected("offload", gradients); got != min(stream, host) {
				t.Errorf("%d ranks a node: offload takes %v s, stream %v s, host %v s", c.perNode, got, stream, host)
			}
		}
	}
}
