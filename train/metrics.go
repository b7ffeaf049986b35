package train

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"ulysses/internal/input"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Stamp is what Metrics.Write adds to each line.
type Stamp struct {
	Run  string  `json:"run"`  // 12 hexadecimal digits, the same for all parts of a resumed run
	Time float64 `json:"time"` // seconds since 1970
}

// Record is the line of a step in metrics.jsonl. Times are measured on rank 0, PeakBytes is the
// maximum over the ranks, and all other values are of the whole job.
type Record struct {
	Step int64 `json:"step"` // from 1
	Loss Float `json:"loss"` // nats per target token
	// AuxLoss is the loss that balances experts, without its coefficient; it is not part of Loss
	AuxLoss *Float `json:"aux_loss,omitempty"`
	// ExpertLoad is the largest load of an expert in a layer, divided by the mean load, if
	// optimizer.expert_bias_rate is set
	ExpertLoad      *Float  `json:"expert_load,omitempty"`
	GradNorm        Float   `json:"grad_norm"`
	LR              float64 `json:"lr"`
	Tokens          int64   `json:"tokens"`        // input tokens of the global batch
	TargetTokens    int64   `json:"target_tokens"` // of these, tokens with a valid target
	TotalTokens     int64   `json:"total_tokens"`  // of all steps so far; Metrics.Write sets it
	Seconds         float64 `json:"seconds"`
	TokensPerSecond float64 `json:"tokens_per_second"`
	// causal model FLOPs per second and rank, in 1e12
	ModelTFLOPS float64 `json:"model_tflops"`
	PeakBytes   int64   `json:"peak_bytes"`
	// by phase: the line has phase_seconds/attention and so on
	PhaseSeconds map[string]float64 `json:"-"`
	// of PhaseSeconds, the time until the last rank had started a call of communication
	WaitingSeconds map[string]float64 `json:"-"`
	// the optimizer did not update the weights (train.on_nan = "skip")
	Skipped bool `json:"skipped,omitempty"`
	Stamp
}

// MarshalJSON returns one flat object: trackers of experiments take its keys and numbers as they
// are.
func (r *Record) MarshalJSON() ([]byte, error) {
	type plain Record
	line, err := json.Marshal((*plain)(r))
	if err != nil {
		return nil, err
	}
	line = line[:len(line)-1]
	for _, x := range []struct {
		prefix string
		values map[string]float64
	}{{"phase_seconds/", r.PhaseSeconds}, {"waiting_seconds/", r.WaitingSeconds}} {
		for _, name := range slices.Sorted(maps.Keys(x.values)) {
			line = fmt.Appendf(line, ",%q:%s", x.prefix+name, strconv.FormatFloat(x.values[name], 'g', -1, 64))
		}
	}
	return append(line, '}'), nil
}

// EvalRecord is the line of an evaluation in metrics.jsonl.
type EvalRecord struct {
	Step       int64 `json:"step"`
	EvalLoss   Float `json:"eval_loss"` // of all sets together: ΣNLL / targets
	EvalTokens int64 `json:"eval_tokens"`
	// of the sets of eval.set: the line has eval_NAME_loss and eval_NAME_tokens
	Sets []SetLoss `json:"-"`
	Best bool      `json:"best,omitempty"` // the smallest loss so far (Setup.Track)
	// name of the checkpoint that an evaluation job has read
	Checkpoint string `json:"checkpoint,omitempty"`
	Stamp
}

// SetLoss is the result of an evaluation set.
type SetLoss struct {
	Name   string
	Loss   Float
	Tokens int64
}

// MarshalJSON returns one flat object.
func (r *EvalRecord) MarshalJSON() ([]byte, error) {
	type plain EvalRecord
	line, err := json.Marshal((*plain)(r))
	if err != nil {
		return nil, err
	}
	line = line[:len(line)-1]
	for _, s := range r.Sets {
		loss, err := json.Marshal(s.Loss)
		if err != nil {
			return nil, err
		}
		line = fmt.Appendf(line, ",%q:%s,%q:%d", "eval_"+s.Name+"_loss", loss, "eval_"+s.Name+"_tokens", s.Tokens)
	}
	return append(line, '}'), nil
}

// Float is encoded as null if it is NaN or Inf, which JSON cannot represent.
type Float float64

func (f Float) MarshalJSON() ([]byte, error) {
	if math.IsNaN(float64(f)) || math.IsInf(float64(f), 0) {
		return []byte("null"), nil
	}
	return json.Marshal(float64(f))
}

// Metrics appends records to metrics.jsonl, one line each. After a process was killed, all lines of
// the file except possibly the last are complete.
type Metrics struct {
	f      *os.File
	beside bool
	run    string
	tokens int64 // of all steps in the file
}

