package model

import (
	"fmt"
	"maps"
	"slices"

	"ulysses/device"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

const slidingAttention = "sliding_attention"

// mask is a kind of softmax attention: over all earlier keys of the document, or over those in the
// sliding window.
type mask uint8

const (
	fullMask mask = iota
	slidingMask
	masks
)

// window returns the keys that a query sees, in addition to causality. Of the W keys in a window,
// the last is the query's own.
func (c *Config) window(k mask) *device.Window {
	if k == fullMask {
		return nil
	}
	return &device.Window{Left: c.SlidingWindow - 1, Right: -1}
}

// kind returns the type of a layer: full_attention, sliding_attention or linear_attention.
func (c *Config) kind(layer int64) string {
	if layer < int64(len(c.LayerTypes)) {
		return c.LayerTypes[layer]
	}
	return fullAttention
}

// Sliding reports whether a layer is softmax attention in a sliding window.
func (c *Config) Sliding(layer int64) bool { return c.kind(layer) == slidingAttention }

func (c *Config) maskOf(layer int64) mask {
	if c.Sliding(layer) {
		return slidingMask
	}
	return fullMask
}

// softmaxLayers returns the number of softmax layers of each kind.
func (c *Config) softmaxLayers() (n [masks]int64) {
	for i := range c.NumHiddenLayers {
		if !c.Linear(i) {
			n[c.maskOf(i)]++
		}
	}
	return n
}

// Pairs returns the number of pairs of a query with a visible key in a document, as Flops counts
// them: the mean over the layers of softmax attention.
func (c *Config) Pairs(length int64) float64 {
	n, layers := float64(length), c.softmaxLayers()
	all := n * n / 2
	if layers[slidingMask] == 0 {
		return all
	}
	seen := all
	if w := float64(c.SlidingWindow); w < n {
		seen = w*w/2 + (n-w)*w
	}
	full, sliding := float64(layers[fullMask]), float64(layers[slidingMask])
	return (full*all + sliding*seen) / (full + sliding)
}

// readLayers reads the sliding window and the kinds of the layers. In a config.json, a window has
// no effect in families without one, or if use_sliding_window is false.
func (c *Config) readLayers(r *reader) {
	given := maps.Clone(r.raw)
	window := c.readWindow(r)
	kind := func(int64) string { return fullAttention }
	if c.family.layers != nil {
		kind = c.family.layers(r, window)
	}
	if !r.seen["max_window_layers"] {
		r.ineffective("max_window_layers", "remove it")
	}
	kinds := c.readLayerTypes(r)
	for i := range c.NumHiddenLayers {
		if i >= int64(len(kinds)) {
			kinds = append(kinds, kind(i))
		}
		if kinds[i] == slidingAttention && window == 0 {
			fix := "set sliding_window"
			if c.family.windowFlag {
				fix = "set use_sliding_window = true and sliding_window"
			}
			r.fault(status.InvalidConfig, "layer_types[%d] = %q, but there is no window; %s", i, kinds[i], fix)
			return
		}
	}
	if slices.ContainsFunc(kinds, func(kind string) bool { return kind != fullAttention }) {
		c.LayerTypes = kinds
	}
	if slices.Contains(kinds, slidingAttention) {
		c.SlidingWindow = window
	}
	c.checkOwnWindow(r, given)
}

// readWindow returns the keys that a query sees in a sliding window, 0 = there is none.
func (c *Config) readWindow(r *reader) int64 {
	value, given := r.raw["sliding_window"]
	if n, ok := asInt(value); ok && n == 0 && r.strict { // TOML has no null
		r.raw["sliding_window"], value = nil, nil
	}
	r.value("sliding_window")
	if !c.family.windowFlag {
		r.ineffective("use_sliding_window", "remove it; a window is set by sliding_window, in families that have one")
	} else if !r.flag("use_sliding_window", false) {
		return 0 // whatever sliding_window says: transformers writes 0 for Qwen2-MoE
	}
	if c.family.window > 0 && (!given && !c.family.noWindow || value != nil) {
		return r.extent("sliding_window", c.family.window, maxPositions)
	}
	return 0
}

// checkOwnWindow adds a fault if a job sets a window that has no effect. own has the fields that
// the job sets.
func (c *Config) checkOwnWindow(r *reader, own map[string]any) {
	window, flag := own["sliding_window"], own["use_sliding_window"]
	if !r.strict || c.SlidingWindow > 0 {
		return
	}
	fix := fmt.Sprintf("%s has no sliding window; remove it, or set model_type = \"mistral\"", c.ModelType)
	switch {
	case c.family.windowFlag:
		fix = "no layer has a window; set use_sliding_window = true and sliding_window"
		if c.family.kinds != nil {
			fix += ", and name the layers with a window in layer_types"
		}
	case c.family.window > 0:
		fix = "no layer has a window; remove it, or name the layers with a window in layer_types"
	}
	switch {
	case window != nil:
		r.fault(status.InvalidConfig, "sliding_window = %v: %s", window, fix)
	case c.family.windowFlag && flag == true:
		r.fault(status.InvalidConfig, "use_sliding_window = true: %s", fix)
	}
}

// oldKinds are names of kinds of layers in older files.
var oldKinds = map[string]string{"attention": fullAttention, "mamba": linearAttention}

// layerKinds returns the end of the error message for a kind of layer that a family does not have.
func (f *family) layerKinds() string {
	switch {
	case slices.Contains(f.kinds, linearAttention):
		return notbuilt.HybridLayerTypes.Instead
	case slices.Contains(f.kinds, slidingAttention):
		return notbuilt.WindowLayerTypes.Instead
	}
	return notbuilt.LayerTypes.Instead
}

// readLayerTypes reads layer_types, nil if there are none or they have no meaning.
func (c *Config) readLayerTypes(r *reader) (kinds []string) {
	list, given := r.value("layer_types").([]any)
	if !given && r.has("layer_types") {
		r.fault(status.InvalidConfig, "layer_types = %v: give a list with the kind of each layer", r.raw["layer_types"])
	}
	if given && c.family.kinds == nil {
		r.ineffective("layer_types", "remove it")
	}
	if !given || c.family.kinds == nil {
		return nil
	}
	for i, value := range list {
		kind, _ := value.(string)
		if name, old := oldKinds[kind]; old {
			kind = name
		}
		if !slices.Contains(c.family.kinds, kind) {
			r.fault(status.Unsupported, "layer_types[%d] = %s is not built: %s", i, quoted(value),
				c.family.layerKinds())
			return nil
		}
		kinds = append(kinds, kind)
	}
	if n := int64(len(kinds)); c.NumHiddenLayers > 0 && n != c.NumHiddenLayers {
		r.fault(status.InvalidConfig, "layer_types has %d entries, num_hidden_layers is %d: make them agree", n,
			c.NumHiddenLayers)
	}
	return kinds
}
