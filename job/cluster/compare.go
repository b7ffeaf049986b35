package cluster

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/tensor"
)

// Facts are what a rank sees on its node.
type Facts struct {
	Host             string
	LocalRank        int
	Version          string
	Program, Plugin  string // checksums
	JobFile          string // checksum
	Kind             string // of the device: "cpu", "cuda"
	Device, Kernels  string
	Compute          tensor.DType // of the job's matrix products
	Rate             float64      // of a matrix product, in operations per second; 0 = not measured
	Free             int64        // bytes of host memory; 0 = unknown
	Variables        map[string]string
	Interfaces       []string
	Faults           []Fault
	ClockOff         float64 // seconds by which the clock is ahead of rank 0's; of a node's first rank
	ClockUncertainty float64 // of ClockOff, seconds
}

// Fault is what a rank alone can say, such as a file that is missing on its node.
type Fault struct {
	What, Text string
	Code       status.Code
}

// Finding is something that is not as it should be. Text names ranks, hosts and values, and ends
// with what to do. Code is OK for advice, which does not fail the check.
type Finding struct {
	Code       status.Code
	What, Text string
}

// compare returns the findings that follow from the facts of the ranks, in the order in which they
// should be repaired.
func compare(all []Facts) (found []Finding) {
	different := func(what string, code status.Code, fix string, value func(*Facts) string) {
		for _, text := range minorities(all, value) {
			found = append(found, Finding{code, what, text + "; " + fix})
		}
	}
	different("program", status.InvalidArgument, "install the same file on every node", func(f *Facts) string {
		return f.Version + ", " + f.Program
	})
	different("CUDA plug-in", status.InvalidArgument,
		"install the same file on every node, or set ULYSSES_CUDA_PLUGIN on every rank", func(f *Facts) string {
			return f.Plugin
		})
	different("job file", status.InvalidConfig,
		"copy the file of rank 0 to every node, or put it on a shared file system", func(f *Facts) string {
			return f.JobFile
		})
	found = append(found, faults(all)...)
	different("device", status.InvalidConfig, `set device.backend to "cuda" or "cpu"`, func(f *Facts) string {
		return f.Kind
	})
	different("kernels", status.InvalidConfig,
		"set ULYSSES_ISA (on a GPU ULYSSES_KERNEL) on all ranks to what all nodes have", func(f *Facts) string {
			return device.Info{Kernels: f.Kernels}.KernelsIn(f.Compute)
		})
	return append(append(append(found, variables(all)...), memory(all)...), interfaces(all)...)
}

// faults merges equal faults of several ranks.
func faults(all []Facts) (found []Finding) {
	ranks := map[Fault][]int{}
	var order []Fault
	for r := range all {
		for _, f := range all[r].Faults {
			if ranks[f] == nil {
				order = append(order, f)
			}
			ranks[f] = append(ranks[f], r)
		}
	}
	for _, f := range order {
		text := withoutKey(f.Text, f.What)
		found = append(found, Finding{f.Code, f.What, name(all, ranks[f]) + ": " + text})
	}
	return found
}

// withoutKey removes the key from the start of an error's text.
func withoutKey(text, key string) string { return strings.TrimPrefix(text, key+": ") }

// minorities returns a text for each value that fewer ranks have than the most frequent one. Of two
// values that are equally frequent, the one of the lower rank is taken as the right one. A rank
// without a value is not compared.
func minorities(all []Facts, value func(*Facts) string) (texts []string) {
	ranks := map[string][]int{}
	var values []string
	for r := range all {
		v := value(&all[r])
		if v == "" {
			continue
		}
		if ranks[v] == nil {
			values = append(values, v)
		}
		ranks[v] = append(ranks[v], r)
	}
	if len(values) < 2 {
		return nil
	}
	most := slices.MaxFunc(values, func(a, b string) int { return len(ranks[a]) - len(ranks[b]) })
	for _, v := range values {
		if v != most {
			texts = append(texts, fmt.Sprintf("%s: %s; %s: %s", name(all, ranks[v]), v, name(all, ranks[most]), most))
		}
	}
	return texts
}

