package model

import "ulysses/internal/status"

// sparseRule is the rule of a family by which layers have experts.
type sparseRule int

const (
	sparseAll      sparseRule = iota
	sparseUnlisted            // not mlp_only_layers; of decoder_sparse_step layers, the last
	sparseAfter               // the layers after the first first_k_dense_replace
	// from moe_layer_start_index to moe_layer_end_index; of moe_layer_interval layers, the last
	sparseBetween
	sparseListed // by mlp_layer_types; if it is missing, all but the first layer
)

// withSparse returns the fields with another rule.
func (x expertFields) withSparse(rule sparseRule) expertFields {
	x.sparse = rule
	return x
}

// Sparse reports whether the MLP of a layer has experts.
func (c *Config) Sparse(layer int64) bool {
	e := &c.Experts
	return e.Count > 0 && !e.dense[layer] && (layer+1)%e.step == 0
}

// SparseLayers returns the number of layers whose MLP has experts.
func (c *Config) SparseLayers() (n int64) {
	for i := range c.NumHiddenLayers {
		if c.Sparse(i) {
			n++
		}
	}
	return n
}

// denseLayers returns the number of layers before the first one that may have experts.
func (c *Config) denseLayers() (n int64) {
	for n < c.NumHiddenLayers && c.Experts.dense[n] {
		n++
	}
	return n
}

// readSparseLayers reads which layers have experts.
func (c *Config) readSparseLayers(r *reader) {
	rule, e := c.family.experts.sparse, &c.Experts
	e.step, e.dense = 1, map[int64]bool{}
	first, last := int64(0), c.NumHiddenLayers-1 // with experts
	switch rule {
	case sparseUnlisted:
		e.step = r.extent("decoder_sparse_step", 1, maxLayers)
		c.readDenseLayers(r)
	case sparseAfter:
		first = r.count("first_k_dense_replace", c.family.size("first_k_dense_replace", r), maxLayers)
	case sparseBetween:
		e.step = r.extent("moe_layer_interval", 1, maxLayers)
		first = r.count("moe_layer_start_index", c.family.size("moe_layer_start_index", r), maxLayers)
		if n := r.number("moe_layer_end_index", -1); n != -1 {
			last = r.count("moe_layer_end_index", 0, maxLayers)
		}
	case sparseListed:
		if r.has("mlp_layer_types") {
			c.readLayerKinds(r)
		} else {
			first = 1
		}
	}
	for i := range c.NumHiddenLayers {
		if i < first || i > last {
			e.dense[i] = true
		}
	}
	if n := c.SparseLayers() * e.Count; n > maxExperts {
		r.fault(status.InvalidConfig, "num_hidden_layers = %d, %s = %d: the layers have %d experts, and at most %d are "+
			"read; correct one of them", c.NumHiddenLayers, c.family.experts.number, e.Count, n, maxExperts)
	}
}

// readLayerKinds reads mlp_layer_types, the kind of the MLP of each layer.
func (c *Config) readLayerKinds(r *reader) {
	value := r.value("mlp_layer_types")
	kinds, isList := value.([]any)
	if !isList || int64(len(kinds)) < c.NumHiddenLayers {
		r.fault(status.InvalidConfig, "mlp_layer_types = %s: give a list with a kind for each of %d layers", quoted(value),
			c.NumHiddenLayers)
		return
	}
	for i, kind := range kinds[:c.NumHiddenLayers] {
		if c.Experts.dense[int64(i)] = kind == "dense"; kind != "dense" && kind != "sparse" {
			r.fault(status.InvalidConfig, "mlp_layer_types[%d] = %s: give \"dense\" or \"sparse\"", i, quoted(kind))
		}
	}
}

// readDenseLayers reads mlp_only_layers, the layers without experts.
func (c *Config) readDenseLayers(r *reader) {
	list, given := r.value("mlp_only_layers").([]any)
	if !given && r.has("mlp_only_layers") {
		r.fault(status.InvalidConfig, "mlp_only_layers = %v: give a list of the layers without experts, counted from 0",
			r.raw["mlp_only_layers"])
	}
	for i, x := range list {
		n, ok := asInt(x)
		if !ok || n < 0 || c.NumHiddenLayers > 0 && n >= c.NumHiddenLayers {
			r.fault(status.InvalidConfig, "mlp_only_layers[%d] = %v: give the number of a layer, from 0 to %d", i, x,
				c.NumHiddenLayers-1)
			return
		}
		c.Experts.dense[n] = true
	}
}
