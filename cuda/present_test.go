package cuda

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// WhyUnusable reports a real plug-in without a GPU, without opening it. It does not report a
// plug-in with a GPU, or the emulated one.
func TestWhyUnusable(t *testing.T) {
	old := signs
	defer func() { signs = old }()
	dir := t.TempDir()
	signs = []string{filepath.Join(dir, "gpus", "*")}
	os.Unsetenv("CUDA_VISIBLE_DEVICES")
	plugin := filepath.Join(dir, fileName)
	if why := WhyUnusable(plugin); !strings.Contains(why, "no NVIDIA GPU") {
		t.Errorf("without a GPU: %q", why)
	}
	if why := WhyUnusable(filepath.Join(dir, "libulysses_cuda_emulated.so")); why != "" {
		t.Errorf("the emulated plug-in: %q", why)
	}
	if err := os.MkdirAll(filepath.Join(dir, "gpus", "0000:01:00.0"), 0o777); err != nil {
		t.Fatal(err)
	}
	if why := WhyUnusable(plugin); why != "" {
		t.Errorf("with a GPU: %q", why)
	}
	t.Setenv("CUDA_VISIBLE_DEVICES", "")
	if why := WhyUnusable(plugin); !strings.Contains(why, "CUDA_VISIBLE_DEVICES") {
		t.Errorf("hidden: %q", why)
	}
}
