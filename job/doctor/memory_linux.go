package doctor

import (
	"syscall"

	"ulysses/internal/units"
)

// sharedMemory checks the memory through which the ranks of a node communicate: Open MPI keeps its
// segments there, and a
// container's default is 64 MiB.
func sharedMemory() finding {
	const path = "/dev/shm"
	var s syscall.Statfs_t
	if err := syscall.Statfs(path, &s); err != nil {
		return finding{"shared memory", "no " + path, "MPI ranks of one node communicate more slowly", "mount a tmpfs there"}
	}
	free := int64(s.Bavail) * int64(s.Bsize)
	f := finding{what: "shared memory", found: units.GiB(free) + " free in " + path}
	if free < 128<<20 {
		f.costs, f.fix = "little room: several MPI ranks on this node may fail to start", "start the container with --shm-size=1g, or remove what fills "+path
	}
	return f
}
