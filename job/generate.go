package job

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/internal/units"
	vers "ulysses/internal/version"
	"ulysses/job/file"
	"ulysses/job/generate"
	"ulysses/job/launch"
	"ulysses/tensor"
)

// generateOptions are the flags of the verb generate. A negative number is that of the model.
type generateOptions struct {
	tokens, topK, seed int64
	temperature, topP  float64
	device, dtype      string
	chat               bool
}

// check returns an error for a flag whose value is out of range.
func (g *generateOptions) check(given *pflag.FlagSet) error {
	for _, x := range []struct {
		name  string
		right bool
		want  string
	}{
		{"max-tokens", g.tokens >= 0, "0 (the default) or more"},
		{"temperature", g.temperature >= 0 && g.temperature <= 1e6, "0 to 1e6"},
		{"top-p", g.topP > 0 && g.topP <= 1, "a number above 0 and at most 1"},
		{"top-k", g.topK >= 0, "0 or more"},
		{"device", slices.Contains([]string{"auto", "cpu", "cuda"}, g.device), "auto, cpu or cuda"},
		{"dtype", slices.Contains([]string{"auto", "f32", "bf16"}, g.dtype), "auto, f32 or bf16"},
	} {
		if given.Changed(x.name) && !x.right {
			return fmt.Errorf("generate: --%s %v: set %s", x.name, given.Lookup(x.name).Value, x.want)
		}
	}
	return nil
}

// generateText is the verb generate. o.words are a model folder and a prompt, which rank 0 reads
// from standard input if it is missing. Several ranks divide the layers of the model.
func generateText(o Options) error {
	start := launch.Options{Ranks: o.Ranks, Print: o.complain, Warn: o.warn}
	return launch.Start(start, func(r launch.Rank) (err error, alone bool) {
		if alone, err = o.generateOn(r); err != nil && alone {
			host, _ := os.Hostname()
			err = status.Errorf(status.Of(err), "rank %d on %s failed: %w", r.World.Rank(), host, err)
			r.World.Abort(status.Of(err), err.Error())
		}
		return err, alone && err != nil
	})
}

// generateOn runs the verb on one rank. alone says that the other ranks do not have the error.
func (o *Options) generateOn(r launch.Rank) (alone bool, err error) {
	g, world := &o.generate, r.World
	if err := sameCommand(world, o, comm.Field{Name: "program", Value: vers.Build()},
		comm.Field{Name: "flags", Value: fmt.Sprintf("%+v", *g)}); err != nil {
		return false, err
	}
	prompt, alone, err := o.promptOfRanks(world)
	if err != nil {
		return alone, err
	}
	j := file.Default()
	j.Device.Backend, j.Device.DType = g.device, g.dtype
	_, s, err := findPlaces(r, 0)
	if err != nil {
		return false, err
	}
	d, _, err := backends.Open(backends.Choice{Backend: g.device, LocalRank: s.local, RanksOnNode: s.perNode,
		Threads: s.threads})
	if d != nil {
		defer d.Close()
	}
	var compute tensor.DType
	if err == nil {
		compute, err = j.ComputeType(d.Info())
	}
	if err = comm.Agree(world, err); err != nil {
		return false, err
	}
	if err := comm.Same(world, "device",
		comm.Field{Name: "compute type (set --dtype)", Value: compute.String()}); err != nil {
		return false, err
	}
	m, err := generate.Open(o.words[0], d, compute, world)
	if err != nil {
		return false, err
	}
	defer m.Close()
	if g.chat {
		m.Begin = nil // the template has it
	}
	if len(m.Ignored) > 0 && world.Rank() == 0 {
		o.warn(fmt.Sprintf("generation_config.json: %s: no effect here", strings.Join(m.Ignored, ", ")))
	}
	if m.Bytes > 256 && world.Rank() == 0 {
		o.warn(fmt.Sprintf("%s has no tokenizer.json, and a vocabulary of %d: the prompt and the text are read as "+
			"bytes; add the tokenizer's files to the folder", o.words[0], m.Bytes))
	}
	text, err := m.Text(prompt, g.tokens, g.sampling(m.Sampling), func(text string) error {
		if world.Rank() > 0 {
			return nil
		}
		return written(io.WriteString(o.Stdout, text))
	})
	if err != nil {
		return text.Began && world.Size() > 1, err
	}
	if world.Rank() > 0 {
		return false, nil
	}
	if err := written(fmt.Fprintln(o.Stdout)); err != nil || o.Quiet {
		return false, err
	}
	log := o.rootLog()
	log.Info().Msgf("%s of the prompt in %.2f s, %s after it in %.2f s (%.1f tokens/s)",
		units.Count(text.Prompt, "token"), text.Read.Seconds(), units.Count(text.Tokens, "token"),
		text.Write.Seconds(), float64(text.Tokens)/max(1e-9, text.Write.Seconds()))
	return false, nil
}

// sampling returns how tokens are drawn: by the flags that are given, otherwise by the model's
// folder.
func (g *generateOptions) sampling(s generate.Sampling) generate.Sampling {
	s.Seed = uint64(g.seed)
	if g.temperature >= 0 {
		s.Temperature = g.temperature
	}
	if g.topP >= 0 {
		s.TopP = g.topP
	}
	if g.topK >= 0 {
		s.TopK = g.topK
	}
	return s
}

// promptOfRanks returns on all ranks the prompt that rank 0 reads, with --chat in the template of
// the model. Collective.
func (o *Options) promptOfRanks(world comm.Comm) (prompt []byte, alone bool, err error) {
	if world.Rank() == 0 {
		if prompt, err = o.prompt(); err == nil && o.generate.chat {
			prompt, err = generate.Asked(o.words[0], prompt)
		}
	}
	if err = comm.Agree(world, err); err != nil {
		return nil, false, err
	}
	prompt, err = comm.BroadcastBytes(world, prompt, 0)
	return prompt, err != nil, err
}

// prompt returns the second word, or standard input.
func (o *Options) prompt() ([]byte, error) {
	if len(o.words) > 1 {
		return []byte(o.words[1]), nil
	}
	text, err := io.ReadAll(io.LimitReader(os.Stdin, maxPrompt+1))
	if err != nil {
		return nil, status.Errorf(status.IO, "generate: standard input: %w", err)
	}
	if len(text) > maxPrompt {
		return nil, status.Errorf(status.InvalidArgument, "generate: the prompt has more than %d bytes; shorten it",
			maxPrompt)
	}
	return text, nil
}

// maxPrompt is the limit of a prompt in bytes.
const maxPrompt = 64 << 20
