package model

import (
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

// droppedPrefixes are the prefixes that transformers also leaves out when it loads only Qwen3.5's
// language model: vision, and heads that predict further tokens.
var droppedPrefixes = []string{"model.visual.", "mtp."}

// Dropped lists the tensors that Load leaves out, except buffers that are computed from the
// configuration.
func (f *Folder) Dropped() (all []Dropped) {
	for _, prefix := range droppedPrefixes {
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
