package train

import (
	"os"
	"path/filepath"
	"strings"

	"ulysses/internal/checkpoint"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

// Export writes the Hugging Face folder that a run would have written after the step of a checkpoint, and returns where that is and its
// step. path is a checkpoint or the folder that a run keeps several in: of these the newest that is whole is taken, and skipped says what is wrong
// with newer ones. It needs neither a device nor ranks, and memory for a piece of a tensor. The folder appears whole or not at all, by the
// rules of model.WriteFolder.
func Export(path, folder string) (from string, step int64, skipped []string, err error) {
	paths, err := checkpoint.Find(path)
	if err != nil {
		return "", 0, nil, err
	}
	for _, from := range paths {
		c, err := checkpoint.Open(from)
		if err == nil {
			if err := apart(from, folder); err != nil {
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
	return model.WriteFolder(folder, func(dir string) error { return model.CopyRest(dir, c.ModelPath()) }, tensors)
}

// FindCheckpoint is the checkpoint that a path means, or the newest of those in it; "" when there is none.
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

// apart refuses a folder whose model would take the place of a checkpoint's files.
func apart(from, folder string) error {
	a, err := filepath.Abs(from)
	if err == nil {
		a, err = filepath.EvalSymlinks(a)
	}
	if err != nil {
		return status.Errorf(status.IO, "export: %w", err)
	}
	b, err := filepath.Abs(folder)
	if err != nil {
		return status.Errorf(status.IO, "export: %w", err)
	}
	if real, err := filepath.EvalSymlinks(b); err == nil {
		b = real
	}
	within := func(x, y string) bool { return x == y || strings.HasPrefix(x, strings.TrimSuffix(y, "/")+"/") }
	_, held := os.Stat(filepath.Join(b, "manifest.json"))
	if within(a, b) || within(b, a) || held == nil {
		return status.Errorf(status.InvalidArgument, "export: %s is, or holds, a checkpoint or a part of one: name a folder of its own for the model", folder)
	}
	return nil
}
