package proc

import (
	"os"
	"path/filepath"
	"testing"
)

// Limits of CPUs are read from the process's own control group and from its parents, in both
// versions.
func TestGroupCPUs(t *testing.T) {
	const (
		v2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
		v1 = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
	)
	for name, x := range map[string]struct {
		files map[string]string
		want  float64
	}{
		"no files": {nil, 0},
		"no limit": {map[string]string{"proc/self/mountinfo": v2, "proc/self/cgroup": "0::/a\n",
			"sys/fs/cgroup/a/cpu.max": "max 100000\n"}, 0},
		"a parent": {map[string]string{"proc/self/mountinfo": v2, "proc/self/cgroup": "0::/a/b\n",
			"sys/fs/cgroup/a/b/cpu.max": "1600000 100000\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 2.5},
		"a container": {map[string]string{"proc/self/mountinfo": v2, "proc/self/cgroup": "0::/\n",
			"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5},
		"version 1": {map[string]string{"proc/self/mountinfo": v1, "proc/self/cgroup": "4:cpu,cpuacct:/x\n",
			"sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "400000\n", "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
			"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 4},
		"not a limit": {map[string]string{"proc/self/mountinfo": v2, "proc/self/cgroup": "0::/\n",
			"sys/fs/cgroup/cpu.max": "100000 0\n"}, 0},
	} {
		root := folder(t, x.files)
		if got := groupCPUs(root); got != x.want {
			t.Errorf("%s: %v CPUs, want %v", name, got, x.want)
		}
	}
	if limit := CPULimit(1); !(limit > 0 && limit <= 1) {
		t.Errorf("%v of one CPU", limit)
	}
}

// folder returns a folder with files of these texts.
func folder(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for path, text := range files {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}
