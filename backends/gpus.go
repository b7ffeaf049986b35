package backends

import (
	"errors"

	"ulysses/cuda"
	"ulysses/device"
)

// GPUs has the findings of the CUDA plug-in on this machine, for a report.
type GPUs struct {
	cuda.Findings
	Opened []GPU
}

// GPU has the properties of a GPU that was opened, or the error.
type GPU struct {
	device.Info
	cuda.Details
	Err error
}

// FindGPUs searches for the plug-in, its libraries and GPUs, and opens and closes each GPU.
func FindGPUs() (g GPUs, err error) {
	if g.Findings, err = cuda.Probe(); err != nil {
		return g, err
	}
	for i := range g.Count {
		d, err := cuda.Open(cuda.Options{Ordinal: i})
		if err != nil {
			g.Opened = append(g.Opened, GPU{Err: err})
			continue
		}
		g.Opened = append(g.Opened, GPU{Info: d.Info(), Details: d.Details()})
		d.Close()
	}
	return g, nil
}

// BuiltPlugin is the path of the file that make cuda writes, relative to the source tree.
const BuiltPlugin = cuda.Built

// NoPlugin reports whether an error means that no plug-in was found. It is false for a plug-in that
// cannot be used.
func NoPlugin(err error) bool { return errors.Is(err, cuda.ErrNoPlugin) }

// AbsentGPU returns the memory that a GPU's operations need, without a plug-in or a driver.
func AbsentGPU(deterministic bool) cuda.NoGPU { return cuda.NoGPU{Deterministic: deterministic} }

// Plugin returns the path of the CUDA plug-in that devices would be opened with. It initializes no
// GPU. The error is that of a missing plug-in (NoPlugin), or of one that cannot be used.
func Plugin() (path string, err error) {
	found, err := cuda.Probe()
	return found.Plugin, err
}

// GPUID returns the UUID of the GPU of a device; "" for other devices.
func GPUID(d device.Device) string {
	if gpu, ok := d.(*cuda.Device); ok {
		return gpu.Details().UUID
	}
	return ""
}
