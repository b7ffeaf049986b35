package proc

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// CPULimit returns the CPUs that the control groups of this process may use, as containers limit
// them, or given if that is less; 0 = no limit, or unknown.
func CPULimit(given int) float64 { return lower(groupCPUs("/"), float64(given)) }

// lower returns the lower of two limits; 0 = none.
func lower[N int64 | float64](a, b N) N {
	if a == 0 || b == 0 {
		return a + b
	}
	return min(a, b)
}

// groupCPUs returns the smallest limit of this process's control groups: the time of all CPUs that
// it may use in a period, divided by the period. 0 = none.
func groupCPUs(root string) (limit float64) {
	eachGroup(root, "cpu", func(folder string, v1 bool) {
		var quota, period int64 // version 1 has -1 for no limit, version 2 "max", which is no number
		if v1 {
			quota = number(filepath.Join(folder, "cpu.cfs_quota_us"))
			period = number(filepath.Join(folder, "cpu.cfs_period_us"))
		} else {
			_, _ = fmt.Sscan(line(filepath.Join(folder, "cpu.max"), ""), &quota, &period)
		}
		if quota > 0 && period > 0 {
			limit = lower(limit, float64(quota)/float64(period))
		}
	})
	return limit
}

// eachGroup calls f with the folders of this process's control group and its parents up to the
// mount point. Version 2 of control groups has one hierarchy, version 1 one for a controller. root
// is "/", or another folder for tests.
func eachGroup(root, controller string, f func(folder string, v1 bool)) {
	mounts, err := os.ReadFile(filepath.Join(root, "proc/self/mountinfo"))
	if err != nil {
		return
	}
	for _, mount := range strings.Split(string(mounts), "\n") {
		head, tail, _ := strings.Cut(mount, " - ")
		// the fields are id, parent, device, the folder of the file system that is mounted, and the
		// mount point; after the dash type, source and options
		where, what := strings.Fields(head), strings.Fields(tail)
		if len(where) < 5 || len(what) < 3 {
			continue
		}
		v1, hierarchy := what[0] == "cgroup" && hasWord(what[2], controller), ""
		if v1 {
			hierarchy = controller
		} else if what[0] != "cgroup2" {
			continue
		}
		point := filepath.Join(root, where[4])
		folder := filepath.Join(point, below(where[3], ownGroup(root, hierarchy)))
		for f(folder, v1); folder != point; f(folder, v1) {
			folder = filepath.Dir(folder)
		}
	}
}

// ownGroup returns this process's control group in the hierarchy of a controller; "" is the
// hierarchy of version 2. Without an entry it returns "/".
func ownGroup(root, controller string) string {
	text, _ := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	for _, l := range strings.Split(string(text), "\n") {
		if f := strings.SplitN(l, ":", 3); len(f) == 3 && hasWord(f[1], controller) {
			return f[2]
		}
	}
	return "/"
}

// below returns the path of a control group below the mounted folder of its hierarchy. A group
// outside of the mount has no folder there; below then returns "", the mount's own folder.
func below(mounted, group string) string {
	rest, ok := strings.CutPrefix(group, strings.TrimSuffix(mounted, "/"))
	if !ok || !strings.HasPrefix(rest, "/") || strings.HasPrefix(rest, "/..") {
		return ""
	}
	return rest
}

// hasWord reports whether a list "a,b" has a word.
func hasWord(list, word string) bool { return strings.Contains(","+list+",", ","+word+",") }
