package model

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Dropped describes the tensors of a folder under one prefix that the model does not have.
type Dropped struct {
	Prefix  string
	Tensors int
	Bytes   int64 // in the files
}

// dropped returns the prefixes of the tensors of files that the model does not have.
func (c *Config) dropped() []string {
	all := slices.Clone(c.family.files.dropped)
	for i := range c.furtherLayers() {
		all = append(all, fmt.Sprintf("model.layers.%d.", c.NumHiddenLayers+i))
	}
	return all
}

// furtherLayers returns the number of layers behind the last that predict further tokens.
func (c *Config) furtherLayers() int64 {
	n, _ := asInt(c.raw[c.family.files.further])
	return min(max(n, 0), maxLayers)
}

// droppedBy returns the prefix by which a tensor of a file is dropped; "" if the model may have it.
func (c *Config) droppedBy(name string) string {
	for _, prefix := range c.family.files.dropped {
		if strings.HasPrefix(name, prefix) {
			return prefix
		}
	}
	prefix := layerOf.FindString(name)
	number := strings.TrimSuffix(strings.TrimPrefix(prefix, "model.layers."), ".")
	n, err := strconv.ParseInt(number, 10, 64)
	if n -= c.NumHiddenLayers; err != nil || n < 0 || n >= c.furtherLayers() {
		return ""
	}
	return prefix
}

// Dropped lists the tensors that Load leaves out, as transformers does when it loads only the
// language model: vision, and heads that predict further tokens. Buffers that are computed from the
// configuration are not listed.
func (f *Folder) Dropped() (all []Dropped) {
	by := map[string]Dropped{}
	for name, at := range f.where {
		prefix := f.Config.droppedBy(name)
		d := by[prefix]
		by[prefix] = Dropped{prefix, d.Tensors + 1, d.Bytes + at.entry.Bytes()}
	}
	for _, prefix := range f.Config.dropped() {
		if d, found := by[prefix]; found {
			all = append(all, d)
		}
	}
	return all
}

// HasVision reports whether transformers and PEFT load a model with vision from the folder, in
// which the matrices of the text model have other names.
func (f *Folder) HasVision() bool { return f.Config.family.files.images && len(f.Dropped()) > 0 }
