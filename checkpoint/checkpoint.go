// Package checkpoint writes and reads checkpoints: training states in files. A checkpoint is a
// folder, which is complete or absent.
//
// Dir is the folder in which a run keeps checkpoints. To write one, one rank calls Begin, each rank
// calls Write with its shards, one rank calls WriteModel and, after all files are written, Finish.
// To read one, Open reads the manifest, Check compares checksums and Read returns elements.
//
// Each rank writes rank-NNNNN.safetensors with the elements of every parameter that it owns, in
// F32: the weights under the parameter's name, and the optimizer's moments under name + ".exp_avg"
// and ".exp_avg_sq", as flat shards. The shards of a name, concatenated in rank order, are the
// tensor.
//
// manifest.json describes the run, the elements of each file, and the length and CRC-32C of each
// file. It also has its own SHA-256. It is written last, into a folder with a hidden name, which is
// then renamed. The rule that shards weights by groups does not depend on the number of ranks, so
// any number of ranks can read a checkpoint that any number of ranks wrote. The folder model in a
// checkpoint has the other files of a model folder, so a model folder can be made from the
// checkpoint alone.
package checkpoint

import (
	"cmp"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"ulysses/internal/input"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// prefix is the start of the name of a checkpoint's folder.
const prefix = "step-"

// usualDir is the default of checkpoint.dir in a job file.
const usualDir = "checkpoints"

// Dir is the path of the folder in which a run keeps its checkpoints.
type Dir string

// Path returns the path of the checkpoint of a step.
func (d Dir) Path(step int64) string {
	return filepath.Join(string(d), fmt.Sprintf("%s%08d", prefix, step))
}

// temp returns the path of the checkpoint of a step until it is complete.
func (d Dir) temp(step int64) string {
	return filepath.Join(string(d), fmt.Sprintf(".%s%08d.part", prefix, step))
}

// stepOf returns the step in the name of a checkpoint's folder; false for other names, such as
// step-8 or step-00000008.old.
func stepOf(name string) (step int64, ok bool) {
	digits, ok := strings.CutPrefix(name, prefix)
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	return n, err == nil && name == filepath.Base(Dir("").Path(n))
}

// Steps returns the steps of the complete checkpoints in increasing order.
func (d Dir) Steps() ([]int64, error) {
	steps, err := d.steps()
	if err != nil {
		return nil, status.Errorf(status.IO, "checkpoint.dir: %w; choose another output.dir", err)
	}
	return steps, nil
}

// steps is Steps with the error of the folder.
func (d Dir) steps() ([]int64, error) {
	entries, err := os.ReadDir(string(d))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var steps []int64
	for _, e := range entries {
		if n, ok := stepOf(e.Name()); ok && e.IsDir() {
			steps = append(steps, n)
		}
	}
	slices.Sort(steps)
	return steps, nil
}

// Has reports whether there is a complete checkpoint of a step.
func (d Dir) Has(step int64) (bool, error) {
	steps, err := d.Steps()
	return slices.Contains(steps, step), err
}

// Ready returns an error if checkpoints of steps after the given one cannot be written. It removes
// the unfinished files of ended runs. If the folder does not exist, Ready does not leave one.
func (d Dir) Ready(after int64) error {
	fail := func(err error) error {
		return status.Errorf(status.IO, "checkpoint.dir: %w; choose an output.dir that can be written", err)
	}
	_, err := os.Stat(string(d))
	fresh := errors.Is(err, os.ErrNotExist)
	if err := os.MkdirAll(string(d), 0o777); err != nil {
		return fail(err)
	}
	if fresh {
		if err := os.Remove(string(d)); err != nil {
			return fail(err)
		}
		return nil
	}
	entries, err := os.ReadDir(string(d))
	if err != nil {
		return fail(err)
	}
	for _, e := range entries {
		if n, ok := stepOf(e.Name()); ok && n > after && !e.IsDir() {
			return status.Errorf(status.IO,
				"checkpoint.dir: %s is a file or a link, and the run writes a folder of this name; remove it, or choose another output.dir",
				d.Path(n))
		}
	}
	probe, err := os.MkdirTemp(string(d), "."+prefix+"ready.*")
	if err != nil {
		return fail(err)
	}
	if err := os.Remove(probe); err != nil {
		return fail(err)
	}
	if err := d.Clean(); err != nil {
		return fail(err)
	}
	return nil
}

// Begin makes the folder for the files of a checkpoint, and removes the unfinished files of ended
// runs. One rank calls it before the other ranks write.
func (d Dir) Begin(step int64) error {
	err := d.Clean()
	if err == nil {
		err = os.MkdirAll(d.temp(step), 0o777)
	}
	if err != nil {
		return status.Errorf(status.IO, "checkpoint of step %d: %w", step, err)
	}
	return nil
}

// Clean removes the unfinished files of ended runs, and what was left of old checkpoints. The files
// of these may still be in use (removeFolder), so it is no error if they stay. Clean compares names
// instead of matching patterns, because the path of the folder may contain any character.
func (d Dir) Clean() error {
	entries, err := os.ReadDir(string(d))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if err != nil || !strings.HasPrefix(e.Name(), "."+prefix) {
			continue
		}
		if failed := removeAll(filepath.Join(string(d), e.Name())); !strings.HasSuffix(e.Name(), oldSuffix) {
			err = failed
		}
	}
	if err != nil {
		return fmt.Errorf("the unfinished files of an ended run cannot be removed: %w", err)
	}
	return nil
}

