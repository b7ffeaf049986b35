package plan

import (
	"testing"

	"ulysses/tensor"
	"ulysses/train"
)

// GPUs are known by the names that NVIDIA's driver gives them.
func TestGPUOf(t *testing.T) {
	for name, want := range map[string]string{
		"NVIDIA A100-SXM4-80GB": "NVIDIA A100", "NVIDIA H100 80GB HBM3": "NVIDIA H100", "NVIDIA H200": "NVIDIA H200",
		"NVIDIA GH200 480GB": "NVIDIA GH200", "NVIDIA GH200 120GB": "NVIDIA GH200",
		"NVIDIA GH200 144G HBM3e": "NVIDIA GH200", "NVIDIA B200": "NVIDIA B200", "NVIDIA GB200": "NVIDIA GB200",
		"NVIDIA L40S": "", "": "",
	} {
		if got := gpuOf(name).name; got != want {
			t.Errorf("%q is %q, want %q", name, got, want)
		}
	}
}

// A GH200 copies to the memory of its own CPU, whose cores it does not share. On one node with four
// of them, a step of AdamW is streamed, and takes less than a quarter of the time on H200s.
func TestGraceHopper(t *testing.T) {
	seconds := func(device string) (train.OptimizerStep, float64) {
		g := gpuByName[device]
		rates := train.StepRates{Copies: g.rates[tensor.BF16].Copies, Host: g.hostRate(0, 0, 4)}
		optimizer := train.OptimizerConfig{Name: "adamw"}
		step := rates.FasterStep(&optimizer, tensor.BF16, false)
		return step, rates.StepSeconds(step, &optimizer, tensor.BF16, false, 8_030_261_248)
	}
	onH200, slow := seconds("h200")
	onGH200, fast := seconds("gh200")
	if onH200 != train.StepStreamed || onGH200 != train.StepStreamed || !(fast < slow/4) {
		t.Errorf("H200: %v, %.2f s; GH200: %v, %.2f s", onH200, slow, onGH200, fast)
	}
	if got, want := gpuByName["gh200"].hostRate(4, 0, 4), 4*hostThread; got != want {
		t.Errorf("four threads read and write %g bytes/s, want %g", got, want)
	}
}
