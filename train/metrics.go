package train

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math"
	"os"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// Record is one line of metrics.jsonl. Times are rank 0's, bytes the largest over the ranks, everything else is of the whole job.
type Record struct {
	Step            int64              `json:"step"` // from 1
	Loss            Float              `json:"loss"` // nats a target token
	GradNorm        Float              `json:"grad_norm"`
	LR              float64            `json:"lr"`
	Tokens          int64              `json:"tokens"`        // inputs of the global batch
	TargetTokens    int64              `json:"target_tokens"` // of them, those with a valid target
	Seconds         float64            `json:"seconds"`
	TokensPerSecond float64            `json:"tokens_per_second"`
	ModelTFLOPS     float64            `json:"model_tflops"` // causal model FLOPs a second and rank, 1e12
	PeakBytes       int64              `json:"peak_bytes"`
	PhaseSeconds    map[string]float64 `json:"phase_seconds"`
	Skipped         bool               `json:"skipped,omitempty"` // on_nan = "skip" left the weights as they were
}

// EvalRecord is the line of an evaluation.
type EvalRecord struct {
	Step       int64 `json:"step"`
	EvalLoss   Float `json:"eval_loss"`
	EvalTokens int64 `json:"eval_tokens"`
}

// Float writes NaN and infinities as null, which JSON can hold.
type Float float64

func (f Float) MarshalJSON() ([]byte, error) {
	if math.IsNaN(float64(f)) || math.IsInf(float64(f), 0) {
		return []byte("null"), nil
	}
	return json.Marshal(float64(f))
}

// Metrics appends records to metrics.jsonl, a line each, so that a file cut short by a kill is still readable up to its last line.
type Metrics struct{ f *os.File }

// CreateMetrics truncates the file: a fresh start.
func CreateMetrics(path string) (*Metrics, error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, status.Errorf(status.IO, "%s: cannot be written: %w: choose another output.dir", path, err)
	}
	return &Metrics{f}, nil
}

// ResumeMetrics opens the file to go on after a step: the lines of later ones, which will come again, are dropped.
func ResumeMetrics(path string, step int64) (*Metrics, error) {
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, status.Errorf(status.IO, "%s: %w", path, err)
	}
	err = tensor.WriteFile(path, func(w io.Writer) error {
		for line := range bytes.Lines(old) {
			var r struct{ Step int64 }
			if json.Unmarshal(line, &r) == nil && r.Step <= step {
				if _, err := w.Write(line); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return nil, status.Errorf(status.IO, "%s: cannot be written: %w", path, err)
	}
	return &Metrics{f}, nil
}

// Write appends one record. A nil Metrics (ranks above 0) writes nothing.
func (m *Metrics) Write(record any) error {
	if m == nil {
		return nil
	}
	line, err := json.Marshal(record)
	if err == nil {
		_, err = m.f.Write(append(line, '\n'))
	}
	if err != nil {
		return status.Errorf(status.IO, "%s: cannot be written: %w", m.f.Name(), err)
	}
	return nil
}

// Close closes the file.
func (m *Metrics) Close() error {
	if m == nil {
		return nil
	}
	return m.f.Close()
}
