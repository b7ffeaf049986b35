package model

import (
	"slices"
	"strings"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// fused is a matrix in the files of a family whose rows are several matrices of the model, one
// after another.
type fused struct {
	name  string   // without the layer, such as self_attn.qkv_proj
	parts []string // self_attn.q_proj, …
}

var (
	fusedQKV    = fused{"self_attn.qkv_proj", []string{"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}}
	fusedGateUp = fused{"mlp.gate_up_proj", []string{"mlp.gate_proj", "mlp.up_proj"}}
)

// rows returns the rows of a part.
func (c *Config) rows(part string) int64 {
	switch part {
	case "self_attn.q_proj":
		return c.NumAttentionHeads * c.HeadDim
	case "self_attn.k_proj", "self_attn.v_proj":
		return c.NumKeyValueHeads * c.HeadDim
	}
	return c.IntermediateSize
}

// fusedAs returns the fused matrix that a tensor of the files is, with what precedes and follows
// its name; nil if it is none.
func (f *files) fusedAs(name string) (x *fused, before, after string) {
	for i := range f.fused {
		if before, after, ok := strings.Cut(name, "."+f.fused[i].name+"."); ok {
			return &f.fused[i], before, after
		}
	}
	return nil, "", ""
}

// partsOf returns where the tensors of the model are in a tensor of a file, by their names in this
// package: experts that are stacked, parts of a fused matrix, or the tensor itself.
func (c *Config) partsOf(stored tensor.Entry) (map[string]location, error) {
	if parts, err := c.unfuse(stored); parts != nil || err != nil {
		return parts, err
	}
	if parts, err := c.unstackOSS(stored); parts != nil || err != nil {
		return parts, err
	}
	experts, err := c.unstack(stored)
	if err != nil {
		return nil, err
	}
	parts := map[string]location{}
	for _, e := range experts {
		own := c.nameOf(e.Name)
		if x, before, after := c.family.files.fusedAs(own); x != nil {
			if err := c.split(parts, x, before, after, e); err != nil {
				return nil, err
			}
			continue
		}
		parts[own] = c.locate(own, e)
	}
	return parts, nil
}

// split adds the parts of a fused matrix.
func (c *Config) split(parts map[string]location, x *fused, before, after string, e tensor.Entry) error {
	rows := int64(0)
	for _, part := range x.parts {
		rows += c.rows(part)
	}
	if len(e.Shape) == 0 || e.Shape[0] != rows {
		return status.Errorf(status.InvalidConfig, "tensor %v: config.json says %d rows (%s); correct one of them", e,
			rows, strings.Join(x.parts, ", "))
	}
	width, lo := e.Numel()/rows, int64(0)
	for _, part := range x.parts {
		name, shape := before+"."+part+"."+after, append([]int64{c.rows(part)}, e.Shape[1:]...)
		parts[name] = location{entry: e.Part(name, lo*width, shape...)}
		lo += shape[0]
	}
	return nil
}

// InFiles returns the tensors of a model as its family has them in files: rows in the order of the
// files, the parts of fused matrices as one tensor, at the place of the first, and the experts of a
// layer after its other tensors. All parts are there.
func (c *Config) InFiles(tensors []Stored) []Stored {
	tensors = c.stackOSS(c.fuseLinear(c.expertsLast(tensors)))
	of := map[string]Stored{}
	for i, t := range tensors {
		tensors[i] = c.orderRows(t)
		of[t.Name] = tensors[i]
	}
	var all []Stored
	for _, t := range tensors {
		x, i, before, after := c.family.files.partOf(t.Name)
		if x == nil {
			all = append(all, t)
		} else if i == 0 {
			parts := make([]Stored, len(x.parts))
			for j, part := range x.parts {
				parts[j] = of[before+"."+part+"."+after]
			}
			all = append(all, joined(before+"."+x.name+"."+after, parts))
		}
	}
	return all
}

// partOf returns the fused matrix that has a tensor of the model as part i, with what precedes and
// follows the part's name; nil if there is none.
func (f *files) partOf(name string) (x *fused, i int, before, after string) {
	for k := range f.fused {
		for i, part := range f.fused[k].parts {
			if before, after, ok := strings.Cut(name, "."+part+"."); ok {
				return &f.fused[k], i, before, after
			}
		}
	}
	return nil, 0, "", ""
}

// joined is the tensor with the rows of all parts.
func joined(name string, parts []Stored) Stored {
	t := Stored{Name: name, DType: parts[0].DType, Shape: append([]int64(nil), parts[0].Shape...),
		portions: slices.Clone(parts[0].portions)}
	for _, p := range parts[1:] {
		t.Shape[0] += p.Shape[0]
		t.portions = append(t.portions, p.portions...)
	}
	t.Read = func(at int64, dst []float32) error {
		for _, p := range parts {
			n := tensor.Of(nil, p.DType, p.Shape...).Numel()
			if at >= n {
				at -= n
				continue
			}
			m := min(n-at, int64(len(dst)))
			if err := p.Read(at, dst[:m]); err != nil {
				return err
			}
			if at, dst = 0, dst[m:]; len(dst) == 0 {
				break
			}
		}
		return nil
	}
	return t
}

// moduleInFiles returns the path in the files of the module that has a matrix of the model. Of a
// fused matrix, for which PEFT has one adapter, it also returns the first row of the part and the
// number of all rows, otherwise 0.
func (c *Config) moduleInFiles(name string) (path string, at, rows int64) {
	if linear := c.linearHeads(); linear != nil {
		if path, at, rows, ok := linear.module(name); ok {
			return path, at, rows
		}
	}
	x, i, before, _ := c.family.files.partOf(name)
	if x == nil {
		return module(name), 0, 0
	}
	for k, part := range x.parts {
		if k < i {
			at += c.rows(part)
		}
		rows += c.rows(part)
	}
	return before + "." + x.name, at, rows
}

// refuseHalfFrozen is an error if some but not all parts of a fused matrix are frozen: their rows
// could not be written as one tensor.
func (f *files) refuseHalfFrozen(groups []*Group) error {
	frozen := map[string]bool{}
	for _, g := range groups {
		for _, p := range g.Params {
			x, _, before, after := f.partOf(p.Name)
			if x == nil {
				continue
			}
			name := before + "." + x.name + "." + after
			if was, seen := frozen[name]; seen && was != p.Frozen {
				return status.Errorf(status.InvalidConfig,
					"train.freeze: %s are one matrix (%s) in the files of this model; freeze all of them or none",
					strings.Join(x.parts, ", "), x.name)
			}
			frozen[name] = p.Frozen
		}
	}
	return nil
}

// paired reports whether a tensor has rows of heads whose rotated features are neighbours in the
// files: features 2i and 2i + 1 of a head are rotated together, where the program rotates i and i +
// half. Scores are sums over the features of q and k, so their order is free. Of an adapter, B has
// such rows.
func (f *files) paired(name string) bool {
	return f.pairs && !strings.HasSuffix(name, loraA) &&
		(strings.Contains(name, ".self_attn.q_proj.") || strings.Contains(name, ".self_attn.k_proj."))
}

// rowOrder is the order of a tensor's rows in the files: the row in the files of a row of the
// model, and the reverse.
type rowOrder struct{ file, model func(int64) int64 }

// rowOrder returns the order of a tensor's rows in the files, nil if it is that of the model.
func (c *Config) rowOrder(name string) *rowOrder {
	if c.IsLatent() {
		return c.latentOrder(name)
	}
	if c.family.files.paired(name) {
		return &rowOrder{c.fileRow, c.rowOfFile}
	}
	if x := c.linearHeads(); x != nil {
		return x.adapterOrder(name)
	}
	return nil
}

// locate returns where a file has a tensor of the model, whose rows may have another order there.
func (c *Config) locate(name string, e tensor.Entry) location {
	at := location{entry: e}
	if order := c.rowOrder(name); order != nil {
		at.row = order.file
	}
	return at
}

// fileRow returns the row in the files of a row of a paired tensor, and rowOfFile the reverse.
func (c *Config) fileRow(row int64) int64 {
	head, i := row/c.HeadDim*c.HeadDim, row%c.HeadDim
	if i < c.RotaryDim {
		i = interleaved(i, c.RotaryDim)
	}
	return head + i
}

func (c *Config) rowOfFile(row int64) int64 {
	head, i := row/c.HeadDim*c.HeadDim, row%c.HeadDim
	if i < c.RotaryDim {
		i = separated(i, c.RotaryDim)
	}
	return head + i
}

// byRows reads elements from at on of a tensor with rows of `width` elements. read reads elements
// of one row, from a column on.
func byRows(at, width int64, dst []float32, read func(row, column int64, dst []float32) error) error {
	for len(dst) > 0 {
		column := at % width
		n := min(width-column, int64(len(dst)))
		if err := read(at/width, column, dst[:n]); err != nil {
			return err
		}
		at, dst = at+n, dst[n:]
	}
	return nil
}

// orderRows is a tensor of the model with its rows in the order of the files.
func (c *Config) orderRows(t Stored) Stored {
	order := c.rowOrder(t.Name)
	if order == nil {
		return t
	}
	read, width := t.Read, tensor.Of(nil, t.DType, t.Shape...).Numel()/t.Shape[0]
	t.Read = func(at int64, dst []float32) error {
		return byRows(at, width, dst, func(row, column int64, dst []float32) error {
			return read(order.model(row)*width+column, dst)
		})
	}
	return t
}

// InFileOrder returns the elements of a parameter, or of its gradient, with rows and columns in the
// order of the files.
func (c *Config) InFileOrder(p *Param, x []float32) []float32 {
	if _, _, kind, ok := c.ossParam(p.Name); ok && alternates(kind) {
		y := make([]float32, len(x))
		reordered(0, p.Shape[len(p.Shape)-1], y, modelColumn, func(at int64, dst []float32) error {
			copy(dst, x[at:])
			return nil
		})
		return y
	}
	order := c.rowOrder(p.Name)
	if order == nil {
		return x
	}
	y, width := make([]float32, len(x)), p.Numel()/p.Shape[0]
	byRows(0, width, y, func(row, column int64, dst []float32) error {
		copy(dst, x[order.model(row)*width+column:])
		return nil
	})
	return y
}
