package job

import (
	"slices"
	"strings"

	"ulysses/comm"
	"ulysses/data"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/job/assembly"
	"ulysses/job/generate"
	"ulysses/job/report"
	"ulysses/model"
	"ulysses/tensor"
)

// sampler continues the prompts of eval.sample after each evaluation. Rank 0 generates, with a
// model of its own on one rank, whose weights of the compute type are gathered from all ranks
// before. All memory is allocated before the first step.
type sampler struct {
	// on rank 0
	model   *model.Model
	weights *device.Arena
	to      map[string]tensor.Tensor // the weights by name, flat
	text    *generate.Model
	prompts [][]int32
	decoder *model.Decoder
}

// newSampler returns nil if the job has no eval.sample. Collective.
func newSampler(s *session) (*sampler, error) {
	if len(s.Job.Eval.Sample) == 0 {
		return nil, nil
	}
	x := &sampler{}
	var err error
	if s.Mesh.World.Rank() == 0 {
		err = x.open(s)
	}
	if err = comm.Agree(s.Mesh.World, err); err != nil {
		x.free()
		return nil, err
	}
	return x, nil
}

// open prepares rank 0.
func (x *sampler) open(s *session) error {
	refuse := func(err error) error {
		return s.Job.Errorf(status.Of(err), "eval.sample",
			"rank 0 cannot generate text: %v; remove eval.sample, and use ulysses-mpi generate after the run", err)
	}
	if err := x.openModel(s); err != nil {
		return refuse(err)
	}
	longest, err := x.readPrompts(s)
	if err != nil {
		return err
	}
	more := s.Job.Eval.SampleTokens
	total := longest + more
	if most := s.parts.Config.Positions(); total > most {
		return s.Job.Errorf(status.InvalidConfig, "eval.sample_tokens",
			"%d tokens after a prompt of %d, and the model has %d positions; set eval.sample_tokens = %d, or shorten the prompt",
			more, longest, most, max(1, most-longest))
	}
	if x.decoder, err = x.model.NewDecoder(total, assembly.SamplePass); err != nil {
		return refuse(err)
	}
	return nil
}

// openModel makes the model whose weights all ranks gather on rank 0.
func (x *sampler) openModel(s *session) error {
	m, bytes, err := s.parts.SampleModel()
	if err != nil {
		return err
	}
	x.model = m
	if x.weights, err = device.NewArena(s.Device, "weights of eval.sample", bytes); err != nil {
		return err
	}
	x.to = map[string]tensor.Tensor{}
	for _, g := range m.Groups() {
		values, err := x.weights.Tensor(s.Compute, g.Numel())
		if err != nil {
			return err
		}
		g.Bind(values, tensor.Tensor{}, tensor.Tensor{})
		at := int64(0)
		for _, p := range g.Params {
			x.to[p.Name] = values.Slice(0, at, at+p.Numel())
			at += p.Numel()
		}
	}
	return nil
}

// readPrompts stores the token ids of the prompts, and returns the length of the longest one.
func (x *sampler) readPrompts(s *session) (longest int64, err error) {
	j := s.Job
	t, err := data.OpenTokenizer(j.Data.Tokenizer)
	if err != nil {
		return 0, err
	}
	var codec generate.Tokenizer
	if t != nil {
		codec = t
	}
	if x.text, err = generate.Of(x.model, codec, j.Model.Path); err != nil {
		return 0, err
	}
	prompts, err := data.SamplePrompts(j.Data, j.Eval, t)
	if err != nil {
		return 0, j.DataFault(err)
	}
	if t != nil && j.Data.AddBOS && !j.Eval.SampleChat { // the chat template has it
		x.text.Begin = t.Begin()
	}
	for _, prompt := range prompts {
		ids, err := x.text.Prompt([]byte(prompt))
		if err != nil {
			return 0, j.Errorf(status.InvalidConfig, "eval.sample", "%v", err)
		}
		if len(ids) == 0 {
			return 0, j.Errorf(status.InvalidConfig, "eval.sample", "the prompt %q has no tokens; write another one",
				prompt)
		}
		x.prompts = append(x.prompts, ids)
		longest = max(longest, int64(len(ids)))
	}
	return longest, nil
}

// components lists the memory of this rank for the memory plan.
func (x *sampler) components() []model.Component {
	if x == nil || x.model == nil {
		return nil
	}
	return assembly.SampleComponents(x.weights.Bytes(), x.decoder.Bytes())
}

func (x *sampler) free() {
	if x == nil {
		return
	}
	if x.decoder != nil {
		x.decoder.Close()
	}
	if x.weights != nil {
		x.weights.Free()
	}
	if x.model != nil {
		x.model.Close()
	}
}

// sample gathers the weights on rank 0, which continues the prompts and logs the texts. Collective.
func (s *session) sample(step int64) error {
	x := s.sampler
	if x == nil {
		return nil
	}
	s.Clock.Push("sample")
	defer s.Clock.Pop()
	stream, err := s.Device.NewStream()
	if err = comm.Agree(s.Mesh.World, err); err != nil {
		return err
	}
	defer stream.Close()
	if err = s.gatherSample(stream); err != nil {
		return err
	}
	if s.Mesh.World.Rank() == 0 {
		err = s.generateSamples(step)
	}
	return comm.Agree(s.Mesh.World, err)
}

// gatherSample copies the weights of all ranks to the model of the sampler. Collective.
func (s *session) gatherSample(stream device.Stream) error {
	for _, x := range s.parts.Weights.Portions() {
		all, err := s.whole(x, false, stream)
		if err != nil {
			return err
		}
		if s.Mesh.World.Rank() > 0 {
			continue
		}
		at := int64(0)
		for _, p := range x.Params {
			if err := s.Device.Copy(stream, s.sampler.to[p.Name], all.Slice(0, at, at+p.Numel())); err != nil {
				return err
			}
			at += p.Numel()
		}
		if err := stream.Sync(); err != nil { // the next portion is gathered into the same memory
			return err
		}
	}
	if s.Mesh.World.Rank() > 0 {
		return nil
	}
	return s.sampler.model.SetBiases(s.parts.Model.Biases())
}

// generateSamples continues the prompts, on rank 0.
func (s *session) generateSamples(step int64) error {
	x, j := s.sampler, s.Job
	for i, ids := range x.prompts {
		if err := x.decoder.Reset(); err != nil {
			return err
		}
		how := generate.Sampling{Temperature: j.Eval.SampleTemperature, TopP: 1, Seed: uint64(j.Seed) + uint64(i)}
		var text strings.Builder
		r, err := x.text.Continue(x.decoder, slices.Clone(ids), j.Eval.SampleTokens, how, func(part string) error {
			text.WriteString(part)
			return nil
		})
		if err != nil {
			return err
		}
		sample := report.Sample{Step: step, Prompt: j.Eval.Sample[i],
			Text: strings.ToValidUTF8(text.String(), "\uFFFD")}
		s.Log.Info().Int64("step", step).Str("prompt", sample.Prompt).Str("text", sample.Text).Int64("tokens",
			r.Tokens).Msg("sample")
		if s.progress != nil {
			s.progress.totals.Samples = append(s.progress.totals.Samples, sample)
		}
	}
	return nil
}
