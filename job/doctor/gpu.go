package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"ulysses/backends"
	"ulysses/internal/units"
)

// onCPU is the consequence of a missing GPU or plug-in.
const onCPU = `jobs run on the CPU, in f32 unless device.dtype = "bf16"; device.backend = "cuda" is refused`

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// gpus lists the plug-in, the GPUs that it opens, and the libraries that it finds.
func gpus() []finding {
	found, err := backends.FindGPUs()
	if err != nil {
		f := finding{what: "CUDA plug-in", found: "none", consequence: onCPU, fix: err.Error()}
		if !backends.NoPlugin(err) {
			f.found = "cannot be used"
			f.consequence += `; "auto" is refused while the file exists`
		} else if built, err := filepath.Abs(backends.BuiltPlugin); err == nil && exists(built) {
			f.found = "not found, though " + built + " is built"
			f.fix = "set ULYSSES_CUDA_PLUGIN=" + built
		}
		gpus := finding{what: "GPUs", found: "none: no /dev/nvidia0"}
		if files, _ := filepath.Glob("/dev/nvidia[0-9]*"); len(files) > 0 {
			gpus.found = strings.Join(files, ", ") + ", not used without the plug-in"
		}
		return []finding{f, gpus, {what: "NCCL", found: "unknown: the plug-in opens NCCL, cuBLASLt, cuDNN and NVRTC"}}
	}
	list := []finding{{what: "CUDA plug-in", found: found.Plugin}}
	if found.Count == 0 {
		list = append(list, finding{what: "GPUs", found: "none", consequence: onCPU, fix: found.Text})
	}
	for i, g := range found.Opened {
		f := finding{what: fmt.Sprintf("GPU %d", i)}
		if g.Err != nil {
			f.found, f.consequence, f.fix = "cannot be opened", "ranks that are assigned to this GPU fail",
				g.Err.Error()
		} else {
			f.found = fmt.Sprintf("%s, %s free of %s (%s)", g.Name, units.GiB(g.Details.Free), units.GiB(g.Memory),
				g.Kernels)
		}
		list = append(list, f)
	}
	for _, l := range found.Libraries {
		list = append(list, finding{l.Name, l.Found, l.Effect, l.Fix})
	}
	return list
}
