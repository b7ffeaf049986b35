package file

import (
	"reflect"
	"slices"
	"strings"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// Cluster is a machine that a plan is for and that need not be this one: a file of --cluster. Rates
// are those of a rank with all its node at work; 0 is what is known of the device, or what is
// measured here where it is this machine's.
type Cluster struct {
	Nodes      int64        `toml:"nodes" min:"1"`
	PerNode    int64        `toml:"ranks_per_node" min:"1"`
	Device     string       `toml:"device" enum:"here a100 h100 h200"` // of a rank
	Memory     float64      `toml:"memory" min:"0"`                    // GiB of a rank's device
	HostMemory float64      `toml:"host_memory" min:"0"`               // GiB of a node
	Rates      ClusterRates `toml:"rates"`
}

// ClusterRates is [rates].
type ClusterRates struct {
	Products float64 `toml:"products" min:"0"` // TFLOP/s of large matrix products
	// TFLOP/s of attention forward, causal pairs counted once
	Attention float64 `toml:"attention" min:"0"`
	Gradient  float64 `toml:"gradient" min:"0"` // of its backward, 2.5 times the FLOP
	Delta     float64 `toml:"delta" min:"0"`    // of the gated delta rule
	Memory    float64 `toml:"memory" min:"0"`   // GB/s of a rank's memory
	// GB/s between the host and a rank's device, each way
	Copies  float64 `toml:"copies" min:"0"`
	Node    float64 `toml:"node" min:"0"`    // GB/s that a rank sends inside a node
	Network float64 `toml:"network" min:"0"` // GB/s that a rank sends to other nodes
	Launch  float64 `toml:"launch" min:"0"`  // µs that an operation takes at least
	Latency float64 `toml:"latency" min:"0"` // µs that an exchange takes at least
}

var clusterKeys, _ = walk(reflect.TypeFor[Cluster](), "", nil)

// ReadCluster reads a file of --cluster, as strictly as a job file.
func ReadCluster(path string) (*Cluster, error) {
	src, err := input.Read(path, maxSource)
	if err != nil {
		return nil, status.Errorf(status.IO, "--cluster %s: %w", path, err)
	}
	return parseCluster(string(src), path)
}

func parseCluster(src, path string) (*Cluster, error) {
	c := &Cluster{Nodes: 1, PerNode: 1, Device: "here"}
	var tree map[string]any
	if err := decodeTOML(src, &tree); err != nil {
		return nil, status.Errorf(status.InvalidConfig, "%s: not TOML: %v", path, err)
	}
	var f faults
	lines := keyLines(src).lines
	var table func(prefix string, tree map[string]any)
	table = func(prefix string, tree map[string]any) {
		for name, value := range tree {
			key := prefix + name
			fault := func(format string, args ...any) {
				f.add(origin{file: path, line: max(1, lines[key])}, status.InvalidConfig, key+": "+format, args...)
			}
			if sub, ok := value.(map[string]any); ok && key == "rates" {
				table(key+".", sub)
				continue
			}
			i := slices.IndexFunc(clusterKeys, func(k field) bool { return k.key == key })
			if i < 0 {
				fault("unknown key%s", nearestOf(key))
				continue
			}
			if err := clusterKeys[i].convert(reflect.ValueOf(c).Elem().FieldByIndex(clusterKeys[i].index), value); err != nil {
				fault("%v", err)
			}
		}
	}
	table("", tree)
	if err := f.err(); err != nil {
		return nil, err
	}
	if c.Nodes*c.PerNode > MaxPlanned {
		return nil, status.Errorf(status.InvalidConfig, "%s: nodes %d x ranks_per_node %d: at most %d ranks", path, c.Nodes, c.PerNode, MaxPlanned)
	}
	return c, nil
}

// ClusterKeys returns the keys of a file of --cluster.
func ClusterKeys() (all []string) {
	for _, k := range clusterKeys {
		all = append(all, k.key)
	}
	return all
}

func nearestOf(key string) string {
	all := ClusterKeys()
	if near := Nearest(key, all); near != "" {
		return "; did you mean " + near + "?"
	}
	return ": there are " + strings.Join(all, ", ")
}

// MaxPlanned bounds the ranks of a plan.
const MaxPlanned = 1 << 20
