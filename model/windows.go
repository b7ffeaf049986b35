package model

import (
	"fmt"
	"slices"

	"ulysses/device"
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

// layerKindsOf has the kinds of layers that a config.json of each model type may list. Mistral's
// list has no meaning: if there is a window, all layers have it.
var layerKindsOf = map[string][]string{
	"llama": {fullAttention}, hybridType: {fullAttention, linearAttention},
	"ministral": {fullAttention, slidingAttention}, "qwen2": {fullAttention, slidingAttention}, "qwen3": {fullAttention, slidingAttention},
}

// readLayers reads the sliding window and the kinds of the layers. In a config.json, a window has
// no effect in model types without one, or if use_sliding_window is false.
func (c *Config) readLayers(r *reader) {
	value, given := r.raw["sliding_window"]
	if n, ok := asInt(value); ok && n == 0 && r.strict {
		// TOML has no null
		r.raw["sliding_window"], value = nil, nil
	}
	window := int64(0)
	if given && value == nil {
		r.seen["sliding_window"] = true
	} else if c.windowed() {
		window = r.extent("sliding_window", 4096, maxPositions)
	}
	sliding := func(int64) bool { return window > 0 }
	switch c.ModelType {
	case "qwen2", "qwen3":
		first := r.number("max_window_layers", 28)
		if !r.flag("use_sliding_window", false) {
			window = 0
		}
		sliding = func(layer int64) bool { return window > 0 && float64(layer) >= first }
	default:
		r.value("use_sliding_window")
		r.value("max_window_layers")
		r.value("sliding_window")
	}
	defer c.checkOwnWindow(r, value)
	if c.hybrid() { // readHybrid reads them
		return
	}
	kinds := c.readLayerTypes(r)
	if !c.windowed() {
		return
	}
	for i := range c.NumHiddenLayers {
		kind := fullAttention
		if i < int64(len(kinds)) {
			kind = kinds[i]
		} else if sliding(i) {
			kind = slidingAttention
		}
		if kind == slidingAttention && window == 0 {
			fix := "set sliding_window"
			if c.ModelType != "ministral" {
				fix = "set use_sliding_window = true and sliding_window"
			}
			r.fault(status.InvalidConfig, "layer_types[%d] = %q, but there is no window; %s", i, kind, fix)
			return
		}
		c.LayerTypes = append(c.LayerTypes, kind)
	}
	if slices.Contains(c.LayerTypes, slidingAttention) {
		c.SlidingWindow = window
	} else {
		c.LayerTypes = nil
	}
}

// checkOwnWindow adds a fault if a job sets a window that has no effect.
func (c *Config) checkOwnWindow(r *reader, window any) {
	if !r.strict || window == nil || c.SlidingWindow > 0 {
		return
	}
	fix := fmt.Sprintf("%s has no sliding window; remove it, or set model_type = \"mistral\"", c.ModelType)
	if c.windowed() {
		fix = "no layer has a window; set use_sliding_window = true and max_window_layers, the number of layers without a window"
	}
	r.fault(status.InvalidConfig, "sliding_window = %v: %s", window, fix)
}

// windowed reports whether the model type may have sliding windows.
func (c *Config) windowed() bool {
	return c.ModelType == mistralType || slices.Contains(layerKindsOf[c.ModelType], slidingAttention)
}

// oldKinds are names of kinds of layers in older files.
var oldKinds = map[string]string{"attention": fullAttention, "mamba": linearAttention}

// readLayerTypes reads layer_types, nil if there are none or they have no meaning.
func (c *Config) readLayerTypes(r *reader) (kinds []string) {
	list, given := r.value("layer_types").([]any)
	if !given && r.has("layer_types") {
		r.fault(status.InvalidConfig, "layer_types = %v: give a list with the kind of each layer", r.raw["layer_types"])
	}
	if !given || c.ModelType == mistralType {
		return nil
	}
	for i, value := range list {
		kind, _ := value.(string)
		if name, old := oldKinds[kind]; old {
			kind = name
		}
		if !slices.Contains(layerKindsOf[c.ModelType], kind) {
			r.fault(status.Unsupported, "layer_types[%d] = %q is not built: %s", i, value, c.layerKinds())
			return nil
		}
		kinds = append(kinds, kind)
	}
	if n := int64(len(kinds)); c.NumHiddenLayers > 0 && n != c.NumHiddenLayers {
		r.fault(status.InvalidConfig, "layer_types has %d entries, num_hidden_layers is %d: make them agree", n, c.NumHiddenLayers)
	}
	return kinds
}