// Shard is the elements of one tensor that a rank writes.
type Shard struct {
	Name   string
	Numel  int64
	Values []float32 // nil = Read returns the elements
	// Read stores elements [at, at+len(dst)) in dst. Write calls it with increasing at.
	Read func(at int64, dst []float32) error
}

// item returns the shard for tensor.WriteSafetensors. buffer is memory for Read.
func (p *Shard) item(buffer []float32) tensor.Item {
	if p.Values != nil {
		return tensor.Item{Name: p.Name, Tensor: tensor.OfFloat32(p.Values, p.Numel)}
	}
	return tensor.Item{Name: p.Name, Tensor: tensor.Of(nil, tensor.F32, p.Numel), Write: func(w io.Writer) error {
		for at := int64(0); at < p.Numel; at += int64(len(buffer)) {
			values := buffer[:min(int64(len(buffer)), p.Numel-at)]
			if err := p.Read(at, values); err != nil {
				return err
			}
			if _, err := w.Write(tensor.OfFloat32(values, int64(len(values))).RawBytes()); err != nil {
				return err
			}
		}
		return nil
	}}
}

// unwritten returns the error of a file that this host cannot write.
func unwritten(step int64, err error) error {
	host, _ := os.Hostname()
	return status.Errorf(status.IO, "checkpoint of step %d on host %s: %w", step, host, err)
}

// Write writes the file of a rank, after Begin. When it returns, the file is on disk.
func (d Dir) Write(step int64, rank int, shards []Shard) (File, error) {
	items := make([]tensor.Item, len(shards))
	buffer := make([]float32, 1<<18)
	for i := range shards {
		items[i] = shards[i].item(buffer)
	}
	path := filepath.Join(d.temp(step), FileName(rank))
	if err := tensor.WriteSafetensors(path, map[string]string{"producer": producer}, items); err != nil {
		return File{}, unwritten(step, err)
	}
	f, err := sum(path)
	if err != nil {
		return File{}, unwritten(step, err)
	}
	return f, nil
}

// WriteModel makes the folder model in a checkpoint, after Begin. write writes the files of a model
// folder except the weights. When WriteModel returns, the files are on disk.
func (d Dir) WriteModel(step int64, write func(dir string) error) (files []File, err error) {
	dir := filepath.Join(d.temp(step), modelFolder)
	if err = os.Mkdir(dir, 0o777); err == nil {
		err = write(dir)
	}
	if err == nil {
		files, err = sumsOf(dir)
	}
	if err != nil {
		return nil, unwritten(step, err)
	}
	return files, nil
}

// sumsOf returns the lengths and checksums of all files in a folder, and waits until the entries of
// its folders are on disk. The names are paths in the folder, with slashes.
func sumsOf(dir string) (files []File, err error) {
	err = filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() {
			return syncDir(path)
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		f, err := sum(path)
		f.Name = filepath.ToSlash(name)
		files = append(files, f)
		return err
	})
	return files, err
}

// sum returns the length and the checksum of a file.
func sum(path string) (File, error) {
	f, _, err := input.Open(path)
	if err != nil {
		return File{}, err
	}
	defer f.Close()
	h := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	n, err := io.Copy(h, f)
	return File{filepath.Base(path), n, h.Sum32()}, err
}

