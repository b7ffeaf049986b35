package proc

import (
	"runtime"
	"testing"
)

// Limits are read from the process's own control group and from its parents, in both versions.
func TestGroupMemory(t *testing.T) {
	const (
		v2        = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
		v1        = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
		bound     = "35 31 0:32 /docker/a /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
		other     = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
		step      = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0/"
		job       = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/"
		old       = "sys/fs/cgroup/memory/"
		unlimited = "9223372036854771712\n"
	)
	for name, x := range map[string]struct {
		files       map[string]string
		limit, left int64
	}{
		"no files": {nil, 0, 0},
		"no limit": {map[string]string{"proc/self/mountinfo": other + v2, "proc/self/cgroup": "0::/user.slice\n",
			"sys/fs/cgroup/user.slice/memory.max": "max\n"}, 0, 0},
		"a parent": {map[string]string{"proc/self/mountinfo": other + v2,
			"proc/self/cgroup":  "0::/system.slice/slurmstepd.scope/job_7/step_0\n",
			step + "memory.max": "max\n", step + "memory.high": "10\n", job + "memory.max": "1000\n",
			job + "memory.current":                  "700\n",
			job + "memory.stat":                     "anon 100\nfile 500\nactive_file 200\ninactive_file 100\ninactive_file_x 5\n",
			"sys/fs/cgroup/system.slice/memory.max": "5000\n"}, 1000, 600},
		"the own group": {map[string]string{"proc/self/mountinfo": v2,
			"proc/self/cgroup":  "0::/system.slice/slurmstepd.scope/job_7/step_0\n",
			step + "memory.max": "900\n", step + "memory.current": "50\n", job + "memory.max": "1000\n",
			job + "memory.current": "700\n"}, 900, 300},
		"the root of a container": {map[string]string{"proc/self/mountinfo": v2, "proc/self/cgroup": "0::/\n",
			"sys/fs/cgroup/memory.max": "800\n"}, 800, 800},
		"moved out of the namespace": {map[string]string{"proc/self/mountinfo": v2, "proc/self/cgroup": "0::/../../b\n",
			"sys/fs/cgroup/memory.max": "800\n"}, 800, 800},
		"full": {map[string]string{"proc/self/mountinfo": v2, "proc/self/cgroup": "0::/\n",
			"sys/fs/cgroup/memory.max": "800\n", "sys/fs/cgroup/memory.current": "900\n"}, 800, 0},
		"version 1": {map[string]string{"proc/self/mountinfo": other + v1,
			"proc/self/cgroup":                        "9:cpu:/x\n8:hugetlb,memory:/slurm/job_7\n0::/y\n",
			old + "slurm/job_7/memory.limit_in_bytes": "700\n", old + "slurm/job_7/memory.usage_in_bytes": "300\n",
			old + "slurm/job_7/memory.stat": "active_file 1\ntotal_active_file 30\ntotal_inactive_file 20\n",
			old + "memory.limit_in_bytes":   unlimited}, 700, 450},
		"version 1 without a limit": {map[string]string{"proc/self/mountinfo": v1, "proc/self/cgroup": "8:memory:/\n",
			old + "memory.limit_in_bytes": unlimited}, 0, 0},
		"version 1 in a container": {map[string]string{"proc/self/mountinfo": bound,
			"proc/self/cgroup":              "8:memory:/docker/a/b\n",
			old + "b/memory.limit_in_bytes": "600\n", old + "memory.limit_in_bytes": "700\n"}, 600, 600},
		"a bound mount of another group": {map[string]string{"proc/self/mountinfo": bound,
			"proc/self/cgroup":            "8:memory:/docker/ab\n",
			old + "memory.limit_in_bytes": "700\n"}, 700, 700},
	} {
		root := folder(t, x.files)
		if limit, left := groupMemory(root); limit != x.limit || x.limit > 0 && left != x.left {
			t.Errorf("%s: limit %d with %d left, want %d and %d", name, limit, left, x.limit, x.left)
		}
	}
	if runtime.GOOS == "linux" && FreeMemory() <= 0 {
		t.Error("no free memory")
	}
}

// The driver of Grace Hopper adds GPU memory to the system, and /proc/meminfo counts it. The sizes
// are of a module with 480 GB and 96 GB.
func TestHostMemory(t *testing.T) {
	files := map[string]string{
		"proc/meminfo": "MemTotal:       600000000 kB\nMemFree:        500000000 kB\nMemAvailable:   510000000 kB\n",
		"proc/driver/nvidia/gpus/0009:01:00.0/numa_status": "Node:      1\nStatus:    online\nAddress:   400000\n",
		"sys/devices/system/node/node0/cpulist":            "0-71\n",
		"sys/devices/system/node/node0/meminfo":            "Node 0 MemTotal: 500000000 kB\nNode 0 MemFree: 410000000 kB\n",
		"sys/devices/system/node/node1/cpulist":            "\n",
		"sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:       100000000 kB\n" +
			"Node 1 MemFree:         90000000 kB\nNode 1 MemUsed:         10000000 kB\n",
		"sys/devices/system/node/node2/cpulist": "\n", // empty, of a MIG partition that does not exist
		"sys/devices/system/node/node2/meminfo": "Node 2 MemTotal:       0 kB\nNode 2 MemFree:        0 kB\n",
	}
	if total, free := hostMemory(folder(t, files)); total != 500000000<<10 || free != 420000000<<10 {
		t.Errorf("%d of %d bytes with GPU memory in the system", free, total)
	}
	files["proc/driver/nvidia/gpus/0009:01:00.0/numa_status"] = "Node:      1\nStatus:    offline\n"
	if total, free := hostMemory(folder(t, files)); total != 600000000<<10 || free != 510000000<<10 {
		t.Errorf("%d of %d bytes without GPU memory in the system: a node without cores is another kind of memory", free,
			total)
	}
	if total, free := hostMemory(t.TempDir()); total != 0 || free != 0 {
		t.Errorf("%d of %d bytes without /proc", free, total)
	}
	if total, free := HostMemory(); runtime.GOOS == "linux" && (free <= 0 || free > total) {
		t.Errorf("%d of %d bytes of this machine", free, total)
	}
}