// name names ranks with their hosts: "rank 3 on n2", "ranks 2, 3 on n2", "ranks 0, 1 on n1 and 2, 3
// on n2". It names eight ranks at most.
func name(all []Facts, ranks []int) string {
	const most = 8
	word := "ranks "
	if len(ranks) == 1 {
		word = "rank "
	}
	shown := ranks[:min(len(ranks), most)]
	var hosts []string
	on := map[string][]string{}
	for _, r := range shown {
		h := all[r].Host
		if on[h] == nil {
			hosts = append(hosts, h)
		}
		on[h] = append(on[h], fmt.Sprint(r))
	}
	for i, h := range hosts {
		hosts[i] = strings.Join(on[h], ", ") + " on " + h
	}
	text := word + strings.Join(hosts, " and ")
	if more := len(ranks) - len(shown); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

func who(all []Facts, rank int) string { return name(all, []int{rank}) }

// variables finds network variables that differ between ranks. Ranks of a node may have different
// network devices; then the ranks with one number on their nodes are compared.
func variables(all []Facts) (found []Finding) {
	names := map[string]bool{}
	for _, f := range all {
		for n := range f.Variables {
			names[n] = true
		}
	}
	for _, n := range slices.Sorted(maps.Keys(names)) {
		value := func(f *Facts) string {
			if v, ok := f.Variables[n]; ok {
				return n + "=" + v
			}
			return n + " is not set"
		}
		texts := minorities(all, value)
		if len(texts) == 0 || sameByLocalRank(all, value) {
			continue
		}
		for _, text := range texts {
			found = append(found,
				Finding{status.InvalidArgument, "environment",
					text + "; pass the same value to all ranks (srun --export=ALL, mpirun -x " + n + ")"})
		}
	}
	return found
}

// sameByLocalRank reports whether ranks that have the same number on different nodes have the same
// value.
func sameByLocalRank(all []Facts, value func(*Facts) string) bool {
	values, several := map[int]string{}, false
	for r := range all {
		own := value(&all[r])
		other, ok := values[all[r].LocalRank]
		if ok && other != own {
			return false
		}
		several = several || ok
		values[all[r].LocalRank] = own
	}
	return several
}

// memory finds nodes with less than half of the free memory of the others.
func memory(all []Facts) (found []Finding) {
	var free []float64
	for _, r := range firsts(all) {
		if all[r].Free > 0 {
			free = append(free, float64(all[r].Free))
		}
	}
	middle := median(free)
	for _, r := range firsts(all) {
		if x := float64(all[r].Free); x > 0 && x < middle/2 {
			found = append(found,
				Finding{status.OutOfMemory, "host memory",
					fmt.Sprintf(
						"%s has %s free, the median of the nodes is %s; end what uses the memory of %s, or leave this node out",
						who(all, r), units.GiB(all[r].Free), units.GiB(int64(middle)), all[r].Host)})
		}
	}
	return found
}

// firsts returns the lowest rank of each node, in rank order.
func firsts(all []Facts) (ranks []int) {
	seen := map[string]bool{}
	for r := range all {
		if !seen[all[r].Host] {
			seen[all[r].Host] = true
			ranks = append(ranks, r)
		}
	}
	return ranks
}

func median(x []float64) float64 {
	if len(x) == 0 {
		return 0
	}
	x = slices.Sorted(slices.Values(x))
	return (x[(len(x)-1)/2] + x[len(x)/2]) / 2
}

// checksum returns the first 16 hexadecimal digits of the SHA-256 of data.
func checksum(data []byte) string {
	sum := sha256.Sum256(data)
	return "sha256 " + hex.EncodeToString(sum[:8])
}

// checksumOf is checksum of a file, or why it cannot be read.
func checksumOf(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return "cannot be read: " + err.Error()
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "cannot be read: " + err.Error()
	}
	return "sha256 " + hex.EncodeToString(h.Sum(nil)[:8])
}
