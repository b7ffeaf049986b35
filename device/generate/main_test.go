package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// TestCurrent compares the generated files in the source tree with what this program writes.
func TestCurrent(t *testing.T) {
	for path, want := range files() {
		got, err := os.ReadFile(filepath.Join("..", "..", path))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is not up to date; run make generate", path)
		}
	}
}

func TestNames(t *testing.T) {
	for name, want := range map[string]string{"SwiGLUForward": "swiglu_forward",
		"GatedRMSNormGrad": "gated_rmsnorm_grad", "AdamW": "adamw", "SGD": "sgd",
		"KVHead": "kv_head", "CuQ": "cu_q", "LSE": "lse", "DStateOut": "dstate_out", "DX": "dx", "AddDX": "add_dx",
		"DALog": "da_log", "DDtBias": "ddt_bias",
		"RStd": "rstd", "IDs": "ids", "L2Norm": "l2norm", "Conv1dGrad": "conv1d_grad", "DeltaState": "delta_state",
		"Dst": "dst"} {
		if got := cName(name); got != want {
			t.Errorf("%s is %s in C, want %s", name, got, want)
		}
	}
}
