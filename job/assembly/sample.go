package assembly

import (
	"ulysses/comm"
	"ulysses/data"
	"ulysses/device"
	"ulysses/model"
)

// SamplePass is the number of tokens of a prompt of eval.sample in one pass.
const SamplePass = 512

// SampleModel returns the model with which rank 0 continues the prompts of eval.sample, without
// weights, and the bytes of these. It has one rank. The caller closes it.
func (p *Parts) SampleModel() (m *model.Model, bytes int64, err error) {
	m, err = model.New(p.Device, comm.Local(1)[0], p.Config, model.Options{Compute: p.Compute, LoRA: p.Job.Adapters()})
	if err != nil {
		return nil, 0, err
	}
	for _, g := range m.Groups() {
		bytes += device.Padded(p.Device, g.Numel()*p.Compute.Size())
	}
	return m, bytes, nil
}

// SampleComponents lists the memory of eval.sample for the memory plan.
func SampleComponents(weights, decoder int64) []model.Component {
	return []model.Component{{Name: "weights of eval.sample", Bytes: weights},
		{Name: "decoder of eval.sample", Bytes: decoder}}
}

// PlanSample returns the memory of eval.sample for a plan, which has no tokenizer: a prompt has at
// most as many tokens as bytes.
func (p *Parts) PlanSample() ([]model.Component, error) {
	e := &p.Job.Eval
	if len(e.Sample) == 0 {
		return nil, nil
	}
	prompts := e.Sample
	if e.SampleChat {
		t, err := data.OpenTokenizer(p.Job.Data.Tokenizer)
		if err == nil {
			prompts, err = data.SamplePrompts(p.Job.Data, *e, t)
		}
		if err != nil {
			return nil, p.Job.DataFault(err)
		}
	}
	m, weights, err := p.SampleModel()
	if err != nil {
		return nil, err
	}
	defer m.Close()
	longest := 0
	for _, prompt := range prompts {
		longest = max(longest, len(prompt))
	}
	if p.Job.Data.AddBOS && !e.SampleChat && p.Job.Data.Tokenizer != "bytes" {
		longest++ // the begin mark
	}
	d, err := m.NewDecoder(int64(longest)+e.SampleTokens, SamplePass)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return SampleComponents(weights, d.Bytes()), nil
}
