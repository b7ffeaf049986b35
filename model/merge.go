package model

import (
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"ulysses/internal/input"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Merge returns the tensors of a base model, with the adapters added to the matrices that have one:
// W + scale·B·A, in F32, rounded once to the type of W. c is the configuration of the model. read
// reads elements of an adapter's tensor, without the prefix of PEFT; shape returns its shape, nil
// if there is no such tensor. Reading a merged matrix with NaN or Inf fails.
func (l *LoRA) Merge(c *Config, base []Stored, shape func(name string) []int64,
	read func(name string, at int64, dst []float32) error) ([]Stored, error) {
	all := slices.Clone(base)
	merged := 0
	for i := range all {
		w := &all[i]
		name, first, rows := c.moduleInFiles(w.Name)
		a, b := shape(name+loraA), shape(name+loraB)
		if a == nil && b == nil {
			continue
		}
		whole := slices.Clone(w.Shape) // of the matrix in the files
		if rows > 0 {
			whole[0] = rows
		}
		if len(whole) != 2 || !slices.Equal(a, []int64{l.Rank, whole[1]}) ||
			!slices.Equal(b, []int64{whole[0], l.Rank}) {
			return nil, status.Errorf(status.InvalidConfig,
				"export: the adapter of %s has A %v and B %v with r = %d, the matrix is %v; the adapters are of another model",
				input.Short(name), a, b, l.Rank, whole)
		}
		merged++
		plain, x := w.Read, &delta{scale: float32(l.Scale()), rank: l.Rank, in: w.Shape[1]}
		out := w.Shape[0]
		w.Read = func(at int64, dst []float32) error {
			if err := plain(at, dst); err != nil {
				return err
			}
			if x.a == nil { // the first row in the files may be another one here
				x.a, x.b = make([]float32, a[0]*a[1]), make([]float32, out*l.Rank)
				if err := read(name+loraA, 0, x.a); err != nil {
					return err
				}
				if err := read(name+loraB, first*l.Rank, x.b); err != nil {
					return err
				}
			}
			x.add(at, dst)
			return finiteMerged(w, at, dst)
		}
	}
	if merged == 0 {
		return nil, status.Errorf(status.InvalidConfig,
			"export: no adapter is of a matrix of the base model; name the folder of the adapters' own base model")
	}
	return all, nil
}

// finiteMerged returns an error if x, elements of a merged matrix from start on, has NaN or Inf.
func finiteMerged(w *Stored, start int64, x []float32) error {
	if i := firstNonFinite(x); i >= 0 {
		return status.Errorf(status.Numeric,
			"%v at %v after the merge: the adapters or the base model are damaged; name an undamaged folder",
			x[i], indexOf(start+int64(i), w.Shape))
	}
	return nil
}

// delta is scale·B·A.
type delta struct {
	a, b     []float32 // [rank, in], [out, rank]
	scale    float32
	rank, in int64
}

// add adds elements [at, at+len(dst)) to dst.
func (d *delta) add(at int64, dst []float32) {
	for len(dst) > 0 {
		row, col := at/d.in, at%d.in
		n := min(int64(len(dst)), d.in-col)
		sum := make([]float32, n)
		for k := range d.rank {
			f := d.b[row*d.rank+k]
			for i, v := range d.a[k*d.in+col : k*d.in+col+n] {
				sum[i] += f * v
			}
		}
		for i, v := range sum {
			dst[i] += float32(d.scale * v)
		}
		dst, at = dst[n:], at+n
	}
}

// MergeFolder writes the model folder of a base model with the adapters of a folder of PEFT merged.
func MergeFolder(dir string, f *AdapterFolder, base *Folder) error {
	m := &Model{Config: base.Config}
	m.makeGroups()
	if err := base.Check(m); err != nil {
		return status.Errorf(status.Of(err), "export: %w", err)
	}
	var tensors []Stored
	for _, name := range slices.Sorted(maps.Keys(base.where)) {
		x := base.where[name]
		if base.Config.ignored(name) {
			continue
		}
		tensors = append(tensors,
			Stored{Name: name, DType: x.entry.DType, Shape: x.entry.Shape, Read: func(at int64, dst []float32) error {
				return base.Read(name, at, dst)
			}})
	}
	shape := func(name string) []int64 {
		e, _ := f.file.Entry(adapterPrefix + name)
		return e.Shape
	}
	known := map[string]bool{}
	for _, t := range tensors {
		path, _, _ := base.Config.moduleInFiles(t.Name)
		known[adapterPrefix+path+loraA], known[adapterPrefix+path+loraB] = true, true
	}
	if err := f.checkLayers("export", known); err != nil {
		return err
	}
	tensors, err := f.LoRA.Merge(base.Config, tensors, shape, func(name string, at int64, dst []float32) error {
		e, _ := f.file.Entry(adapterPrefix + name)
		return f.locate(base.Config, name, e).read(at, dst)
	})
	if err != nil {
		return err
	}
	for _, e := range f.file.Entries() {
		if !known[e.Name] {
			return status.Errorf(status.InvalidConfig,
				"export: tensor %v of %s is not an adapter of a matrix of %s; name the adapters' own base model", e,
				f.Dir, base.Dir)
		}
	}
	tensors = base.Config.InFiles(tensors)
	text, err := base.Config.JSON()
	if err != nil {
		return err
	}
	rest := func(to string) error {
		err := tensor.WriteFile(filepath.Join(to, configFile), func(w io.Writer) error {
			_, err := w.Write(text)
			return err
		})
		if err != nil {
			return err
		}
		templates, err := readTemplates(f.Dir)
		if err != nil {
			return err
		}
		return Source{Base: base.Dir, Tokenizer: f.tokenizer(), Templates: templates}.write(to)
	}
	return WriteFolder(dir, rest, tensors)
}

// tokenizer returns the tokenizer.json with which the adapters have been trained; "" if their
// folder has none.
func (f *AdapterFolder) tokenizer() string {
	path := filepath.Join(f.Dir, tokenizerFile)
	if _, err := os.Stat(path); err != nil {
		return ""
	}
	return path
}

// ReadAdapterConfig reads the settings of adapters in a folder. Targets is empty if a regular
// expression names them.
func ReadAdapterConfig(dir string) (LoRA, error) {
	l, _, err := readAdapterConfig(dir)
	return l, err
}
