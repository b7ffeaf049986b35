//go:build !linux

package doctor

func sharedMemory() finding {
	return finding{what: "shared memory", found: "not checked on this system"}
}
