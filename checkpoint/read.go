package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"ulysses/internal/input"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/tensor"
)

// Checkpoint is a checkpoint that Open has opened. It is for one goroutine.
type Checkpoint struct {
	Manifest
	Path   string
	files  map[int]*tensor.Safetensors // open files, by rank
	params map[string]elements         // by name of the parameter
}

// maxOpen is the largest number of files that a checkpoint keeps open. A process may often open
// 1024, and a run may have more ranks.
const maxOpen = 256

// elements are the elements [lo, hi) of a group, which a parameter has.
type elements struct {
	group  int
	lo, hi int64
}

// Find returns the paths of the checkpoints at a path, the newest first: the path itself, or the
// checkpoints in this folder, or those in its folder checkpoints, as in the output.dir of a run.
func Find(path string) ([]string, error) {
	if _, err := os.Lstat(filepath.Join(path, ManifestFile)); err == nil {
		return []string{path}, nil
	}
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, status.Errorf(status.IO,
			"checkpoint %s: there is no such folder; name a checkpoint, or the folder in which a run keeps checkpoints",
			path)
	}
	if err == nil && !info.IsDir() {
		return nil, status.Errorf(status.IO,
			"checkpoint %s: it is a file; name a checkpoint, which is a folder, or the folder in which a run keeps checkpoints",
			path)
	}
	for _, dir := range []Dir{Dir(path), Dir(filepath.Join(path, usualDir))} {
		steps, err := dir.steps()
		if err != nil {
			return nil, status.Errorf(status.IO,
				"checkpoint %s: %w; name a checkpoint that can be read, or the folder in which a run keeps checkpoints", path, err)
		}
		var paths []string
		for _, s := range slices.Backward(steps) {
			paths = append(paths, dir.Path(s))
		}
		if len(paths) > 0 {
			return paths, nil
		}
	}
	return nil, status.Errorf(status.IO,
		"checkpoint %s: there is neither a %s nor a folder %sNNNNNNNN, also not in %s; name a checkpoint, or the folder in which a run keeps checkpoints",
		path, ManifestFile, prefix, filepath.Join(path, usualDir))
}

