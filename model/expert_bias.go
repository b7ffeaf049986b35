package model

import (
	"fmt"
	"math"

	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// expertBias is the bias of each expert of each layer (Config.Experts.Biased): a number that is
// added to the expert's probability when experts are chosen, and not to its weight (device.Route).
//
// Training moves the biases instead of adding a loss (Wang et al. 2024, arXiv:2408.15664): after a
// step, the bias of an expert falls by a constant rate if more tokens than the mean have chosen it,
// and rises by the rate if fewer have. The biases are no parameters: they have no gradient, are F32
// in any compute type, and every rank has all of them.
type expertBias struct {
	moves   bool
	values  []float32 // [layers with experts, E]
	choices []float64 // of tokens with a target, of the passes since the last MoveBiases
	device  tensor.Tensor
}

// BiasTensor is the bias of the experts of a layer.
type BiasTensor struct {
	Name   string // in Hugging Face files
	Values []float32
}

// AddExpertBias adds biases of 0 to the experts of a configuration that has none.
func (c *Config) AddExpertBias() error {
	if c.SparseLayers() == 0 {
		return status.Errorf(status.InvalidConfig, "the model has no experts; remove it")
	}
	if e := &c.Experts; e.Groups > 1 && !e.Sigmoid {
		return status.Errorf(status.Unsupported, "biases of experts are not built for %s with n_group = %d: %s", c.ModelType,
			e.Groups, notbuilt.GroupBiases.Instead)
	}
	if !c.Experts.Biased {
		c.Experts.Biased, c.Experts.newBias = true, true
	}
	return nil
}

// AddedBiases reports whether the experts have biases that transformers does not read.
func (c *Config) AddedBiases() bool { return c.Experts.Biased && !c.family.experts.biased }

func (b *expertBias) make(c *Config, moves bool) {
	if !c.Experts.Biased {
		return
	}
	n := c.SparseLayers() * c.Experts.Count
	b.moves, b.values = moves, make([]float32, n)
	if moves {
		b.choices = make([]float64, n)
	}
}

// upload copies the biases to the device, for a pass.
func (b *expertBias) upload(p *pass, m *Model) {
	if n := int64(len(b.values)); n > 0 {
		e := m.Config.Experts.Count
		b.device = p.tempF32(n/e, e)
		p.Copy(b.device, tensor.OfFloat32(b.values, n/e, e))
	}
}

// of returns the bias of a layer on the device; nil if there is none.
func (b *expertBias) of(layer int64) tensor.Tensor {
	if b.device.IsNil() {
		return tensor.Tensor{}
	}
	return b.device.Select(0, layer)
}

// MovesBiases reports whether training moves the biases of the experts.
func (m *Model) MovesBiases() bool { return m.bias.moves }

// Choices returns the numbers of choices of each expert of each layer by tokens with a target, in
// the passes with a backward half since MoveBiases or ForgetChoices. Every rank of a sequence has
// the choices of the whole sequence. The caller adds the choices of other sequences to them.
func (m *Model) Choices() []float64 { return m.bias.choices }

// ForgetChoices begins to count Choices again.
func (m *Model) ForgetChoices() { clear(m.bias.choices) }

// MoveBiases moves the biases by rate, given Choices of the global batch, and forgets these.
func (m *Model) MoveBiases(rate float64) {
	e := m.Config.Experts.Count
	for lo := int64(0); lo < int64(len(m.bias.choices)); lo += e {
		choices, sum := m.bias.choices[lo:lo+e], 0.0
		for _, n := range choices {
			sum += n
		}
		for i, n := range choices {
			if d := sum/float64(e) - n; d != 0 {
				m.bias.values[lo+int64(i)] += float32(math.Copysign(rate, d))
			}
		}
	}
	m.ForgetChoices()
}

// ExpertLoad returns the largest share of an expert in the Choices of a layer, divided by the share
// of equal loads: 1 if all experts of each layer are chosen equally, and E at most; 0 without
// choices.
func (m *Model) ExpertLoad() float64 {
	e, most := m.Config.Experts.Count, 0.0
	for lo := int64(0); lo < int64(len(m.bias.choices)); lo += e {
		largest, sum := 0.0, 0.0
		for _, n := range m.bias.choices[lo : lo+e] {
			largest, sum = max(largest, n), sum+n
		}
		if sum > 0 {
			most = max(most, largest*float64(e)/sum)
		}
	}
	return most
}

// Biases returns the biases of the experts, which later calls change; none if there are none.
func (m *Model) Biases() (all []BiasTensor) {
	e := m.Config.Experts.Count
	for i, name := range m.Config.biasNames() {
		all = append(all, BiasTensor{name, m.bias.values[int64(i)*e : int64(i+1)*e]})
	}
	return all
}

// SetBiases copies the biases of the experts of a model with the same configuration.
func (m *Model) SetBiases(all []BiasTensor) error {
	own := m.Biases()
	fits := len(all) == len(own)
	for i := 0; fits && i < len(own); i++ {
		fits = all[i].Name == own[i].Name && len(all[i].Values) == len(own[i].Values)
	}
	if !fits {
		return status.Errorf(status.InvalidConfig,
			"model.SetBiases: there are biases of %d layers, and not of the %d layers of the model with experts",
			len(all), len(own))
	}
	for i := range own {
		copy(own[i].Values, all[i].Values)
	}
	return nil
}

// biasNames returns the names of the biases of the layers with experts; none if there are no
// biases.
func (c *Config) biasNames() (names []string) {
	if !c.Experts.Biased {
		return nil
	}
	x := c.family.experts
	for i := range c.NumHiddenLayers {
		if c.Sparse(i) {
			names = append(names,
				fmt.Sprintf("model.layers.%d.%s", i, x.biasName()))
		}
	}
	return names
}

// biasShape returns the shape of the biases of a layer in files.
func (c *Config) biasShape() []int64 {
	if c.family.experts.biasModule == "moe_statics" { // ERNIE 4.5
		return []int64{1, c.Experts.Count}
	}
	return []int64{c.Experts.Count}
}

// StoredBiases returns the biases of the experts as tensors of a model folder.
func (c *Config) StoredBiases(all []BiasTensor) (tensors []Stored) {
	for _, b := range all {
		tensors = append(tensors,
			Stored{Name: b.Name, DType: tensor.F32, Shape: c.biasShape(),
				Read: func(at int64, dst []float32) error {
					copy(dst, b.Values[at:])
					return nil
				}})
	}
	return tensors
}

// Biases reads the biases of the experts. They are 0 if the folder has none because its
// configuration had none.
func (f *Folder) Biases() (all []BiasTensor, err error) {
	for _, name := range f.Config.biasNames() {
		b := BiasTensor{name, make([]float32, f.Config.Experts.Count)}
		if at, ok := f.where[name]; ok {
			if err = at.read(0, b.Values); err == nil {
				err = finite(at, 0, b.Values)
			}
			if err != nil {
				return nil, err
			}
		}
		all = append(all, b)
	}
	return all, nil
}

// checkBiases returns the faults of the tensors with biases, and adds their names to known.
func (f *Folder) checkBiases(known map[string]bool) (faults []string) {
	e := &f.Config.Experts
	for _, name := range f.Config.biasNames() {
		known[name] = true
		shape := &Param{Name: name, Shape: f.Config.biasShape(), axes: []string{f.Config.family.experts.number}}
		if at, ok := f.where[name]; ok {
			faults = append(faults, shape.disagree(at.entry)...)
		} else if !e.newBias {
			why := "config.json says use_expert_bias = true"
			if f.Config.family.experts.biased {
				why = "models of type " + f.Config.ModelType + " have it"
			}
			faults = append(faults, fmt.Sprintf("tensor %s%v is missing, and %s", name, shape.Shape, why))
		}
	}
	return faults
}
