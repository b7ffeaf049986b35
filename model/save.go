package model

import (
	"io"
	"path/filepath"

	"ulysses/tensor"
)

// Save writes a Hugging Face folder that transformers loads. whole returns the parameters of a
// portion as one flat tensor; it is called for each of m.SaveOrder, in order. Save keeps the
// names and element types of the source (F32 for a model from scratch). Tied tensors are written
// once. source names the tokenizer's files. The folder is written completely or not at all. If dir
// exists, its model is replaced and its other files stay. One rank calls Save.
func (m *Model) Save(dir string, source Source, whole func(Portion) (tensor.Tensor, error)) error {
	tensors, done, err := m.stored(whole, true)
	if err != nil {
		return err
	}
	defer done()
	return WriteFolder(dir, func(dir string) error { return m.SaveRest(dir, source) }, tensors)
}

// SaveOrder returns the portions in the order in which Save calls whole, or without frozen
// SaveAdapters. A portion comes again if its tensors in files lie between tensors of others.
func (m *Model) SaveOrder(frozen bool) (order []Portion, err error) {
	tensors, done, err := m.stored(nil, frozen)
	if err != nil {
		return nil, err
	}
	defer done()
	all, last := m.Portions(), -1
	for _, t := range tensors {
		for _, i := range t.portions {
			if i != last {
				order = append(order, all[i])
			}
			last = i
		}
	}
	return order, nil
}

// SaveBytes returns the bytes of the tensors that Save writes, or without frozen SaveAdapters.
func (m *Model) SaveBytes(frozen bool) (bytes int64, err error) {
	tensors, done, err := m.stored(nil, frozen)
	if err != nil {
		return 0, err
	}
	defer done()
	for _, t := range tensors {
		bytes += tensor.Of(nil, t.DType, t.Shape...).Numel() * t.DType.Size()
	}
	return bytes, nil
}

// stored returns the tensors of the model's folder, or without frozen the trained ones. The caller
// calls done after it has read them.
func (m *Model) stored(whole func(Portion) (tensor.Tensor, error), frozen bool) (tensors []Stored, done func(),
	err error) {
	s, err := m.dev.NewStream()
	if err != nil {
		return nil, nil, err
	}
	var flat tensor.Tensor
	current := -1 // the portion in flat
	for i, g := range m.Portions() {
		if g.Frozen && !frozen {
			continue
		}
		lo := int64(0)
		for _, p := range g.Params {
			first := lo
			lo += p.Numel()
			if m.savesFromFolder(p) {
				tensors = append(tensors, Stored{Name: p.Name, DType: p.stored, Shape: p.Shape,
					Read: func(at int64, dst []float32) error { return m.folder.Read(p.Name, at, dst) }})
				continue
			}
			tensors = append(tensors,
				Stored{Name: p.Name, DType: p.stored, Shape: p.Shape, portions: []int{i},
					Read: func(at int64, dst []float32) (err error) {
						if current != i {
							if flat, err = whole(g); err != nil {
								return err
							}
							current = i
						}
						n := int64(len(dst))
						if err := m.dev.Copy(s, tensor.OfFloat32(dst, n),
							flat.Slice(0, first+at, first+at+n)); err != nil {
							return err
						}
						return s.Sync()
					}})
		}
	}
	if frozen {
		tensors = append(tensors, m.Config.StoredBiases(m.Biases())...)
	}
	return m.Config.InFiles(tensors), func() { s.Close() }, nil
}

// KeepFolder says that the folder from which the model was loaded stays open. Frozen weights whose
// type there is not the compute type are saved from it. Every rank calls it, or none does.
func (m *Model) KeepFolder(f *Folder) { m.folder = f }

// savesFromFolder reports whether a parameter is saved from the folder of KeepFolder.
func (m *Model) savesFromFolder(p *Param) bool {
	return m.folder != nil && p.Frozen && p.stored != m.compute
}

// SaveRest writes the files of a model's folder other than the weights to dir: config.json, with
// adapters their configuration, and the tokenizer's files.
func (m *Model) SaveRest(dir string, source Source) error {
	text, err := m.Config.JSON()
	if err != nil {
		return err
	}
	err = tensor.WriteFile(filepath.Join(dir, configFile), func(w io.Writer) error {
		_, err := w.Write(text)
		return err
	})
	if err != nil {
		return err
	}
	if m.lora != nil {
		return m.saveAdapterRest(dir, source)
	}
	return source.write(dir)
}

// Stored returns the element type that Save writes.
func (p *Param) Stored() tensor.DType { return p.stored }
