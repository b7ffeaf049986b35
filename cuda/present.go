package cuda

import (
	"os"
	"path/filepath"
)

// Signs of a GPU that need no driver: what NVIDIA's kernel module shows of its GPUs, and WSL's
// device. Opening the driver would tell more, but no forked child survives that.
var signs = []string{"/proc/driver/nvidia/gpus/*", "/dev/nvidia[0-9]*", "/dev/dxg"}

// WhyUnusable says why the file at path, a plug-in, can have no GPU to work on; "" where a GPU may
// be there. It opens nothing. A plug-in of another name than the real one brings its device itself.
func WhyUnusable(path string) string {
	if filepath.Base(path) != fileName {
		return ""
	}
	if visible, set := os.LookupEnv("CUDA_VISIBLE_DEVICES"); set && (visible == "" || visible == "-1") {
		return "CUDA_VISIBLE_DEVICES hides all GPUs"
	}
	for _, sign := range signs {
		if found, _ := filepath.Glob(sign); len(found) > 0 {
			return ""
		}
	}
	return "no NVIDIA GPU: " + signs[0] + " is not there"
}
