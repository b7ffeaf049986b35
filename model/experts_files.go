package model

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// Newer versions of transformers have the matrices of all experts of a layer in two tensors, and
// can save them: gate_up_proj [E, 2F, hidden], gate and then up of each expert, and down_proj
// [E, hidden, F]. Their module is mlp in all families.
const (
	stackedGateUp = ".mlp.experts.gate_up_proj"
	stackedDown   = ".mlp.experts.down_proj"
	stackedRouter = ".mlp.gate.weight"
	stackedBias   = ".mlp.gate.moe_statics.e_score_correction_bias" // ERNIE 4.5
	blockBias     = ".mlp.e_score_correction_bias"                  // MiniMax-M2
)

// unstack returns the tensors of single experts in a tensor of a file, or the tensor itself.
func (c *Config) unstack(e tensor.Entry) ([]tensor.Entry, error) {
	names, x := c.family.experts, &c.Experts
	if names == nil || names.stacked {
		return []tensor.Entry{e}, nil
	}
	layer, gateUp := strings.CutSuffix(e.Name, stackedGateUp)
	want := []int64{x.Count, 2 * x.Size, c.HiddenSize}
	if !gateUp {
		var down bool
		if layer, down = strings.CutSuffix(e.Name, stackedDown); !down {
			return []tensor.Entry{e}, nil
		}
		want = []int64{x.Count, c.HiddenSize, x.Size}
	}
	if !slices.Equal(e.Shape, want) {
		return nil, status.Errorf(status.InvalidConfig,
			"tensor %v: config.json says %v (%s, %s, hidden_size): correct one of them", e, want, names.number,
			names.size)
	}
	var parts []tensor.Entry
	name := func(expert int64, matrix string) string {
		return fmt.Sprintf("%s.%s.experts.%d.%s.weight", layer, names.block, expert, matrix)
	}
	n := x.Size * c.HiddenSize
	for i := range x.Count {
		if gateUp {
			parts = append(parts, e.Part(name(i, names.gate), 2*i*n, x.Size, c.HiddenSize),
				e.Part(name(i, names.up), (2*i+1)*n, x.Size, c.HiddenSize))
		} else {
			parts = append(parts, e.Part(name(i, names.down), i*n, c.HiddenSize, x.Size))
		}
	}
	return parts, nil
}

var (
	layerOf  = regexp.MustCompile(`^model\.layers\.\d+\.`)
	expertOf = regexp.MustCompile(`\.experts\.(\d+)\.`)
)

// expertsLast puts the experts of each layer after its other tensors, by their number, so that the
// order in files does not depend on the ranks among which experts are divided.
func (c *Config) expertsLast(tensors []Stored) []Stored {
	if c.SparseLayers() == 0 {
		return tensors
	}
	number := func(t Stored) int64 {
		if m := expertOf.FindStringSubmatch(t.Name); m != nil {
			if n, err := strconv.ParseInt(m[1], 10, 64); err == nil {
				return n
			}
		}
		return -1
	}
	tensors = slices.Clone(tensors)
	for lo, hi := 0, 0; lo < len(tensors); lo = hi {
		layer := layerOf.FindString(tensors[lo].Name)
		for hi = lo + 1; hi < len(tensors) && layerOf.FindString(tensors[hi].Name) == layer; hi++ {
		}
		if layer != "" {
			slices.SortStableFunc(tensors[lo:hi], func(a, b Stored) int { return cmp.Compare(number(a), number(b)) })
		}
	}
	return tensors
}

// nameOf returns the name in this package of a tensor of a file; of experts in one tensor, that of
// the first.
func (c *Config) nameOf(stored string) string {
	name, names := c.family.files.textName(stored), c.family.experts
	if names == nil {
		return name
	}
	if layer, ok := strings.CutSuffix(name, fusedQKVZ); ok && c.family.fusedLinear {
		return layer + fusedParts[0]
	} else if layer, ok := strings.CutSuffix(name, fusedBA); ok && c.family.fusedLinear {
		return layer + fusedParts[2]
	}
	if layer, kind, ok := c.ossEntry(name); ok {
		return ossName(layer, 0, kind)
	}
	for _, x := range [][2]string{{stackedGateUp, ".experts.0." + names.gate + ".weight"},
		{stackedDown, ".experts.0." + names.down + ".weight"}, {stackedRouter, ".gate.weight"},
		{stackedBias, ".moe_statics.e_score_correction_bias"}, {blockBias, ".e_score_correction_bias"}} {
		if layer, ok := strings.CutSuffix(name, x[0]); ok {
			return layer + "." + names.block + x[1]
		}
	}
	return name
}
