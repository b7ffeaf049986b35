package train

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"ulysses/checkpoint"
	"ulysses/internal/outdir"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

// Export writes the Hugging Face folder that a run would have written after the step of a
// checkpoint, and returns where that is and its step. path is a checkpoint or the folder that a run
// keeps several in: of these the newest that is whole is taken, and skipped says what is wrong with
// newer ones. It needs neither a device nor ranks, and memory for a piece of a tensor. The folder
// appears whole or not at all, by the rules of model.WriteFolder. A folder that holds a model is
// refused unless force is set, and the base model's folder in any case.
func Export(path, folder string, force bool) (from string, step int64, skipped []string, err error) {
	paths, err := checkpoint.Find(path)
	if err != nil {
		return "", 0, nil, err
	}
	for _, from := range paths {
		c, err := checkpoint.Open(from)
		if err == nil {
			if err := apart(c, folder, force); err != nil {
				return "", 0, nil, err
			}
			if err = c.Check(0, 1); err != nil {
				c.Close()
			}
		}
		if err == nil {
			defer c.Close()
			return from, c.Step, skipped, export(c, folder)
		}
		if len(paths) == 1 || status.Of(err) == status.Unsupported {
			return "", 0, nil, err
		}
		skipped = append(skipped, err.Error())
	}
	return "", 0, nil, status.Errorf(status.InvalidConfig, "export: no checkpoint in %s is whole:\n  %s\nname another folder", path, strings.Join(skipped, "\n  "))
}

func export(c *checkpoint.Checkpoint, folder string) error {
	tensors, err := stored(c)
	if err != nil {
		return err
	}
	return model.WriteFolder(folder, func(dir string) error { return model.CopyRest(dir, c.ModelPath(), c.ModelFiles()) }, tensors)
}

// FindCheckpoint is the checkpoint that a path means, or the newest of those in it; "" when there
// is none.
func FindCheckpoint(path string) string {
	paths, err := checkpoint.Find(path)
	if err != nil {
		return ""
	}
	return paths[0]
}

// stored is the weights of a state as a model's folder has them.
func stored(c *checkpoint.Checkpoint) (all []model.Stored, err error) {
	if len(c.Model) == 0 {
		return nil, status.Errorf(status.Unsupported, "export: checkpoint %s does not hold the model's config.json, as those of older programs do not: resume its run with this one, which writes model/ at its end and checkpoints that hold it",
			c.Path)
	}
	for _, g := range c.Groups {
		for _, t := range g.Tensors {
			dtype := tensor.ParseDType(t.DType)
			if dtype == tensor.Invalid {
				return nil, status.Errorf(status.InvalidConfig, "export: checkpoint %s: its manifest is damaged (%s has element type %q): take another checkpoint",
					c.Path, t.Name, t.DType)
			}
			all = append(all, model.Stored{Name: t.Name, DType: dtype, Shape: t.Shape, Read: func(at int64, dst []float32) error {
				return c.Read(t.Name, 0, at, dst)
			}})
		}
	}
	return all, nil
}

// apart returns an error for a folder in which the model would replace files of a checkpoint or of
// the base model. Without force it also refuses a folder that holds a model.
func apart(c *checkpoint.Checkpoint, folder string, force bool) error {
	fail := func(format string, args ...any) error {
		return status.Errorf(status.InvalidArgument, "export: %w", fmt.Errorf(format, args...))
	}
	if _, err := os.Stat(filepath.Join(folder, "manifest.json")); err == nil || outdir.Inside(folder, c.Path) || outdir.Inside(c.Path, folder) {
		return fail("%s is, or holds, a checkpoint or a file of one; name a folder of its own for the model", folder)
	}
	if base := c.Base; base != "" && (outdir.Inside(folder, base) || outdir.Inside(base, folder)) {
		return fail("%s is, holds or lies in %s, the folder of the base model (model.path of the run), which is never overwritten; name another folder", folder, base)
	}
	if force {
		return nil
	}
	used, err := model.FilesIn(folder)
	if len(used) > 0 {
		return fail("%s holds a model (%s), which would be replaced; name another folder, or add --force", folder, some(used))
	}
	if info, statErr := os.Stat(folder); err != nil && statErr == nil && info.IsDir() {
		return status.Errorf(status.IO, "export: %w; name a folder that can be read", err)
	}
	return nil // WriteFolder returns the error for a path that is a file
}

// some returns the first few of many names.
func some(names []string) string {
	if more := len(names) - 3; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:3], ", "), more)
	}
	return strings.Join(names, ", ")
}
