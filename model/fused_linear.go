package model

import (
	"fmt"
	"slices"
	"strings"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// Qwen3-Next has the projections of linear attention in two tensors: in_proj_qkvz has, for each key
// head, the rows of q, k, v and z, and in_proj_ba the rows of b and a. This package has a tensor
// for each of q|k|v, b, a and z, with all heads of one after the other, as Qwen3.5 has on disk.

const (
	fusedQKVZ = "in_proj_qkvz.weight"
	fusedBA   = "in_proj_ba.weight"
)

// fusedName returns the name of one of the two tensors.
func fusedName(qkvz bool) string {
	if qkvz {
		return fusedQKVZ
	}
	return fusedBA
}

// fusedParts are the tensors of this package, in the order of fusedRow's parts.
var fusedParts = []string{"in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight"}

// fusedLinear are the heads of a model with fused projections.
type fusedLinear struct {
	keys, values, keyDim, valueDim int64 // heads, and features of a head
}

// linearHeads returns the heads, nil if the family's projections are not fused.
func (c *Config) linearHeads() *fusedLinear {
	if !c.family.fusedLinear {
		return nil
	}
	return &fusedLinear{c.LinearNumKeyHeads, c.LinearNumValueHeads, c.LinearKeyHeadDim, c.LinearValueHeadDim}
}

// rows returns the number of rows of a part.
func (x *fusedLinear) rows(part int) int64 {
	return []int64{2*x.keys*x.keyDim + x.values*x.valueDim, x.values * x.valueDim, x.values, x.values}[part]
}

// part returns the part, and its row, of a row of in_proj_qkvz, or of in_proj_ba.
func (x *fusedLinear) part(qkvz bool, row int64) (part int, at int64) {
	group := x.values / x.keys // value heads of a key head
	if !qkvz {
		head, r := row/(2*group), row%(2*group)
		return 2 + int(r/group), head*group + r%group
	}
	k, v := x.keyDim, group*x.valueDim
	head, r := row/(2*k+2*v), row%(2*k+2*v)
	switch {
	case r < k: // q
		return 0, head*k + r
	case r < 2*k:
		return 0, x.keys*k + head*k + r - k
	case r < 2*k+v:
		return 0, 2*x.keys*k + head*v + r - 2*k
	}
	return 1, head*v + r - 2*k - v
}

// stored returns, for each row of a part, its row in in_proj_qkvz, or in in_proj_ba.
func (x *fusedLinear) stored(part int) []int64 {
	rows := make([]int64, x.rows(part))
	qkvz := part < 2
	for row := range x.total(qkvz) {
		if p, at := x.part(qkvz, row); p == part {
			rows[at] = row
		}
	}
	return rows
}

// total returns the number of rows of in_proj_qkvz, or of in_proj_ba.
func (x *fusedLinear) total(qkvz bool) int64 {
	if qkvz {
		return x.rows(0) + x.rows(1)
	}
	return x.rows(2) + x.rows(3)
}

// module returns the path of the fused projection that has a part, the first row of the part among
// the rows of its parts, and their number. Rows of an adapter's B in the model are in this order.
func (x *fusedLinear) module(name string) (path string, at, rows int64, ok bool) {
	for part, suffix := range fusedParts {
		layer, ok := strings.CutSuffix(name, suffix)
		if !ok {
			continue
		}
		qkvz := part < 2
		return layer + module(fusedName(qkvz)), x.first(part), x.total(qkvz), true
	}
	return "", 0, 0, false
}

// first returns the first row of a part among the rows of the parts of its fused projection.
func (x *fusedLinear) first(part int) int64 {
	if part%2 == 0 {
		return 0
	}
	return x.rows(part - 1)
}

// adapterOrder returns the order of rows of B of the adapter of a fused projection, otherwise nil.
func (x *fusedLinear) adapterOrder(name string) *rowOrder {
	path, ok := strings.CutSuffix(name, loraB)
	qkvz := strings.HasSuffix(path, "."+module(fusedQKVZ))
	if !ok || !qkvz && !strings.HasSuffix(path, "."+module(fusedBA)) {
		return nil
	}
	model := func(row int64) int64 {
		part, at := x.part(qkvz, row)
		return x.first(part) + at
	}
	file := make([]int64, x.total(qkvz))
	for row := range x.total(qkvz) {
		file[model(row)] = row
	}
	return &rowOrder{file: func(row int64) int64 { return file[row] }, model: model}
}

// unfuse returns where the parts are stored in a tensor of a file; nil if it is not a fused
// projection.
func (c *Config) unfuse(e tensor.Entry) (map[string]location, error) {
	x := c.linearHeads()
	layer, qkvz := strings.CutSuffix(e.Name, fusedQKVZ)
	if !qkvz {
		var ba bool
		if layer, ba = strings.CutSuffix(e.Name, fusedBA); !ba {
			return nil, nil
		}
	}
	if x == nil {
		return nil, nil
	}
	if want := []int64{x.total(qkvz), c.HiddenSize}; !slices.Equal(e.Shape, want) {
		return nil, status.Errorf(status.InvalidConfig,
			"tensor %v: config.json says %v (linear_num_key_heads, linear_num_value_heads, their dimensions, hidden_size): correct one of them",
			e, want)
	}
	parts := []int{0, 1}
	if !qkvz {
		parts = []int{2, 3}
	}
	all := map[string]location{}
	for _, i := range parts {
		name, rows := layer+fusedParts[i], x.stored(i)
		all[name] = location{entry: e.Part(name, 0, x.rows(i), c.HiddenSize), whole: &e, row: func(row int64) int64 {
			return rows[row]
		}}
	}
	return all, nil
}

// fuseLinear replaces the projections of linear attention by the tensors that a folder of the model
// has.
func (c *Config) fuseLinear(tensors []Stored) []Stored {
	x := c.linearHeads()
	if x == nil {
		return tensors
	}
	byName := map[string]*Stored{}
	for i := range tensors {
		byName[tensors[i].Name] = &tensors[i]
	}
	var all []Stored
	for _, t := range tensors {
		layer, first := strings.CutSuffix(t.Name, fusedParts[0])
		if first {
			all = append(all, x.fuse(layer, byName, true), x.fuse(layer, byName, false))
		} else if !slices.ContainsFunc(fusedParts, func(part string) bool {
			return strings.HasSuffix(t.Name, ".linear_attn."+part)
		}) {
			all = append(all, t)
		}
	}
	return all
}

// fuse returns a fused tensor of a layer.
func (x *fusedLinear) fuse(layer string, byName map[string]*Stored, qkvz bool) Stored {
	parts := make([]*Stored, len(fusedParts))
	for i, name := range fusedParts {
		parts[i] = byName[layer+name]
	}
	like := parts[2]
	if qkvz {
		like = parts[0]
	}
	n := like.Shape[1]
	return Stored{Name: layer + fusedName(qkvz), DType: like.DType, Shape: []int64{x.total(qkvz), n},
		portions: like.portions, Read: func(at int64, dst []float32) error {
			return byRows(at, n, dst, func(row, column int64, dst []float32) error {
				part, r := x.part(qkvz, row)
				return parts[part].Read(r*n+column, dst)
			})
		}}
}

// checkFrozenFused returns an error if some of the projections that are one tensor on disk are
// frozen: they are saved together.
func (m *Model) checkFrozenFused() error {
	for _, b := range m.blocks {
		x, ok := b.mixer.(*linearMixer)
		if !ok || !m.Config.family.fusedLinear {
			continue
		}
		for _, p := range x.in.w {
			if p.Frozen != x.in.w[0].Frozen {
				return status.Errorf(status.InvalidConfig,
					"train.freeze: %s and %s are parts of one tensor in %s, and one of them is frozen; freeze both or none",
					x.in.w[0].Name, p.Name, fmt.Sprintf("a folder of %s", m.Config.ModelType))
			}
		}
	}
	return nil
}
