//go:build !linux

package doctor

func sharedMemory() finding {
	return finding{what: "shared memory", found: "not looked at on this system"}
}
