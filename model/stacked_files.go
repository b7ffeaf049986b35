package model

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// Files of gpt-oss have one tensor for a matrix of all experts of a layer, with inputs first:
// gate_up_proj [E, hidden, 2F] and down_proj [E, F, hidden], and their biases [E, 2F] and
// [E, hidden]. Columns of gate and up alternate. This package has a parameter for each expert, with
// the columns of gate before the columns of up.
const (
	ossExperts = ".mlp.experts."
	ossGateUp  = "gate_up_proj"
	ossDown    = "down_proj"
	ossBias    = "_bias"
)

// ossKinds are the tensors of a layer, in the order of files.
var ossKinds = []string{ossGateUp, ossGateUp + ossBias, ossDown, ossDown + ossBias}

// ossShape returns the shape of a kind of tensor of one expert.
func (c *Config) ossShape(kind string) []int64 {
	f, h := c.Experts.Size, c.HiddenSize
	return map[string][]int64{ossGateUp: {h, 2 * f}, ossGateUp + ossBias: {2 * f}, ossDown: {f, h},
		ossDown + ossBias: {h}}[kind]
}

func ossName(layer string, expert int64, kind string) string {
	return fmt.Sprintf("%s%s%d.%s", layer, ossExperts, expert, kind)
}

// stackedExperts reports whether files have one tensor for the matrices of all experts.
func (c *Config) stackedExperts() bool {
	return c.Experts.Count > 0 && c.family.experts != nil && c.family.experts.stacked
}

// ossEntry returns the layer and the kind of a tensor of a file; ok is false for other tensors.
func (c *Config) ossEntry(name string) (layer, kind string, ok bool) {
	if !c.stackedExperts() {
		return "", "", false
	}
	layer, kind, ok = strings.Cut(name, ossExperts)
	return layer, kind, ok && slices.Contains(ossKinds, kind)
}

// unstackOSS returns where the tensors of the experts are in a tensor of a file; nil if it is none
// of all experts.
func (c *Config) unstackOSS(e tensor.Entry) (map[string]location, error) {
	layer, kind, ok := c.ossEntry(e.Name)
	if !ok {
		return nil, nil
	}
	shape := c.ossShape(kind)
	if want := append([]int64{c.Experts.Count}, shape...); !slices.Equal(e.Shape, want) {
		return nil, status.Errorf(status.InvalidConfig,
			"tensor %v: config.json says %v (num_local_experts, intermediate_size, hidden_size): correct one of them",
			e, want)
	}
	parts, n := map[string]location{}, e.Numel()/c.Experts.Count
	for i := range c.Experts.Count {
		name := ossName(layer, i, kind)
		parts[name] = location{entry: e.Part(name, i*n, shape...), alternates: alternates(kind)}
	}
	return parts, nil
}

// alternates reports whether the columns of gate and up alternate in a kind of tensor.
func alternates(kind string) bool { return strings.HasPrefix(kind, ossGateUp) }

// fileColumn returns the column in a file of a column of gate and up, of 2F columns. modelColumn is
// the reverse.
func fileColumn(column, width int64) int64 {
	if f := width / 2; column >= f {
		return 2*(column-f) + 1
	}
	return 2 * column
}

func modelColumn(column, width int64) int64 { return column/2 + column%2*(width/2) }

// reordered reads elements from at on of a tensor whose rows of `width` elements have the order of
// `from`, from a tensor that read reads.
func reordered(at, width int64, dst []float32, from func(column, width int64) int64,
	read func(at int64, dst []float32) error) error {
	first := at / width * width
	rows := make([]float32, (at+int64(len(dst))+width-1)/width*width-first)
	if err := read(first, rows); err != nil {
		return err
	}
	for i := range dst {
		j := at + int64(i)
		dst[i] = rows[j/width*width-first+from(j%width, width)]
	}
	return nil
}

var ossPart = regexp.MustCompile(`^(.*)\.mlp\.experts\.(\d+)\.(.*)$`)

// ossParam returns the layer, the expert and the kind of a tensor of one expert; ok is false for
// other tensors.
func (c *Config) ossParam(name string) (layer string, expert int64, kind string, ok bool) {
	m := ossPart.FindStringSubmatch(name)
	if m == nil || !c.stackedExperts() || !slices.Contains(ossKinds, m[3]) {
		return "", 0, "", false
	}
	expert, err := strconv.ParseInt(m[2], 10, 64)
	return m[1], expert, m[3], err == nil
}

// stackOSS replaces the tensors of experts by the tensors of a folder of gpt-oss, at the place of
// the first tensor of a layer. Kinds that are not there are left out.
func (c *Config) stackOSS(tensors []Stored) []Stored {
	if !c.stackedExperts() {
		return tensors
	}
	of, done := map[string]Stored{}, map[string]bool{}
	for _, t := range tensors {
		of[t.Name] = t
	}
	var all []Stored
	for _, t := range tensors {
		layer, _, _, ok := c.ossParam(t.Name)
		if !ok {
			all = append(all, t)
			continue
		}
		if done[layer] {
			continue
		}
		done[layer] = true
		for _, kind := range ossKinds {
			if _, there := of[ossName(layer, 0, kind)]; !there {
				continue
			}
			parts := make([]Stored, c.Experts.Count)
			for i := range parts {
				parts[i] = alternating(of[ossName(layer, int64(i), kind)], kind)
			}
			x := joined(layer+ossExperts+kind, parts)
			x.Shape = append([]int64{c.Experts.Count}, c.ossShape(kind)...)
			all = append(all, x)
		}
	}
	return all
}

// alternating is a tensor of one expert with the columns of files.
func alternating(t Stored, kind string) Stored {
	if !alternates(kind) {
		return t
	}
	read, width := t.Read, t.Shape[len(t.Shape)-1]
	t.Read = func(at int64, dst []float32) error { return reordered(at, width, dst, modelColumn, read) }
	return t
}
