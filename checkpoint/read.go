package checkpoint

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"ulysses/internal/input"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Checkpoint is a state on disk, to be read.
type Checkpoint struct {
	Manifest
	Path  string
	files map[int]*tensor.Safetensors
	where map[string]place
}

// place is where a parameter lies in its group.
type place struct {
	group  int
	lo, hi int64
}

// Find lists the checkpoints of a path, the newest first: path itself, or the checkpoints in it.
func Find(path string) ([]string, error) {
	if _, err := os.Lstat(filepath.Join(path, ManifestFile)); err == nil {
		return []string{path}, nil
	}
	steps, err := Dir(path).Steps()
	if err != nil {
		return nil, err
	}
	if len(steps) == 0 {
		return nil, status.Errorf(status.IO, "checkpoint %s: there is neither a %s nor a folder %sNNNNNNNN here: name a checkpoint, or the folder that a run keeps them in",
			path, ManifestFile, prefix)
	}
	paths := make([]string, 0, len(steps))
	for _, s := range slices.Backward(steps) {
		paths = append(paths, Dir(path).Path(s))
	}
	return paths, nil
}

// Open reads a manifest and makes the checks that need no file contents: the files exist, have the
// recorded lengths, and hold every element once. The code of the error is Unsupported for a
// checkpoint of a newer program.
func Open(path string) (*Checkpoint, error) {
	bad := func(code status.Code, err error) error {
		return status.Errorf(code, "checkpoint %s: %w: remove it, or name another with checkpoint.resume", path, err)
	}
	text, err := input.Read(filepath.Join(path, ManifestFile), maxManifest)
	if err != nil {
		return nil, status.Errorf(status.IO, "checkpoint %s: %w: it must be a folder that a run of this program wrote", path, err)
	}
	c := &Checkpoint{Path: path, files: map[int]*tensor.Safetensors{}, where: map[string]place{}}
	m := &c.Manifest
	if err := m.parse(text); err != nil {
		code := status.InvalidConfig
		if newer := (*newerError)(nil); errors.As(err, &newer) {
			code = status.Unsupported
		}
		return nil, bad(code, err)
	}
	if step, ok := stepOf(folderName(path)); ok && step != m.Step {
		return nil, bad(status.InvalidConfig, fmt.Errorf("its name says step %d, its %s step %d", step, ManifestFile, m.Step))
	}
	for g, group := range m.Groups {
		n := int64(0)
		for _, t := range group.Tensors {
			own, _ := t.numel()
			c.where[t.Name] = place{g, n, n + own}
			n += own
		}
	}
	for _, f := range c.all() {
		info, err := input.Stat(f.path)
		if err != nil {
			return nil, bad(status.InvalidConfig, err)
		}
		if info.Size() != f.Bytes {
			return nil, bad(status.InvalidConfig, fmt.Errorf("%s has %d bytes, %d were written", f.Name, info.Size(), f.Bytes))
		}
	}
	return c, nil
}

// folderName returns the name of the folder at a path, such as ".".
func folderName(path string) string {
	if full, err := filepath.Abs(path); err == nil {
		path = full
	}
	return filepath.Base(path)
}

// listed is a file of the manifest.
type listed struct {
	File
	path string
}

// all is the files that the manifest lists.
func (c *Checkpoint) all() []listed {
	all := make([]listed, 0, len(c.Files)+len(c.Model))
	for _, f := range c.Files {
		all = append(all, listed{f, filepath.Join(c.Path, filepath.Base(f.Name))})
	}
	for _, f := range c.Model {
		all = append(all, listed{f, filepath.Join(c.ModelPath(), filepath.Base(f.Name))})
	}
	return all
}

// ManifestPath returns the path of the manifest.
func (c *Checkpoint) ManifestPath() string { return filepath.Join(c.Path, ManifestFile) }

// ModelPath is the folder with the files that a model's folder has beside the weights.
func (c *Checkpoint) ModelPath() string { return filepath.Join(c.Path, modelFolder) }

// ModelFiles returns the names of the files in the folder model that the manifest lists, with their
// checksums.
func (c *Checkpoint) ModelFiles() (names []string) {
	for _, f := range c.Model {
		names = append(names, f.Name)
	}
	return names
}

// Close closes the files.
func (c *Checkpoint) Close() {
	for _, f := range c.files {
		f.Close()
	}
	clear(c.files)
}

