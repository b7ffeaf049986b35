package train

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"ulysses/checkpoint"
	"ulysses/internal/input"
	"ulysses/internal/outdir"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

// Export writes the model folder of a checkpoint, as a run would have written it after the
// checkpoint's step. It returns the path of the checkpoint and its step. path is a checkpoint or a
// folder of checkpoints. Of several checkpoints, Export takes the newest one that is undamaged;
// skipped has the errors of newer ones. It needs no device and no ranks, and memory for a block of
// a tensor. The adapters of a run are written as a folder of PEFT, or with merge as a model folder
// of the base model with them. The folder is complete or absent, as model.WriteFolder describes. A
// folder that holds a model is refused unless force is set. The base model's folder is always
// refused.
func Export(path, folder string, force, merge bool) (from string, step int64, skipped []string, err error) {
	paths, err := checkpoint.Find(path)
	if err != nil {
		return "", 0, nil, err
	}
	for _, from := range paths {
		c, err := checkpoint.Open(from)
		if err == nil {
			if err := checkTarget(c, folder, force); err != nil {
				return "", 0, nil, err
			}
			if err = c.Check(0, 1); err != nil {
				c.Close()
			}
		}
		if err == nil {
			defer c.Close()
			return from, c.Step, skipped, export(c, folder, merge)
		}
		if len(paths) == 1 || status.Of(err) == status.Unsupported {
			return "", 0, nil, err
		}
		skipped = append(skipped, err.Error())
	}
	return "", 0, nil, status.Errorf(status.InvalidConfig,
		"export: no checkpoint in %s is whole:\n  %s\nname another folder", path, strings.Join(skipped, "\n  "))
}

func export(c *checkpoint.Checkpoint, folder string, merge bool) error {
	tensors, err := stored(c)
	if err != nil {
		return err
	}
	adapters := slices.ContainsFunc(tensors, func(t model.Stored) bool { return model.IsAdapter(t.Name) })
	if merge && !adapters {
		return status.Errorf(status.InvalidArgument, "export --merge: checkpoint %s has no adapters; leave out --merge",
			c.Path)
	}
	cfg, err := model.ReadConfig(c.ModelPath(), nil)
	if err != nil {
		return err
	}
	if adapters && !merge {
		return cfg.WriteAdapters(folder, c.ModelPath(), c.ModelFiles(), tensors)
	}
	biases := cfg.StoredBiases(biasesOf(c))
	if len(c.Frozen) > 0 {
		base, err := openBase(c, cfg)
		if err != nil {
			return err
		}
		defer base.Close()
		trained := tensors
		if adapters {
			tensors = nil
		}
		for _, t := range c.Frozen {
			x, err := storedAs(c, t, func(at int64, dst []float32) error { return base.Read(t.Name, at, dst) })
			if err != nil {
				return err
			}
			tensors = append(tensors, x)
		}
		if adapters {
			if tensors, err = merged(c, cfg, tensors, trained); err != nil {
				return err
			}
		}
	}
	return model.WriteFolder(folder, func(dir string) error {
		return model.CopyRest(dir, c.ModelPath(), c.ModelFiles())
	}, cfg.InFiles(append(tensors, biases...)))
}

// merged returns the tensors of the base model with the adapters of a checkpoint merged.
func merged(c *checkpoint.Checkpoint, cfg *model.Config, base, adapters []model.Stored) ([]model.Stored, error) {
	l, err := model.ReadAdapterConfig(c.ModelPath())
	if err != nil {
		return nil, err
	}
	shape := func(name string) []int64 {
		for i := range adapters {
			if adapters[i].Name == name {
				return adapters[i].Shape
			}
		}
		return nil
	}
	return l.Merge(cfg, base, shape, func(name string, at int64, dst []float32) error {
		return c.Read(name, 0, at, dst)
	})
}

