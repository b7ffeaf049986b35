package file

import (
	"fmt"

	"ulysses/internal/units"
	"ulysses/model"
)

// Warnings returns one line for each setting that is allowed but probably not intended: keys
// without an effect, a trace of no step, a warmup that never ends, a theta of RoPE that is not
// read, tensors of the folder that the model does not read, fields that a folder of adapters does
// not have. The model's config is nil for operator jobs, the folder is nil for a model from
// scratch, and steps is 0 if unknown. cpu says that the device is a CPU.
func (j *Job) Warnings(c *model.Config, folder *model.Folder, steps int64, cpu bool) []string {
	lines := j.idleWarnings(c, cpu)
	if t := j.Output.Trace; j.Kind == "train" && len(t) == 2 && steps > 0 && t[0] > steps {
		lines = append(lines,
			fmt.Sprintf("%v: output.trace = [%d, %d]: the run has %s, so it writes no %s; set steps of the run",
				j.Origin("output.trace"), t[0], t[1], units.Count(steps, "step"), TraceFile))
	}
	what := "run"
	if j.Optimizer.Begin > 0 {
		what = "schedule"
	}
	steps -= j.Optimizer.Begin
	if w := j.Optimizer.WarmupSteps(steps + j.Optimizer.Begin); j.Kind == "train" && steps > 0 && w > steps &&
		j.Optimizer.LR > 0 {
		lines = append(lines,
			fmt.Sprintf(
				"%v: optimizer.warmup = %d: the %s has %s and ends at a learning rate of %.3g, never at optimizer.lr = %.3g; set optimizer.warmup below %d",
				j.Origin("optimizer.warmup"), w, what, units.Count(steps, "step"),
				j.Optimizer.LR*float64(steps)/float64(w), j.Optimizer.LR, steps))
	}
	if c != nil {
		for _, text := range c.Warnings() {
			if j.Model.Path != "" {
				text = j.Model.Path + ": " + text
			}
			lines = append(lines, text)
		}
	}
	if j.Kind == "train" && j.LoRA.Rank > 0 && len(j.Model.Override) > 0 {
		lines = append(lines,
			fmt.Sprintf(
				"%v: model.override: a folder of adapters does not have these fields, and a merge of it has the fields of %s; to keep the override, run ulysses-mpi export --merge CHECKPOINT MODEL-FOLDER",
				j.Origin("model.override"), j.Model.Path))
	}
	if j.Kind == "train" && c != nil && c.AddedBiases() {
		lines = append(lines,
			fmt.Sprintf(
				"optimizer.expert_bias_rate: transformers does not read the biases of experts in models of type %s; it chooses other experts than this program",
				c.ModelType))
	}
	if j.Kind == "train" && j.LoRA.Rank > 0 && folder != nil && folder.HasVision() {
		lines = append(lines,
			fmt.Sprintf(
				"lora.rank: PEFT loads %s with its vision, in which matrices have other names, so it leaves out the trained adapters; merge them with ulysses-mpi export --merge",
				j.Model.Path))
	}
	if folder != nil {
		for _, d := range folder.Dropped() {
			what := fmt.Sprintf("%d tensors %s* (%s) are", d.Tensors, d.Prefix, units.Bytes(d.Bytes))
			if d.Tensors == 1 {
				what = fmt.Sprintf("1 tensor %s* (%s) is", d.Prefix, units.Bytes(d.Bytes))
			}
			lines = append(lines,
				fmt.Sprintf(
					"model.path: %s: %s skipped, because models of type %s have no such tensors; the trained model will not have them",
					j.Model.Path, what, c.ModelType))
		}
	}
	return lines
}
