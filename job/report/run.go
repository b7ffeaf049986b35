// Package report describes a run of kind "train" or "eval": tables on standard output, report.html
// and trace.json.
//
// A Run names what is described. Run.PrintPlan prints the planned memory before the first step.
// Totals adds up steps and evaluations while the run works. Run.Write gathers the facts of all
// ranks at the end, prints the tables and writes the files. A report is written for runs that
// finish, that stop early with a checkpoint, and that fail on all ranks.
package report

import (
	"fmt"
	"io"
	"math"
	"path/filepath"
	"time"

	"ulysses/comm"
	"ulysses/internal/units"
	"ulysses/job/assembly"
	"ulysses/job/file"
	"ulysses/job/plan"
	"ulysses/train"
)

// Run is a run on one rank, with everything that its report describes. Functions that are marked
// collective must be called on all ranks; only rank 0 prints and writes files.
type Run struct {
	Parts   *assembly.Parts
	Trainer *train.Trainer
	Rank    *plan.Rank // measures this machine and plans a step, for comparison
	Ledger  *comm.Ledger
	Totals  *Totals

	From    string    // checkpoint from which the run resumes, or which is evaluated; "" = none
	Steps   int64     // of the whole run, including earlier runs that it resumes
	Began   time.Time // start of the process
	Waited  float64   // WaitedForCore before the first step
	Failed  string    // the error that ended the steps early on all ranks; "" = none
	Why     string    // why the run has stopped early, in parentheses after a space; "" = unknown
	Threads bool      // the ranks are goroutines of one process
	Beside  bool      // an evaluation whose output.dir also has a training run

	Program  string   // version and build of the program
	Source   string   // text of the job file
	Sets     []string // table.key=value of the command line
	Warnings func() []string
	Warn     func(text string)
	// Check returns an error if a name in output.dir must not be written
	Check func(name string) error

	Stdout  io.Writer // tables
	Details io.Writer // the tables of --verbose; io.Discard without it
	Result  io.Writer // the line of --quiet; nil without it
}

// Totals adds up the steps and evaluations of a run.
type Totals struct {
	Resumed int64 // steps of earlier runs
	First   *train.Record
	Last    *train.Record // nil = no step was done
	Evals   []*train.EvalRecord
	Samples []Sample
	Tokens  int64
	Seconds float64 // inside steps
	FLOPs   float64 // causal model FLOPs of a rank
}

// Sample is a text that the model has generated after an evaluation.
type Sample struct {
	Step         int64
	Prompt, Text string
}

// AddStep adds a step.
func (t *Totals) AddStep(r *train.Record) {
	if t.First == nil {
		t.First = r
	}
	t.Last = r
	t.Tokens += r.Tokens
	t.Seconds += r.Seconds
	t.FLOPs += r.ModelTFLOPS * 1e12 * r.Seconds
}

// perSecond returns the mean over all steps of what they have done altogether, a second.
func (t *Totals) perSecond(amount float64) float64 { return amount / math.Max(t.Seconds, 1e-9) }

// steps returns the number of steps that this run has done.
func (t *Totals) steps() int64 {
	if t.Last == nil {
		return 0
	}
	return t.Last.Step - t.Resumed
}

func (r *Run) job() *file.Job   { return r.Parts.Job }
func (r *Run) world() comm.Comm { return r.Parts.Mesh.World }

// path returns the path of the report. An evaluation in the folder of a training run has a report
// of its own.
func (r *Run) path() string {
	name := file.ReportFile
	if r.job().Kind == "eval" && r.Beside {
		name = file.EvalReportFile
	}
	return filepath.Join(r.job().Output.Dir, name)
}

// savesModel reports whether this run writes output.dir/model: only at the end of training, not
// when the run stops early.
func (r *Run) savesModel() bool {
	return r.job().Kind == "train" && r.job().Output.Model && r.Failed == "" && !r.Trainer.Stopped()
}

// state describes how the run ended.
func (r *Run) state() string {
	done, resumed := r.Trainer.Loop.Resumed, r.Trainer.Loop.Resumed
	if r.Totals.Last != nil {
		done = r.Totals.Last.Step
	}
	switch {
	case r.job().Kind == "eval" && r.Failed != "":
		return "failed"
	case r.job().Kind == "eval":
		if r.From != "" {
			return "evaluated " + filepath.Base(r.From)
		}
		return "evaluated"
	case r.Failed != "":
		return fmt.Sprintf("failed after step %d of %d", done, r.Steps)
	case r.Trainer.Stopped():
		return fmt.Sprintf("stopped early after step %d of %d%s, with a checkpoint", done, r.Steps, r.Why)
	case r.Trainer.EndedEarly():
		return fmt.Sprintf("ended early after step %d of %d, because %s", done, r.Steps, WhyEarly(r.job()))
	case resumed > 0:
		return fmt.Sprintf("finished %s, resumed after step %d", allSteps(r.Steps), resumed)
	}
	return "finished " + allSteps(r.Steps)
}

// WhyEarly says why a run ended early. With a threshold, the last evaluation may have the smallest
// loss so far.
func WhyEarly(j *file.Job) string {
	loss, by, keys := "held-out loss", "", "eval.patience"
	if j.Eval.Metric != "" {
		loss += " of " + j.Eval.Metric
	}
	if j.Eval.Threshold > 0 {
		by, keys = fmt.Sprintf(" by more than %v", j.Eval.Threshold), "eval.patience, eval.threshold"
	}
	return fmt.Sprintf("the %s has not improved%s in %s (%s)", loss, by,
		units.Count(j.Eval.Patience, "evaluation"), keys)
}

// allSteps describes the number of steps of a finished run.
func allSteps(n int64) string {
	if n == 1 {
		return "its one step"
	}
	return fmt.Sprintf("all %d steps", n)
}
