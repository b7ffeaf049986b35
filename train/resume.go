package train

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"ulysses/checkpoint"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

// Resumed describes the checkpoint from which a run resumes.
type Resumed struct {
	Path          string // path of the checkpoint; "" if there is none
	Step, Updates int64  // steps done, and steps in which the optimizer updated the weights
	Notes         []string
	Best          *checkpoint.Best   // the comparison of evaluations; nil = there was none
	Biases        []model.BiasTensor // of the experts, for Model.SetBiases
	Stages        []Stage            // up to that of this run, without a checkpoint this one alone
}

// settings returns the keys of the job file that affect later steps, with exact values. Keys
// without an effect are left out, such as the number of steps of a constant schedule.
func settings(o *OptimizerConfig, steps int64) map[string]string {
	number := func(x float64) string { return strconv.FormatFloat(x, 'g', -1, 64) }
	all := map[string]string{
		"optimizer.lr": number(o.LR), "optimizer.weight_decay": number(o.WeightDecay), "optimizer.clip": number(o.Clip),
		"optimizer.schedule": o.Schedule, "optimizer.warmup": number(o.Warmup),
	}
	if o.Name == "adamw" {
		all["optimizer.betas"] = fmt.Sprintf("[%s, %s]", number(o.Betas[0]), number(o.Betas[1]))
		all["optimizer.eps"] = number(o.Eps)
	}
	all["optimizer.begin"] = fmt.Sprint(o.Begin)
	all["optimizer.group"] = fmt.Sprintf("%v", o.Group)
	all["optimizer.expert_bias_rate"] = number(o.ExpertBiasRate)
	if o.Schedule != "constant" {
		all["optimizer.min_lr"] = number(o.MinLR)
	}
	if o.Schedule != "constant" || o.Warmup > 0 && o.Warmup < 1 {
		all["train.steps"] = fmt.Sprint(steps)
	}
	if o.Schedule == "wsd" {
		all["optimizer.decay"], all["optimizer.decay_shape"] = number(o.Decay), o.DecayShape
	}
	return all
}

// laterSettings has the values of settings that older programs did not have.
var laterSettings = map[string]string{"optimizer.begin": "0", "optimizer.group": "[]",
	"optimizer.expert_bias_rate": "0"}

// rateOf returns the learning rate at step s, counted from 0, under a checkpoint's settings.
func rateOf(was map[string]string, s int64) (float64, error) {
	var o OptimizerConfig
	var steps int64
	for key, set := range map[string]func(text string) error{
		"optimizer.lr":     func(text string) (err error) { o.LR, err = strconv.ParseFloat(text, 64); return err },
		"optimizer.min_lr": func(text string) (err error) { o.MinLR, err = strconv.ParseFloat(text, 64); return err },
		"optimizer.warmup": func(text string) (err error) { o.Warmup, err = strconv.ParseFloat(text, 64); return err },
		"optimizer.decay":  func(text string) (err error) { o.Decay, err = strconv.ParseFloat(text, 64); return err },
		"optimizer.begin":  func(text string) (err error) { o.Begin, err = strconv.ParseInt(text, 10, 64); return err },
		"train.steps":      func(text string) (err error) { steps, err = strconv.ParseInt(text, 10, 64); return err },
	} {
		if text, ok := was[key]; ok {
			if err := set(text); err != nil {
				return 0, err
			}
		}
	}
	o.Schedule, o.DecayShape = was["optimizer.schedule"], was["optimizer.decay_shape"]
	return o.Rate(s, steps), nil
}

// Resume fills the trained weights and the optimizer's state from a checkpoint that any number of
// ranks wrote. If path is "", it takes the newest undamaged checkpoint in the folder, the same on
// all ranks; Notes names the damaged ones that it skips. If there is no checkpoint, Resume returns
// the zero value. It does not skip a checkpoint that path names. Collective; called before New.
func (c *Checkpoints) Resume(path string, d device.Device, world comm.Comm, w Weights, all []*model.Group,
	o *OptimizerConfig, steps int64) (r Resumed, err error) {
	groups := model.Halves(all, false)
	r.Stages = []Stage{c.Stage}
	paths := []string{path}
	var known []int64
	if path == "" {
		if known, err = c.known(world); err != nil || len(known) == 0 {
			return r, err
		}
		paths = paths[:0]
		for _, s := range known {
			paths = append(paths, checkpoint.Dir(c.Dir).Path(s))
		}
	}
	var damage []string
	for i, p := range paths {
		from, notes, err := c.try(p, world, groups, o, steps)
		if from != nil {
			err = comm.Agree(world, fill(from, d, w, o.kinds(), nil))
			from.Close()
			for i := range damage {
				damage[i] = "skipped a damaged checkpoint: " + damage[i]
			}
			return Resumed{p, from.Step, from.Updates, append(damage, notes...), from.Best, biasesOf(from),
				c.stages(from)}, err
		}
		if unusable, ok := err.(*damaged); ok && path == "" {
			damage = append(damage, unusable.Error())
			c.replaced = append(c.replaced, known[i])
			continue
		}
		return r, err
	}
	return r, status.Errorf(status.InvalidConfig,
		"checkpoint.resume: no checkpoint in %s is whole:\n  %s\nset checkpoint.resume = \"off\" and output.overwrite = true to start again from step 1",
		c.Dir, strings.Join(damage, "\n  "))
}

