package model

import (
	"maps"
	"slices"
	"strings"
)

// Dropped is the tensors of a folder under a prefix that the model does not have.
type Dropped struct {
	Prefix  string
	Tensors int
	Bytes   int64 // in the files
}

// droppedPrefixes are what transformers leaves out too when it loads Qwen3.5's language model alone: vision, and heads for tokens further ahead.
var droppedPrefixes = []string{"model.visual.", "mtp."}

// Dropped lists what Load leaves out, but for buffers that are computed from the configuration.
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
