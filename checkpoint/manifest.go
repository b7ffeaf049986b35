package checkpoint

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math"
	"path/filepath"
	"slices"

	"ulysses/internal/input"
	"ulysses/tensor"
)

// Format is the version that is written; newer versions are refused. Version 1 had no checksum of
// manifest.json and no settings of the optimizer.
const Format = 2

// maxManifest is the largest manifest.json, in bytes: 4096 ranks and 1000 groups take about 100
// MiB.
const maxManifest = 256 << 20

// Manifest is the content of manifest.json.
type Manifest struct {
	Format   int    `json:"format"`
	Producer string `json:"producer"`
	Step     int64  `json:"step"` // steps done
	// steps in which the optimizer updated the weights
	Updates int64             `json:"updates"`
	Run     map[string]string `json:"run"` // values that a resumed run must share
	// keys of the job file that checkpoint.accept lets change
	Settings map[string]string `json:"settings"`
	// folder of the base model, which an export never overwrites; none for a new model
	Base   string  `json:"base,omitempty"`
	Mesh   string  `json:"mesh"`   // mesh of the run that wrote it, for people
	Parts  int     `json:"parts"`  // number of parts
	Groups []Group `json:"groups"` //
	Files  []File  `json:"files"`  // of each rank
	// in the folder model; none in checkpoints of older programs
	Model []File `json:"model,omitempty"`
}

// Group is a group of parameters that are sharded together.
type Group struct {
	Name    string    `json:"name"`
	Tensors []Tensor  `json:"tensors"`
	Cut     [][]int64 `json:"cut"` // [lo, hi) of the group's elements in each file
}

// Tensor is a parameter.
type Tensor struct {
	Name  string  `json:"name"`
	Shape []int64 `json:"shape"`
	DType string  `json:"dtype,omitempty"` // in a model's folder, as safetensors has it
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

// File is a file's length and checksum.
type File struct {
	Name   string `json:"name"`
	Bytes  int64  `json:"bytes"`
	CRC32C uint32 `json:"crc32c"`
}

// seal appends the SHA-256 of the preceding text to a manifest, as its last field. Only the exact
// bytes that seal returns are accepted; other spellings of the same JSON are not.
func seal(body []byte) []byte {
	open := bytes.TrimSuffix(body, []byte("}"))
	return fmt.Appendf(slices.Clone(open), sealed, sha256.Sum256(open))
}

const sealed = ",\"sha256\":\"%x\"}\n"

// checkSeal compares a manifest with its checksum.
func checkSeal(text []byte) error {
	n := len(text) - len(fmt.Sprintf(sealed, [sha256.Size]byte{}))
	if n < 0 || !bytes.Equal(seal(text[:n]), text) {
		return fmt.Errorf("its sha256 does not fit its text: a byte of it was changed after it was written")
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

// check returns an error for inconsistent values.
func (m *Manifest) check() error {
	if len(m.Files) == 0 || m.Parts < 1 || m.Parts > len(Parts) || m.Step < 0 || m.Updates < 0 || m.Updates > m.Step {
		return fmt.Errorf("%d files, %d parts, step %d, %d updates", len(m.Files), m.Parts, m.Step, m.Updates)
	}
	for i, f := range m.Files {
		if f.Name != FileName(i) {
			return fmt.Errorf("file %d is %s, it must be %s", i, input.Quote(f.Name), FileName(i))
		}
	}
	seen := map[string]bool{}
	for _, f := range m.Model {
		if f.Name != filepath.Base(f.Name) || !filepath.IsLocal(f.Name) || f.Name == "." || seen[f.Name] {
			return fmt.Errorf("%s is no name of a file of %s, or there twice", input.Quote(f.Name), modelFolder)
		}
		seen[f.Name] = true
	}
	clear(seen)
	for _, group := range m.Groups {
		n := int64(0)
		for _, t := range group.Tensors {
			own, ok := t.numel()
			if !ok || n > math.MaxInt64/8-own {
				return fmt.Errorf("tensor %s has no possible shape: %d dimensions, %s", input.Quote(t.Name), len(t.Shape), input.Short(fmt.Sprint(t.Shape)))
			}
			if seen[t.Name] {
				return fmt.Errorf("tensor %s is there twice", input.Quote(t.Name))
			}
			seen[t.Name] = true
			n += own
		}
		at := int64(0)
		for _, cut := range group.Cut {
			if len(cut) != 2 || cut[0] != at || cut[1] < at {
				return fmt.Errorf("group %s is cut at %s", input.Quote(group.Name), input.Short(fmt.Sprint(cut)))
			}
			at = cut[1]
		}
		if at != n || len(group.Cut) != len(m.Files) {
			return fmt.Errorf("group %s has %d elements of %d in %d of %d files", input.Quote(group.Name), at, n, len(group.Cut), len(m.Files))
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
	return seal(body), nil
}
