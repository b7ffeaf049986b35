package model

import (
	"io"
	"path/filepath"

	"ulysses/tensor"
)

// Save writes a Hugging Face folder that transformers loads. whole returns the parameters of a half
// of a group as one flat tensor; it is called once for each of m.Halves, in order. Save keeps the
// names and element types of the source (F32 for a model from scratch). Tied tensors are written
// once. source is a folder from which the tokenizer's files are copied, or "". The folder is
// written completely or not at all. If dir exists, its model is replaced and its other files stay.
// One rank calls Save.
func (m *Model) Save(dir, source string, whole func(Half) (tensor.Tensor, error)) error {
	tensors, done, err := m.stored(whole, true)
	if err != nil {
		return err
	}
	defer done()
	return WriteFolder(dir, func(dir string) error { return m.SaveRest(dir, source) }, tensors)
}

// stored returns the tensors of the model's folder, or without frozen the trained ones. The caller
// calls done after it has read them.
func (m *Model) stored(whole func(Half) (tensor.Tensor, error), frozen bool) (tensors []Stored, done func(), err error) {
	s, err := m.dev.NewStream()
	if err != nil {
		return nil, nil, err
	}
	var flat tensor.Tensor // of the current half
	for _, g := range m.Halves() {
		if g.Frozen && !frozen {
			continue
		}
		lo := int64(0)
		for j, p := range g.Params {
			first := lo
			tensors = append(tensors, Stored{Name: p.Name, DType: p.stored, Shape: p.Shape, Read: func(at int64, dst []float32) (err error) {
				if j == 0 && at == 0 {
					if flat, err = whole(g); err != nil {
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
	return m.Config.InFiles(tensors), func() { s.Close() }, nil
}

// SaveRest writes the files of a model's folder other than the weights to dir: config.json, with
// adapters their configuration, and the tokenizer's files from the folder source, unless source is
// "".
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
	if m.lora != nil {
		return m.saveAdapterRest(dir, source)
	}
	return copyFiles(dir, source, companions)
}

// Stored returns the element type that Save writes.
func (p *Param) Stored() tensor.DType { return p.stored }
