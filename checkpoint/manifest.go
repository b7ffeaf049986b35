package checkpoint

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math"
	"path"
	"path/filepath"
	"slices"

	"ulysses/internal/input"
	"ulysses/tensor"
)

const (
	// Format is the version of the format that this program writes. It reads versions up to this
	// one. Version 1 had no checksum of manifest.json and no settings of the optimizer.
	Format = 2
	// ManifestFile is the name of the manifest in a checkpoint's folder.
	ManifestFile = "manifest.json"

	producer    = "ulysses"
	modelFolder = "model"
)

// maxManifest is the largest manifest.json, in bytes. 4096 ranks and 1000 groups need about 100
// MiB. Divided experts are a group for each layer and rank of axis expert. Tests replace it.
var maxManifest int64 = 1 << 30

// Kinds are the values that a checkpoint has of each element of a parameter: the weight and the two
// moments of AdamW. Kind k of a parameter is stored as a tensor of the parameter's name + Kinds[k].
var Kinds = []string{"", ".exp_avg", ".exp_avg_sq"}

// FileName returns the name of the file that a rank writes.
func FileName(rank int) string { return fmt.Sprintf("rank-%05d.safetensors", rank) }

// Manifest is the content of manifest.json.
type Manifest struct {
	Format   int    `json:"format"`
	Producer string `json:"producer"`
	Step     int64  `json:"step"` // steps done
	// steps in which the optimizer updated the weights
	Updates int64             `json:"updates"`
	Run     map[string]string `json:"run"` // values that a resumed run must have in common
	// keys of the job file that checkpoint.accept lets change
	Settings map[string]string `json:"settings"`
	Best     *Best             `json:"best,omitempty"` // nil = evaluations are not compared
	// the stages of the run up to the current one; none in checkpoints of older programs
	Stages []Stage `json:"stages,omitempty"`
	// folder of the base model, which an export never overwrites; none for a new model
	Base   string  `json:"base,omitempty"`
	Mesh   string  `json:"mesh"`   // mesh of the run that wrote it; programs do not read it
	Kinds  int     `json:"parts"`  // number of Kinds that the checkpoint has
	Groups []Group `json:"groups"` // layer groups, which cover all trained parameters
	// of the experts, see model.BiasTensor; none if the model has none
	Biases []Vector `json:"expert_biases,omitempty"`
	// parameters that are not trained and keep the values of the base model
	Frozen []Tensor `json:"frozen,omitempty"`
	Files  []File   `json:"files"` // of each rank
	// files in the folder model, by their paths in it; none in checkpoints of older programs
	Model []File `json:"model,omitempty"`
}

// Best is the state of a run that compares the losses of its evaluations.
type Best struct {
	Of      string  `json:"of"` // the evaluation sets, and which loss is compared
	Loss    float64 `json:"loss"`
	Step    int64   `json:"step"`            // of the smallest loss so far; 0 = none
	Saved   int64   `json:"saved,omitempty"` // step of its checkpoint; 0 = it is not kept
	Without int64   `json:"without"`         // evaluations since the last improvement
	Due     bool    `json:"due,omitempty"`   // the evaluation after the checkpoint's step is missing
}

// Stage is a part of a run with sequences of one length. A resumed run may begin another stage.
type Stage struct {
	Step        int64  `json:"step"`         // steps before it
	First       int64  `json:"first"`        // number of its first sequence in the training order
	Sequence    int64  `json:"sequence"`     // data.sequence
	GlobalBatch int64  `json:"global_batch"` // sequences of a step
	Sequences   int64  `json:"sequences"`    // of an epoch
	Files       string `json:"files"`        // the training files, without what depends on Sequence
	Tokenizer   string `json:"tokenizer,omitempty"`
	// how conversations become texts with labels; "" if there are none, and in older checkpoints
	Conversations string `json:"conversations,omitempty"`
	Positions     string `json:"positions"` // max_position_embeddings and RoPE of the model
	Model         string `json:"model"`     // digest of its configuration without these
}

// kept returns the step of a checkpoint that is kept besides the newest ones; 0 = none.
func (m *Manifest) kept() int64 {
	if m.Best == nil {
		return 0
	}
	return m.Best.Saved
}

// Group is a group of parameters that are sharded together.
type Group struct {
	Name    string    `json:"name"`
	Tensors []Tensor  `json:"tensors"`
	Ranges  [][]int64 `json:"cut"` // for each file, the elements [lo, hi) of the group in it
}

// Tensor is the name and shape of a parameter.
type Tensor struct {
	Name  string  `json:"name"`
	Shape []int64 `json:"shape"`
	DType string  `json:"dtype,omitempty"` // in the model folder, as a type name of safetensors
}

// numel returns the number of elements; false if the shape is invalid.
func (t Tensor) numel() (n int64, ok bool) {
	if len(t.Shape) > tensor.MaxDims {
		return 0, false
	}
	n = 1
	for _, d := range t.Shape {
		if d < 0 || d > 0 && n > math.MaxInt64/8/d {
			return 0, false
		}
		n *= d
	}
	return n, true
}

