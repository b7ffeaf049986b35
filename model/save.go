package model

import (
	"io"
	"path/filepath"

	"ulysses/tensor"
)

// Save writes the parameters, which whole gives group by group, flat, as a Hugging Face folder that
// transformers loads: the source's names and element types (F32 for a model from scratch), tied
// tensors once, and the tokenizer's files of source, a folder or "". The folder appears whole or
// not at all; the model in one that was there is replaced, other files in it stay. One rank calls
// it.
func (m *Model) Save(dir, source string, whole func(group int) (tensor.Tensor, error)) error {
	s, err := m.dev.NewStream()
	if err != nil {
		return err
	}
	defer s.Close()
	var tensors []Stored
	var flat tensor.Tensor // of the group under way
	for i, g := range m.groups {
		lo := int64(0)
		for j, p := range g.Params {
			first := lo
			tensors = append(tensors, Stored{Name: p.Name, DType: p.stored, Shape: p.Shape, Read: func(at int64, dst []float32) (err error) {
				if j == 0 && at == 0 {
					if flat, err = whole(i); err != nil {
						return err
					}
				}
				n := int64(len(dst))
				if err := m.dev.Copy(s, tensor.OfFloat32(dst, n), flat.Slice(0, first+at, first+at+n)); err != nil {
					return err
				}
				return s.Sync()
			}})
			lo += p.Numel()
		}
	}
	return WriteFolder(dir, func(dir string) error { return m.SaveRest(dir, source) }, tensors)
}

// SaveRest writes what a model's folder has beside the weights into dir: config.json, and the
// tokenizer's files of source, a folder or "".
func (m *Model) SaveRest(dir, source string) error {
	text, err := m.Config.JSON()
	if err != nil {
		return err
	}
	err = tensor.WriteFile(filepath.Join(dir, configFile), func(w io.Writer) error {
		_, err := w.Write(text)
		return err
	})
	if err != nil || source == "" {
		return err
	}
	return copyFiles(dir, source, companions)
}

// Stored is the element type that Save writes.
func (p *Param) Stored() tensor.DType { return p.stored }