// Check reads the files i with i mod ranks = rank and compares their checksums: all of them are
// read once when every rank calls it.
func (c *Checkpoint) Check(rank, ranks int) error {
	files := c.all()
	for i := rank; i < len(files); i += ranks {
		want := files[i]
		got, err := sum(want.path)
		if err != nil {
			return status.Errorf(status.IO, "checkpoint: %w", err)
		}
		if got.Bytes != want.Bytes || got.CRC32C != want.CRC32C {
			return status.Errorf(status.InvalidConfig, "checkpoint %s: %s is damaged: its checksum is %08x, %08x was written: remove the checkpoint, or name another with checkpoint.resume",
				c.Path, want.Name, got.CRC32C, want.CRC32C)
		}
	}
	return nil
}

// Differences compares the checkpoint's run values and parameters with a run. It returns a line for
// each difference.
func (c *Checkpoint) Differences(run map[string]string, groups []Group, parts int) (faults []string) {
	for _, key := range slices.Sorted(maps.Keys(run)) {
		if c.Run[key] != run[key] {
			faults = append(faults, fmt.Sprintf("%s is %s, it was %s", key, run[key], c.Run[key]))
		}
	}
	if parts > c.Parts {
		faults = append(faults, "the optimizer's moments are not in it")
	}
	n := 0
	for _, g := range groups {
		for _, t := range g.Tensors {
			n++
			at, ok := c.where[t.Name]
			if !ok {
				faults = append(faults, t.Name+" is not in it")
			} else if own := c.shape(at, t.Name); !slices.Equal(own, t.Shape) {
				faults = append(faults, fmt.Sprintf("%s is %v, in it %v", t.Name, t.Shape, own))
			}
		}
	}
	if len(faults) == 0 && n != len(c.where) {
		faults = append(faults, fmt.Sprintf("it has %d parameters, the model %d", len(c.where), n))
	}
	return faults
}

// Foreign returns an error with the differences for a checkpoint of another run; nil if there are
// none.
func (c *Checkpoint) Foreign(faults []string) error {
	const most = 20
	for i := range faults {
		faults[i] = input.Words(faults[i])
	}
	if len(faults) == 0 {
		return nil
	}
	if more := len(faults) - most; more > 0 {
		faults = append(faults[:most:most], fmt.Sprintf("and %d more", more))
	}
	return status.Errorf(status.InvalidConfig, "checkpoint %s is of another run: %s: use another output.dir, or set checkpoint.resume = \"off\" and output.overwrite = true to start afresh",
		c.Path, strings.Join(faults, "; "))
}

func (c *Checkpoint) shape(at place, name string) []int64 {
	for _, t := range c.Groups[at.group].Tensors {
		if t.Name == name {
			return t.Shape
		}
	}
	return nil
}

// Read fills values with a parameter's elements from start on, of a part.
func (c *Checkpoint) Read(name string, part int, start int64, values []float32) error {
	at, ok := c.where[name]
	if !ok || start < 0 || at.lo+start+int64(len(values)) > at.hi {
		return status.Errorf(status.Internal, "checkpoint: elements %d to %d of %s", start, start+int64(len(values)), name)
	}
	lo := at.lo + start
	for i, cut := range c.Groups[at.group].Cut {
		from, to := max(lo, cut[0]), min(lo+int64(len(values)), cut[1])
		if from >= to {
			continue
		}
		f, err := c.file(i)
		if err != nil {
			return err
		}
		e, ok := f.Entry(name + Parts[part])
		first := max(at.lo, cut[0]) // of the parameter's elements in this file
		if !ok || e.DType != tensor.F32 || e.Numel() != min(at.hi, cut[1])-first {
			return status.Errorf(status.InvalidConfig, "checkpoint %s: %s does not hold the %d elements of %s that the manifest says", c.Path, c.Files[i].Name,
				min(at.hi, cut[1])-first, name+Parts[part])
		}
		if err := f.ReadFloat32(e, from-first, values[from-lo:to-lo]); err != nil {
			return err
		}
	}
	return nil
}

func (c *Checkpoint) file(i int) (*tensor.Safetensors, error) {
	if f := c.files[i]; f != nil {
		return f, nil
	}
	f, err := tensor.OpenSafetensors(filepath.Join(c.Path, filepath.Base(c.Files[i].Name)))
	if err != nil {
		return nil, err
	}
	c.files[i] = f
	return f, nil
}
