package job

import (
	"fmt"
	"io"
	"os"

	"ulysses/backends"
	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/job/generate"
	"ulysses/slurm"
)

// generateOptions are the flags of the verb generate. A negative number is that of the model.
type generateOptions struct {
	tokens, topK, seed int64
	temperature, topP  float64
	device, dtype      string
}

// generateText is the verb generate. o.words are a model folder and a prompt, which is read from
// standard input if it is missing.
func generateText(o Options) error {
	g := &o.generate
	if n := slurm.Env().Tasks; n > 1 {
		return status.Errorf(status.Unsupported, "generate: %d tasks were started, and it runs on one rank; start it without a launcher", n)
	}
	if g.tokens < 0 || g.temperature > 1e6 || g.topP > 1 || g.topP == 0 {
		return status.Errorf(status.InvalidArgument, "generate: --max-tokens %d, --temperature %g, --top-p %g: set --max-tokens to at least 0 (the default), --temperature to at most 1e6, and --top-p above 0 and at most 1",
			g.tokens, g.temperature, g.topP)
	}
	prompt, err := o.prompt()
	if err != nil {
		return err
	}
	j := file.Default()
	j.Device.Backend, j.Device.DType = g.device, g.dtype
	d, _, err := backends.Open(backends.Choice{Backend: g.device})
	if err != nil {
		return err
	}
	defer d.Close()
	compute, err := j.ComputeType(d.Info())
	if err != nil {
		return err
	}
	m, err := generate.Open(o.words[0], d, compute)
	if err != nil {
		return err
	}
	defer m.Close()
	s := m.Sampling
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
	r, err := m.Text(prompt, g.tokens, s, func(text string) error { return written(io.WriteString(o.Stdout, text)) })
	if err != nil {
		return err
	}
	if err := written(fmt.Fprintln(o.Stdout)); err != nil || o.Quiet {
		return err
	}
	host, _ := os.Hostname()
	log := o.logger(&screen{to: o.Stderr}, 0, host)
	log.Info().Msgf("%d tokens of the prompt in %.2f s, %d tokens after it in %.2f s (%.1f tokens/s)", r.Prompt, r.Read.Seconds(), r.Tokens, r.Write.Seconds(),
		float64(r.Tokens)/max(1e-9, r.Write.Seconds()))
	return nil
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
		return nil, status.Errorf(status.InvalidArgument, "generate: the prompt has more than %d bytes; shorten it", maxPrompt)
	}
	return text, nil
}

// maxPrompt is the limit of a prompt in bytes.
const maxPrompt = 64 << 20