// MergeAdapters writes the model folder of a folder of PEFT, merged with the base model that it
// names. force is as in Export; the folder of PEFT itself is never overwritten.
func MergeAdapters(path, folder string, force bool) error {
	f, err := model.OpenAdapters(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if info, err := os.Stat(f.Base); err != nil || !info.IsDir() { // PEFT also has names of the hub there
		return status.Errorf(status.IO,
			"export: %s: base_model_name_or_path = %s is not a folder here; set it to the folder of the base model",
			filepath.Join(path, model.AdapterConfigFile), input.Quote(f.Base))
	}
	base, err := model.OpenFolder(f.Base, nil)
	if err != nil {
		return status.Errorf(status.Of(err), "export: the base model of %s: %w", path, err)
	}
	defer base.Close()
	if outdir.Inside(folder, path) && outdir.Inside(path, folder) {
		return status.Errorf(status.InvalidArgument,
			"export: %s has the adapters, which the merged model would replace; name another folder", folder)
	}
	if err := checkFolder(f.Base, folder, force); err != nil {
		return err
	}
	return model.MergeFolder(folder, f, base)
}

// openBase opens the folder of the base model, whose weights the run has not trained.
func openBase(c *checkpoint.Checkpoint, cfg *model.Config) (*model.Folder, error) {
	if c.Base == "" {
		return nil, status.Errorf(status.Unsupported,
			"export: checkpoint %s does not have the weights that train.freeze names, because they were drawn from the run's seed; resume its run, which writes model/ at its end",
			c.Path)
	}
	base, err := model.OpenBase(c.Base, cfg)
	if err != nil {
		return nil, err
	}
	now, err := base.Fingerprint()
	if was := c.Run[FrozenKey]; err == nil && now != was {
		err = status.Errorf(status.InvalidConfig,
			"export: the weights in %s differ from the base model of checkpoint %s (fingerprint %s, it was %s); restore the folder",
			c.Base, c.Path, now, was)
	}
	if err != nil {
		base.Close()
		return nil, err
	}
	return base, nil
}

// FindCheckpoint returns the path of the checkpoint at a path, or of the newest checkpoint in it;
// "" if there is none.
func FindCheckpoint(path string) string {
	paths, err := checkpoint.Find(path)
	if err != nil {
		return ""
	}
	return paths[0]
}

// stored returns the weights of a checkpoint in the types of a model folder.
func stored(c *checkpoint.Checkpoint) (all []model.Stored, err error) {
	if len(c.Model) == 0 {
		return nil, status.Errorf(status.Unsupported,
			"export: checkpoint %s has no config.json of the model, because older programs did not write it; resume its run with this program, which writes model/ at its end",
			c.Path)
	}
	for _, g := range c.Groups {
		for _, t := range g.Tensors {
			x, err := storedAs(c, t, func(at int64, dst []float32) error { return c.Read(t.Name, 0, at, dst) })
			if err != nil {
				return nil, err
			}
			all = append(all, x)
		}
	}
	return all, nil
}

// storedAs returns a tensor of a model folder with the name, shape and type in a manifest.
func storedAs(c *checkpoint.Checkpoint, t checkpoint.Tensor, read func(at int64, dst []float32) error) (model.Stored,
	error) {
	dtype := tensor.ParseDType(t.DType)
	if dtype == tensor.Invalid {
		return model.Stored{},
			status.Errorf(status.InvalidConfig,
				"export: checkpoint %s: its manifest is damaged (%s has the element type %q); name another checkpoint",
				c.Path, t.Name, t.DType)
	}
	return model.Stored{Name: t.Name, DType: dtype, Shape: t.Shape, Read: read}, nil
}

// checkTarget returns an error for a folder in which the model would replace files of a checkpoint
// or of the base model. Without force it also refuses a folder that holds a model.
func checkTarget(c *checkpoint.Checkpoint, folder string, force bool) error {
	fail := func(format string, args ...any) error {
		return status.Errorf(status.InvalidArgument, "export: %w", fmt.Errorf(format, args...))
	}
	if _, err := os.Stat(filepath.Join(folder, "manifest.json")); err == nil || outdir.Inside(folder, c.Path) ||
		outdir.Inside(c.Path, folder) {
		return fail("%s is, or holds, a checkpoint or a file of one; name another folder for the model", folder)
	}
	return checkFolder(c.Base, folder, force)
}

// checkFolder returns an error for a folder in which the model would replace files of the base
// model. Without force it also refuses a folder that holds a model.
func checkFolder(base, folder string, force bool) error {
	fail := func(format string, args ...any) error {
		return status.Errorf(status.InvalidArgument, "export: %w", fmt.Errorf(format, args...))
	}
	if base != "" && (outdir.Inside(folder, base) || outdir.Inside(base, folder)) {
		return fail("%s is, holds or lies in %s, the folder of the base model (model.path of the run), which is never overwritten; name another folder",
			folder, base)
	}
	if force {
		return nil
	}
	used, err := model.FilesIn(folder)
	if len(used) > 0 {
		return fail("%s holds a model (%s), which would be replaced; name another folder, or add --force", folder,
			firstNames(used))
	}
	if info, statErr := os.Stat(folder); err != nil && statErr == nil && info.IsDir() {
		return status.Errorf(status.IO, "export: %w; name a folder that can be read", err)
	}
	return nil // WriteFolder returns the error for a path that is a file
}

// firstNames returns up to three names and the number of the others.
func firstNames(names []string) string {
	if more := len(names) - 3; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:3], ", "), more)
	}
	return strings.Join(names, ", ")
}