// Vector is a tensor of one dimension.
type Vector struct {
	Name   string    `json:"name"`
	Values []float32 `json:"values"`
}

// File is the length and checksum of a file.
type File struct {
	Name   string `json:"name"`
	Bytes  int64  `json:"bytes"`
	CRC32C uint32 `json:"crc32c"`
}

// seal appends the SHA-256 of the preceding text to a manifest, as its last field. checkSeal
// accepts only these exact bytes, not another spelling of the same JSON.
func seal(body []byte) []byte {
	open := bytes.TrimSuffix(body, []byte("}"))
	return fmt.Appendf(slices.Clone(open), sealed, sha256.Sum256(open))
}

const sealed = ",\"sha256\":\"%x\"}\n"

// checkSeal compares a manifest with its checksum.
func checkSeal(text []byte) error {
	n := len(text) - len(fmt.Sprintf(sealed, [sha256.Size]byte{}))
	if n < 0 || !bytes.Equal(seal(text[:n]), text) {
		return fmt.Errorf("its sha256 differs from the checksum of its text")
	}
	return nil
}

// parse decodes a manifest and checks everything that needs no other file. Its error does not name
// the checkpoint's path.
func (m *Manifest) parse(text []byte) error {
	var head struct {
		Manifest
		Sum *string `json:"sha256"`
	}
	if err := input.JSON(text, &head); err != nil {
		return fmt.Errorf("%s is damaged (%w)", ManifestFile, err)
	}
	*m = head.Manifest
	switch {
	case m.Producer != producer:
		return fmt.Errorf("%s was not written by this program", ManifestFile)
	case m.Format > Format:
		return &newerError{m.Format}
	case m.Format < 1 || m.Format == 1 && head.Sum != nil:
		return fmt.Errorf("%s is damaged (format %d)", ManifestFile, m.Format)
	}
	if m.Format > 1 {
		if err := checkSeal(text); err != nil {
			return fmt.Errorf("%s is damaged (%w)", ManifestFile, err)
		}
	}
	if err := m.check(); err != nil {
		return fmt.Errorf("%s is damaged (%w)", ManifestFile, err)
	}
	return nil
}

// newerError refuses a manifest of a later version of this program.
type newerError struct{ format int }

func (e *newerError) Error() string {
	return fmt.Sprintf("%s has format %d, this program reads up to %d", ManifestFile, e.format, Format)
}

// check returns an error if values contradict each other.
func (m *Manifest) check() error {
	if len(m.Files) == 0 || m.Kinds < 1 || m.Kinds > len(Kinds) || m.Step < 0 || m.Updates < 0 || m.Updates > m.Step {
		return fmt.Errorf("%d files, %d parts, step %d, %d updates", len(m.Files), m.Kinds, m.Step, m.Updates)
	}
	for i, f := range m.Files {
		if f.Name != FileName(i) {
			return fmt.Errorf("file %d is %s, it must be %s", i, input.Quote(f.Name), FileName(i))
		}
	}
	seen := map[string]bool{}
	for _, f := range m.Model {
		if f.Name != path.Clean(f.Name) || !filepath.IsLocal(f.Name) || f.Name == "." || seen[f.Name] {
			return fmt.Errorf("%s is not a path of a file in %s, or is there twice", input.Quote(f.Name), modelFolder)
		}
		seen[f.Name] = true
	}
	clear(seen)
	for _, group := range m.Groups {
		n := int64(0)
		for _, t := range group.Tensors {
			own, ok := t.numel()
			if !ok || n > math.MaxInt64/8-own {
				return fmt.Errorf("tensor %s has no possible shape: %d dimensions, %s", input.Quote(t.Name),
					len(t.Shape), input.Short(fmt.Sprint(t.Shape)))
			}
			if seen[t.Name] {
				return fmt.Errorf("tensor %s is there twice", input.Quote(t.Name))
			}
			seen[t.Name] = true
			n += own
		}
		at := int64(0)
		for _, r := range group.Ranges {
			if len(r) != 2 || r[0] != at || r[1] < at {
				return fmt.Errorf("group %s has the range %s of elements in a file, which must begin at %d",
					input.Quote(group.Name), input.Short(fmt.Sprint(r)), at)
			}
			at = r[1]
		}
		if at != n || len(group.Ranges) != len(m.Files) {
			return fmt.Errorf("group %s has %d elements of %d in %d of %d files", input.Quote(group.Name), at, n,
				len(group.Ranges), len(m.Files))
		}
	}
	return nil
}

// text returns the bytes of the manifest as they are written.
func (m *Manifest) text() ([]byte, error) {
	body, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	text := seal(body)
	if n := int64(len(text)); n > maxManifest { // Open would refuse it
		return nil, fmt.Errorf("%s needs %d bytes, at most %d are read; use fewer ranks", ManifestFile, n, maxManifest)
	}
	return text, nil
}
