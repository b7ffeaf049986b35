package doctor

import (
	"syscall"

	"golang.org/x/sys/unix"

	"ulysses/internal/units"
)

// sharedMemory checks the memory through which the ranks of a node communicate: Open MPI keeps its
// segments there. The default of a container, 64 MiB, is too small.
func sharedMemory() finding {
	const path = "/dev/shm"
	var s syscall.Statfs_t
	if err := syscall.Statfs(path, &s); err != nil {
		return finding{"shared memory", "no " + path, "MPI ranks of one node communicate more slowly",
			"mount a tmpfs there"}
	}
	if err := unix.Access(path, unix.W_OK); err != nil {
		return finding{"shared memory", path + " cannot be written: " + err.Error(),
			"MPI ranks of one node communicate more slowly, and NCCL fails", "mount a tmpfs there that every user can write"}
	}
	free := int64(s.Bavail) * int64(s.Bsize)
	f := finding{what: "shared memory", found: units.GiB(free) + " free in " + path}
	if free < 128<<20 {
		f.consequence, f.fix = "too little memory: several MPI ranks on this node may fail to start",
			"start the container with --shm-size=1g"
	}
	return f
}
