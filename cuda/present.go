package cuda

import (
	"os"
	"path/filepath"
)

// Files that show a GPU without opening the driver: the GPUs of NVIDIA's kernel module, and the
// device of WSL. Opening the driver would be more precise, but a forked child could not use CUDA
// afterwards.
var signs = []string{"/proc/driver/nvidia/gpus/*", "/dev/nvidia[0-9]*", "/dev/dxg"}

// WhyUnusable returns why the plug-in at path cannot have a GPU, or "" if there may be one. It
// opens nothing. A plug-in with another file name than libulysses_cuda.so, such as the emulated
// one, is assumed to have a device.
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