// damaged is the error of a damaged checkpoint; another checkpoint may be undamaged.
type damaged struct{ error }

func (e *damaged) Unwrap() error { return e.error }

// known returns, on all ranks, the steps of the checkpoints that rank 0 sees, the newest first.
// Collective.
func (c *Checkpoints) known(world comm.Comm) (steps []int64, err error) {
	if world.Rank() == 0 {
		steps, err = checkpoint.Dir(c.Dir).Steps()
		slices.Reverse(steps)
	}
	if err = comm.Agree(world, err); err != nil {
		return nil, err
	}
	n := []int64{int64(len(steps))}
	if err = world.Broadcast(nil, tensor.OfInt64(n, 1), 0); err != nil || n[0] == 0 {
		return nil, err
	}
	if world.Rank() != 0 {
		steps = make([]int64, n[0])
	}
	return steps, world.Broadcast(nil, tensor.OfInt64(steps, n[0]), 0)
}

// try opens a checkpoint and compares it with the run, as openWhole does. Collective.
func (c *Checkpoints) try(path string, world comm.Comm, groups []*model.Group, o *OptimizerConfig,
	steps int64) (from *checkpoint.Checkpoint, notes []string, err error) {
	return openWhole(path, world, func(from *checkpoint.Checkpoint) ([]string, error) {
		return c.compare(from, groups, o, steps)
	})
}

// openWhole opens a checkpoint, calls compare and checks the files, on all ranks or on none. If
// from is nil there is an error, which is a *damaged if the checkpoint is at fault. Collective.
func openWhole(path string, world comm.Comm,
	compare func(*checkpoint.Checkpoint) ([]string, error)) (from *checkpoint.Checkpoint, notes []string, err error) {
	from, err = checkpoint.Open(path)
	fail := func(err error) (*checkpoint.Checkpoint, []string, error) {
		if from != nil {
			from.Close()
		}
		return nil, nil, err
	}
	// a newer program wrote it
	if err = comm.Agree(world, err); status.Of(err) == status.Unsupported {
		return fail(err)
	} else if err != nil {
		return fail(&damaged{err})
	}
	// The manifest has the checksums of the other files, so a different manifest is a different
	// checkpoint.
	if err = comm.SameFiles(world, "checkpoint "+path,
		[]comm.File{{Name: checkpoint.ManifestFile, Path: from.ManifestPath()}}); err != nil {
		return fail(err)
	}
	notes, err = compare(from)
	if err = comm.Agree(world, err); err != nil {
		return fail(err)
	}
	// The ranks that see the same copy of the files divide the check.
	rank, ranks, err := comm.Copies(world, from.ManifestPath())
	if err == nil {
		// a rank may have a larger file than the others
		err = comm.AgreeAfter(world, func() error { return from.Check(rank, ranks) })
	}
	if err != nil {
		return fail(&damaged{err})
	}
	return from, notes, nil
}