// BesideRun reports whether the file of an evaluation job also has lines of a training run.
func (m *Metrics) BesideRun() bool { return m != nil && m.beside }

// CreateMetrics creates or truncates the file.
func CreateMetrics(path string) (*Metrics, error) { return openMetrics(path, os.O_TRUNC) }

// ResumeMetrics opens the file of a run that resumes after a step. It drops the lines of later
// steps, which will be written again. If the run evaluates before its first step, it also drops the
// evaluation of the step: an earlier attempt to resume may have ended after it.
func ResumeMetrics(path string, step int64, evaluates bool) (*Metrics, error) {
	return reopenMetrics(path, func(s int64, evaluation bool) bool {
		return s < step || s == step && !(evaluation && evaluates)
	})
}

// EvaluationStep is the step in the line of an evaluation job. No line of a training run has it.
const EvaluationStep = 0

// EvaluationMetrics opens the file for the line of an evaluation job. It drops the line of an
// earlier evaluation job and keeps all others.
func EvaluationMetrics(path string) (*Metrics, error) {
	m, err := reopenMetrics(path, func(s int64, evaluation bool) bool { return !evaluation || s != EvaluationStep })
	if err == nil {
		info, statErr := m.f.Stat()
		m.beside = statErr == nil && info.Size() > 0
	}
	return m, err
}

// reopenMetrics keeps the lines for which stays returns true, and drops an incomplete last line. If
// all lines stay the file is not rewritten, because a training run may have it open.
func reopenMetrics(path string, stays func(step int64, evaluation bool) bool) (*Metrics, error) {
	old, err := input.Read(path, math.MaxInt64-1)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, status.Errorf(status.IO, "%s: %w", path, err)
	}
	kept := make([]byte, 0, len(old)+1)
	run, tokens := "", int64(0)
	for line := range bytes.Lines(old) {
		var r struct {
			Step       int64
			EvalTokens *int64 `json:"eval_tokens"`
			Tokens     int64
			Run        string
		}
		if input.JSON(line, &r) == nil && stays(r.Step, r.EvalTokens != nil) {
			run, tokens = cmp.Or(r.Run, run), tokens+r.Tokens
			kept = append(append(kept, bytes.TrimSuffix(line, []byte("\n"))...), '\n')
		}
	}
	if !bytes.Equal(kept, old) {
		if err := tensor.WriteFile(path, func(w io.Writer) error { _, err := w.Write(kept); return err }); err != nil {
			return nil, err
		}
	}
	m, err := openMetrics(path, 0)
	if err == nil {
		m.run, m.tokens = cmp.Or(run, m.run), tokens
	}
	return m, err
}

func openMetrics(path string, flag int) (*Metrics, error) {
	// Opening a pipe would wait for a reader.
	if _, err := input.Stat(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, status.Errorf(status.IO, "%w; choose another output.dir", err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND|syscall.O_NOFOLLOW|flag, 0o666)
	if err != nil {
		return nil, status.Errorf(status.IO, "%s: cannot be written: %w; choose another output.dir", path, err)
	}
	id := make([]byte, 6)
	rand.Read(id) // never fails
	return &Metrics{f: f, run: hex.EncodeToString(id)}, nil
}

// Write stamps a *Record or an *EvalRecord and appends it. A nil Metrics, as on ranks above 0,
// writes nothing.
func (m *Metrics) Write(record any) error {
	if m == nil {
		return nil
	}
	stamp := Stamp{m.run, float64(time.Now().UnixMilli()) / 1e3}
	switch r := record.(type) {
	case *Record:
		m.tokens += r.Tokens
		r.Stamp, r.TotalTokens = stamp, m.tokens
	case *EvalRecord:
		r.Stamp = stamp
	}
	line, err := json.Marshal(record)
	if err == nil {
		_, err = m.f.Write(append(line, '\n'))
	}
	if err != nil {
		return status.Errorf(status.IO, "%s: cannot be written: %w", m.f.Name(), err)
	}
	return m.checkPresent()
}

// checkPresent returns an error if metrics.jsonl or its folder was removed or replaced since it was
// opened: readers would not see its lines.
func (m *Metrics) checkPresent() error {
	own, err := m.f.Stat()
	if err == nil {
		var named os.FileInfo
		if named, err = os.Lstat(m.f.Name()); err == nil && os.SameFile(own, named) {
			return nil
		}
	}
	if err == nil {
		err = errors.New("another file has its name")
	}
	return status.Errorf(status.IO,
		"output.dir: %s was removed or replaced while the run wrote to it, and its lines since then are lost (%w); run the job again, and do not change %s until the job ends",
		m.f.Name(), err, filepath.Dir(m.f.Name()))
}

// Close closes the file.
func (m *Metrics) Close() error {
	if m == nil {
		return nil
	}
	return m.f.Close()
}