// Open reads the manifest of a checkpoint. It checks everything that needs no file contents: the
// files exist, have the recorded lengths, and have every element once. The code of the error is
// Unsupported for a checkpoint of a newer program.
func Open(path string) (*Checkpoint, error) {
	bad := func(code status.Code, err error) error {
		return status.Errorf(code, "checkpoint %s: %w; name another checkpoint (in a job file: checkpoint.resume)", path, err)
	}
	text, err := input.Read(filepath.Join(path, ManifestFile), maxManifest)
	if err != nil {
		remedy := "name a folder that a run of this program wrote"
		if inside, findErr := Find(path); findErr == nil && inside[0] != path {
			remedy = "name one of the checkpoints in it, such as " + inside[0]
		}
		return nil, status.Errorf(status.IO, "checkpoint %s: %w; %s", path, err, remedy)
	}
	c := &Checkpoint{Path: path, files: map[int]*tensor.Safetensors{}, params: map[string]elements{}}
	m := &c.Manifest
	if err := m.parse(text); err != nil {
		code := status.InvalidConfig
		if newer := (*newerError)(nil); errors.As(err, &newer) {
			code = status.Unsupported
		}
		return nil, bad(code, err)
	}
	if step, ok := stepOf(folderName(path)); ok && step != m.Step {
		return nil, bad(status.InvalidConfig,
			fmt.Errorf("its name says step %d, its %s step %d", step, ManifestFile, m.Step))
	}
	for g, group := range m.Groups {
		n := int64(0)
		for _, t := range group.Tensors {
			own, _ := t.numel()
			c.params[t.Name] = elements{g, n, n + own}
			n += own
		}
	}
	for _, f := range c.all() {
		info, err := input.Stat(f.path)
		if err != nil {
			return nil, bad(status.InvalidConfig, err)
		}
		if info.Size() != f.Bytes {
			return nil, bad(status.InvalidConfig,
				fmt.Errorf("%s has %d bytes, %d were written", f.Name, info.Size(), f.Bytes))
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

// listedFile is a file that the manifest lists.
type listedFile struct {
	File
	path string
}

// all returns the files that the manifest lists.
func (c *Checkpoint) all() []listedFile {
	all := make([]listedFile, 0, len(c.Files)+len(c.Model))
	for _, f := range c.Files {
		all = append(all, listedFile{f, filepath.Join(c.Path, filepath.Base(f.Name))})
	}
	for _, f := range c.Model {
		all = append(all, listedFile{f, filepath.Join(c.ModelPath(), filepath.FromSlash(f.Name))})
	}
	return all
}

// ManifestPath returns the path of the manifest.
func (c *Checkpoint) ManifestPath() string { return filepath.Join(c.Path, ManifestFile) }

// ModelPath returns the path of the folder model, which has the files of a model folder except the
// weights.
func (c *Checkpoint) ModelPath() string { return filepath.Join(c.Path, modelFolder) }

// ModelFiles returns the names of the files in the folder model that the manifest lists.
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

// Check compares the checksums of files rank, rank + ranks, rank + 2·ranks and so on with the
// manifest. If ranks processes call it, each file is read once.
func (c *Checkpoint) Check(rank, ranks int) error {
	files := c.all()
	for i := rank; i < len(files); i += ranks {
		want := files[i]
		got, err := sum(want.path)
		if err != nil {
			return status.Errorf(status.IO, "checkpoint: %w", err)
		}
		if got.Bytes != want.Bytes || got.CRC32C != want.CRC32C {
			return status.Errorf(status.InvalidConfig,
				"checkpoint %s: %s is damaged: its checksum is %08x, %08x was written; name another checkpoint (in a job file: checkpoint.resume)",
				c.Path, want.Name, got.CRC32C, want.CRC32C)
		}
	}
	return nil
}

// Differences compares the run values and the parameters of the checkpoint with a run, whose
// optimizer needs the given number of kinds. It returns a sentence for each difference.
func (c *Checkpoint) Differences(run map[string]string, groups []Group, kinds int) (faults []string) {
	for _, key := range slices.Sorted(maps.Keys(run)) {
		if before, ok := c.Run[key]; !ok {
			faults = append(faults, fmt.Sprintf("%s is %s, it was not set", key, run[key]))
		} else if before != run[key] {
			now, was := differing(run[key], before)
			faults = append(faults, fmt.Sprintf("%s is %s, it was %s", key, now, was))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(c.Run)) {
		if _, ok := run[key]; !ok {
			faults = append(faults, fmt.Sprintf("%s is not set, it was %s", key, c.Run[key]))
		}
	}
	if kinds > c.Kinds {
		faults = append(faults, "it does not have the optimizer's moments")
	}
	n, shapes := 0, 0 // tensors of the run, and those with another shape in the checkpoint
	var missing []string
	for _, g := range groups {
		for _, t := range g.Tensors {
			n++
			at, ok := c.params[t.Name]
			if !ok {
				missing = append(missing, t.Name)
			} else if own := c.shape(at, t.Name); !slices.Equal(own, t.Shape) {
				if shapes++; shapes == 1 { // a large model has thousands
					faults = append(faults, fmt.Sprintf("%s is %v, in it %v", t.Name, t.Shape, own))
				}
			}
		}
	}
	if more := shapes - 1; more > 0 {
		faults = append(faults, units.Count(more, "other parameter")+" with another shape")
	}
	switch more := len(missing) - 1; {
	case more == 0:
		faults = append(faults, "it does not have "+missing[0])
	case more > 0:
		faults = append(faults,
			fmt.Sprintf("it does not have %s and %s", missing[0], units.Count(int64(more), "other parameter")))
	}
	if len(faults) == 0 && n != len(c.params) {
		faults = append(faults, fmt.Sprintf("it has %d parameters, the model %d", len(c.params), n))
	}
	return faults
}

// sequences replaces the word that stored descriptions have for sequences.
var sequences = strings.NewReplacer(" rows of up to ", " sequences of up to ")

// differing returns two lists, as the description of the data is, without the elements that both
// have, so that a message shows what differs.
func differing(now, was string) (string, string) {
	now, was = sequences.Replace(now), sequences.Replace(was)
	a, b := listed(now), listed(was)
	without := func(list, common []string) string {
		rest := slices.DeleteFunc(slices.Clone(list), func(x string) bool { return slices.Contains(common, x) })
		return strings.Join(rest, ", ")
	}
	short, before := without(a, b), without(b, a)
	if short == "" || before == "" { // one has all elements of the other
		return now, was
	}
	return short, before
}

// listed splits a description at commas that are not inside of brackets.
func listed(text string) (list []string) {
	open := 0
	for _, word := range strings.Split(text, ", ") {
		if open > 0 {
			list[len(list)-1] += ", " + word
		} else {
			list = append(list, word)
		}
		open += strings.Count(word, "[") - strings.Count(word, "]")
	}
	return list
}

// MismatchError returns the error for a checkpoint of another run, with the differences; nil if
// there are none.
func (c *Checkpoint) MismatchError(faults []string) error {
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
	return status.Errorf(status.InvalidConfig,
		"checkpoint %s is of another run: %s; use another output.dir, or set checkpoint.resume = \"off\" and output.overwrite = true to start afresh",
		c.Path, strings.Join(faults, "; "))
}

// shape returns the shape of a parameter.
func (c *Checkpoint) shape(at elements, name string) []int64 {
	for _, t := range c.Groups[at.group].Tensors {
		if t.Name == name {
			return t.Shape
		}
	}
	return nil
}

// Read stores elements [start, start+len(values)) of a parameter in values. kind selects the
// weights or a moment, as in Kinds. The file may have been written by any number of ranks.
func (c *Checkpoint) Read(name string, kind int, start int64, values []float32) error {
	at, ok := c.params[name]
	if !ok || start < 0 || at.lo+start+int64(len(values)) > at.hi {
		return status.Errorf(status.Internal, "checkpoint: there are no elements %d to %d of %s", start,
			start+int64(len(values)), name)
	}
	lo := at.lo + start
	for i, r := range c.Groups[at.group].Ranges {
		from, to := max(lo, r[0]), min(lo+int64(len(values)), r[1])
		if from >= to {
			continue
		}
		f, err := c.file(i)
		if err != nil {
			return err
		}
		e, ok := f.Entry(name + Kinds[kind])
		first := max(at.lo, r[0]) // the first of the parameter's elements in this file
		if !ok || e.DType != tensor.F32 || e.Numel() != min(at.hi, r[1])-first {
			return status.Errorf(status.InvalidConfig,
				"checkpoint %s: %s does not have the %d elements of %s that the manifest lists; name another checkpoint (in a job file: checkpoint.resume)",
				c.Path, c.Files[i].Name,
				min(at.hi, r[1])-first, name+Kinds[kind])
		}
		if err := f.ReadFloat32(e, from-first, values[from-lo:to-lo]); err != nil {
			return err
		}
	}
	return nil
}

// file opens the file of a rank. Files are read in order, so the open ones are not needed soon.
func (c *Checkpoint) file(i int) (*tensor.Safetensors, error) {
	if f := c.files[i]; f != nil {
		return f, nil
	}
	if len(c.files) == maxOpen {
		c.Close()
	}
	f, err := tensor.OpenSafetensors(filepath.Join(c.Path, filepath.Base(c.Files[i].Name)))
	if err != nil {
		return nil, err
	}
	c.files[i] = f
	return f, nil
}