// compare refuses a checkpoint of another run, and a checkpoint with other settings unless c.Accept
// lists their keys. The error names all differences and their effect on the learning rate.
func (c *Checkpoints) compare(from *checkpoint.Checkpoint, groups []*model.Group, o *OptimizerConfig,
	steps int64) (notes []string, err error) {
	if o.Begin > from.Step {
		return nil, status.Errorf(status.InvalidConfig,
			"optimizer.begin = %d: checkpoint %s is of step %d, before the schedule begins; set optimizer.begin = %d",
			o.Begin, from.Path, from.Step, from.Step)
	}
	rate := o.Rate(from.Step, steps)
	next := fmt.Sprintf("the learning rate of step %d is %.6g", from.Step+1, rate)
	stage := c.change(from)
	faults := differences(from, stage.run, c.Changes, groups, o.kinds())
	if from.Settings == nil {
		if len(faults) == 0 {
			notes = append(notes,
				fmt.Sprintf(
					"checkpoint %s is of an older program (format %d): its manifest has no checksum and no settings of [optimizer] and train.steps, so they are not compared; %s",
					from.Path, from.Format, next))
		}
		return notes, from.MismatchError(faults)
	}
	was, err := rateOf(from.Settings, from.Step)
	if err != nil {
		return nil, status.Errorf(status.InvalidConfig,
			"checkpoint %s: its settings cannot be decoded: %w; name another checkpoint (in a job file: checkpoint.resume)",
			from.Path, err)
	}
	if was != rate {
		next += fmt.Sprintf(", with the checkpoint's settings %.6g", was)
	}
	if last, err := rateOf(from.Settings, from.Step-1); err == nil && from.Step > 0 {
		next += fmt.Sprintf("; that of step %d was %.6g", from.Step, last)
	}
	var changed, keys []string
	own := settings(o, steps)
	for _, key := range slices.Sorted(maps.Keys(own)) {
		before, ok := from.Settings[key]
		if later, is := laterSettings[key]; !ok && is {
			before, ok = later, true
		}
		if !ok || before == own[key] {
			continue
		}
		changed = append(changed, fmt.Sprintf("%s is %s, it was %s", key, own[key], before))
		if earlier, err := strconv.ParseInt(before, 10, 64); key == "train.steps" && err == nil &&
			o.sameUntil(from.Step, steps, earlier) {
			continue // the run has been as it would have been with the new value
		}
		if !slices.Contains(c.Accept, key) {
			keys = append(keys, key)
		}
	}
	if len(faults)+len(stage.keys) > 0 { // all differences, also those that Accept lists
		run := maps.Clone(c.Run)
		if _, ok := run[ModelKey]; ok {
			run[ModelKey] = stage.run[ModelKey] // stage.positions says what a stage may change of the model
		}
		all := slices.Concat(differences(from, run, c.Changes, groups, o.kinds()), stage.positions, changed)
		err := from.MismatchError(all)
		if len(faults) == 0 {
			err = status.Errorf(status.InvalidConfig,
				"%w; or set checkpoint.accept = [%s] to go on with its weights and moments in a new stage; %s", err,
				quoted(append(keys, stage.keys...)), next)
		}
		return nil, err
	}
	changed = append(stage.changed, changed...)
	switch {
	case stage.fault != "":
		return nil, status.Errorf(status.InvalidConfig, "checkpoint %s: %s", from.Path, stage.fault)
	case len(keys) > 0:
		return nil, status.Errorf(status.InvalidConfig,
			"checkpoint.resume: the settings differ from those in checkpoint %s:\n  %s\n%s\nset checkpoint.accept = [%s] to resume with the new values, or set the old values",
			from.Path, strings.Join(changed, "\n  "), next, quoted(keys))
	case stage.accepted:
		now := c.stages(from)
		notes = append(notes,
			fmt.Sprintf(
				"a new stage begins after step %d of checkpoint %s: %s; the weights, the optimizer's moments and the count of steps stay; %s; %s",
				from.Step, from.Path, strings.Join(changed, "; "), position(&now[len(now)-1], stage.files), next))
	case len(changed) > 0:
		notes = append(notes,
			fmt.Sprintf("resuming with settings that differ from checkpoint %s, which is allowed: %s; %s", from.Path,
				strings.Join(changed, "; "), next))
	}
	return notes, nil
}

// differences returns a sentence for each difference between a checkpoint and a run. Another model
// is described by changes, of the folder that the checkpoint has of its model, if it finds any.
func differences(from *checkpoint.Checkpoint, run map[string]string, changes func(dir string) []string,
	groups []*model.Group, kinds int) (all []string) {
	if before, ok := from.Run[ModelKey]; ok && before != run[ModelKey] && changes != nil {
		if all = changes(from.ModelPath()); len(all) > 0 {
			run = maps.Clone(run)
			run[ModelKey] = before
		}
	}
	return append(all, from.Differences(run, groupsOf(groups), kinds)...)
}

// quoted formats keys as a list of the job file.
func quoted(keys []string) string {
	all := make([]string, len(keys))
	for i, k := range keys {
		all[i] = strconv.Quote(k)
	}
	return strings.Join(all, ", ")
}