// Finish writes the manifest of a checkpoint whose files all ranks have written, and renames the
// folder to its final name. It then removes all checkpoints except the newest keep and the one of
// the best evaluation. The checkpoints of the steps in replaced, which are damaged or of another
// run, are removed and do not count. left is the error of an old checkpoint that could not be
// removed; the new one is complete. One rank calls it.
func (d Dir) Finish(m *Manifest, keep int, replaced []int64) (left, err error) {
	m.Format, m.Producer = Format, producer
	temp := d.temp(m.Step)
	text, err := m.text()
	if err == nil {
		err = tensor.WriteFile(filepath.Join(temp, ManifestFile), func(w io.Writer) error {
			_, err := w.Write(text)
			return err
		})
	}
	if err == nil {
		err = syncDir(temp)
	}
	if err == nil {
		if err = os.Rename(temp, d.Path(m.Step)); errors.Is(err, os.ErrExist) {
			left, err = replaceFolder(d.Path(m.Step), temp) // an earlier run wrote a checkpoint of this step
		}
	}
	if err == nil {
		err = syncDir(string(d))
	}
	if err != nil {
		return nil, status.Errorf(status.IO, "checkpoint of step %d: %w", m.Step, err)
	}
	more, err := d.prune(m.Step, keep, m.kept(), replaced)
	if left = cmp.Or(left, more); left != nil {
		left = fmt.Errorf("checkpoint of step %d: it is complete, and an old checkpoint cannot be removed: %w", m.Step,
			left)
	}
	return left, err
}

// prune keeps the newest checkpoints up to the given step, which was just written. Later
// checkpoints are of a run that was abandoned: they would count as the newest ones, replace the
// checkpoints of this run, and be resumed instead. It is therefore an error if one of these stays,
// and left is the error of any other checkpoint. The checkpoint of step best is kept as well.
func (d Dir) prune(step int64, keep int, best int64, replaced []int64) (left, err error) {
	steps, err := d.Steps()
	kept := 0
	for _, s := range slices.Backward(steps) {
		if s == best {
			continue
		}
		if s <= step && (s == step || !slices.Contains(replaced, s)) && kept < keep {
			kept++
			continue
		}
		hidden, failed := removeFolder(d.Path(s))
		if failed != nil && s > step {
			err = cmp.Or(err, status.Errorf(status.IO,
				"checkpoint.dir: a checkpoint of an abandoned run cannot be removed: %w; remove it", failed))
		} else {
			left = cmp.Or(left, hidden, failed)
		}
	}
	return left, err
}

// oldSuffix is the end of the name of a checkpoint that is being removed.
const oldSuffix = ".old"

// removeAll is os.RemoveAll. Tests replace it.
var removeAll = os.RemoveAll

// removeFolder removes a checkpoint. It renames the folder to a name that is not a checkpoint, and
// then removes it. A folder of a container's image, in the lower layer of overlayfs, cannot be
// renamed; without its manifest it is not a checkpoint either. left is the error of removing what
// is no checkpoint any more: on NFS, a file that a process has open keeps its folder. Clean removes
// it later.
func removeFolder(path string) (left, err error) {
	hidden, err := hide(path)
	if errors.Is(err, syscall.EXDEV) {
		hidden, err = path, os.Remove(filepath.Join(path, ManifestFile))
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	if err != nil {
		return nil, err
	}
	return removeAll(hidden), nil
}

// replaceFolder removes a checkpoint, and renames the folder from to its name. The rename comes
// first, because removing takes long, and a run that ends meanwhile must not lose both.
func replaceFolder(path, from string) (left, err error) {
	hidden, err := hide(path)
	if errors.Is(err, syscall.EXDEV) {
		if left, err = removeFolder(path); err == nil {
			err = os.Rename(from, path)
		}
		return left, err
	}
	if err != nil {
		return nil, err
	}
	if err := os.Rename(from, path); err != nil {
		return nil, errors.Join(err, os.Rename(hidden, path))
	}
	return removeAll(hidden), nil
}

// hide renames a folder to a name that is not a checkpoint, and returns it.
func hide(path string) (hidden string, err error) {
	for i := 0; ; i++ { // one of the same step may be left
		hidden = filepath.Join(filepath.Dir(path), fmt.Sprintf(".%s.%d%s", filepath.Base(path), i, oldSuffix))
		if err = os.Rename(path, hidden); !errors.Is(err, fs.ErrExist) {
			return hidden, err
		}
	}
}

// syncDir waits until the entries of a folder are on disk. Some file systems refuse this for every
// folder, such as shared folders of virtual machines, and SMB of older kernels.
func syncDir(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Sync(); !errors.Is(err, syscall.EINVAL) && !errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	return nil
}
