package file

import (
	"reflect"
	"slices"
	"strings"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// Cluster describes the machine of a plan: the content of a --cluster file. A rate is the rate of
// one rank while all ranks of its node work. A rate of 0 stands for the known rate of the device,
// or for the measured rate if the device is this machine's ("here").
type Cluster struct {
	Nodes      int64        `toml:"nodes" min:"1"`
	PerNode    int64        `toml:"ranks_per_node" min:"1"`
	Device     string       `toml:"device" enum:"here a100 h100 h200 gh200 b200 gb200"` // of a rank
	Memory     float64      `toml:"memory" min:"0" unit:"GiB"`                          // of a rank's device
	HostMemory float64      `toml:"host_memory" min:"0" unit:"GiB"`                     // of a node
	Rates      ClusterRates `toml:"rates"`
}

// ClusterRates is [rates].
type ClusterRates struct {
	Products float64 `toml:"products" min:"0"` // TFLOP/s of large matrix products
	// TFLOP/s of the forward pass of attention; pairs that a causal mask hides do not count
	Attention float64 `toml:"attention" min:"0"`
	// of the backward pass, which has 2.5 times the FLOPs
	Gradient float64 `toml:"gradient" min:"0"`
	Delta    float64 `toml:"delta" min:"0"`  // of the gated delta rule
	Memory   float64 `toml:"memory" min:"0"` // GB/s of a rank's memory
	// GB/s between the host and a rank's device, in each direction
	Copies float64 `toml:"copies" min:"0"`
	// GB/s of host memory that a rank's CPU threads read and write
	Host    float64 `toml:"host" min:"0"`
	Node    float64 `toml:"node" min:"0"`    // GB/s that a rank sends inside a node
	Network float64 `toml:"network" min:"0"` // GB/s that a rank sends to other nodes
	Launch  float64 `toml:"launch" min:"0"`  // least time of an operation, in µs
	Latency float64 `toml:"latency" min:"0"` // least time of a collective, in µs
	Message float64 `toml:"message" min:"0"` // time of a message to another node, beside its bytes, in µs
}

var clusterKeys, _ = walk(reflect.TypeFor[Cluster](), "", nil)

// ReadCluster reads a --cluster file. It refuses unknown keys and invalid values, as Parse does.
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
	var f faults
	scan := keyLines(src)
	if scan.deep > 0 { // before the library reads it
		f.deep(origin{file: path, line: scan.deep})
		return nil, f.err()
	}
	if err := decodeTOML(src, &tree); err != nil {
		return nil, status.Errorf(status.InvalidConfig, "%s: not TOML: %v", path, err)
	}
	for _, x := range scan.clashes {
		f.twice(origin{file: path, line: x.line}, x)
	}
	var table func(prefix string, tree map[string]any)
	table = func(prefix string, tree map[string]any) {
		for name, value := range tree {
			key := prefix + name
			fault := func(format string, args ...any) {
				f.add(origin{file: path, line: max(1, scan.lines[key])}, status.InvalidConfig, format, args...)
			}
			if key == "rates" {
				switch sub := value.(type) {
				case map[string]any:
					table(key+".", sub)
				case []map[string]any:
					fault("rates: one table is needed; write [rates], not [[rates]]")
				default:
					fault("rates = %s: rates is a table; write [rates] and its keys below", show(value))
				}
				continue
			}
			i := slices.IndexFunc(clusterKeys, func(k field) bool { return k.key == key })
			if i < 0 {
				fault("%s: unknown key%s", key, nearestOf(key))
				continue
			}
			if err := clusterKeys[i].convert(reflect.ValueOf(c).Elem().FieldByIndex(clusterKeys[i].index),
				value); err != nil {
				fault("%v", err)
			}
		}
	}
	table("", tree)
	if err := f.err(); err != nil {
		return nil, err
	}
	if c.Nodes > MaxPlanned/c.PerNode { // the product may overflow
		return nil, status.Errorf(status.InvalidConfig,
			"%s: nodes %d x ranks_per_node %d: too many ranks; at most %d are possible", path, c.Nodes, c.PerNode,
			MaxPlanned)
	}
	return c, nil
}

// ClusterKeys returns the keys of a --cluster file.
func ClusterKeys() (all []string) {
	for _, k := range clusterKeys {
		all = append(all, k.key)
	}
	return all
}

// nearestOf returns the fix for an unknown key: the nearest key, or all keys.
func nearestOf(key string) string {
	all := ClusterKeys()
	if near := Nearest(key, all); near != "" {
		return "; did you mean " + near + "?"
	}
	return "; the keys are " + strings.Join(all, ", ")
}

// MaxPlanned is the largest number of ranks of a plan.
const MaxPlanned = 1 << 20
