package model

import (
	"fmt"
	"maps"
	"slices"
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
	further, _ := asInt(c.raw[c.family.files.further])
	for i := range min(further, maxLayers) {
		all = append(all, fmt.Sprintf("model.layers.%d.", c.NumHiddenLayers+i))
	}
	return all
}

// Dropped lists the tensors that Load leaves out, as transformers does when it loads only the
// language model: vision, and heads that predict further tokens. Buffers that are computed from the
// configuration are not listed.
func (f *Folder) Dropped() (all []Dropped) {
	for _, prefix := range f.Config.dropped() {
		d := Dropped{Prefix: prefix}
		for _, name := range slices.Sorted(maps.Keys(f.where)) {
			if strings.HasPrefix(name, prefix) && f.Config.ignored(name) {
				d.Tensors++
				d.Bytes += f.where[name].entry.Bytes()
			}
		}
		if d.Tensors > 0 {
			all = append(all, d)
		}
	}
	return all
}
