// Package plan predicts the memory, the communication and the time of a job. It executes the job's
// own code on package dryrun's device, which computes nothing and adds up what each operation
// takes.
//
// A Machine has the rates of a rank's device and links: measured here, published for a GPU, or read
// from a file of --cluster. Predict plans one job on a Machine; Run is the verb plan; Rank measures
// the machine of a run and plans a step for comparison.
package plan

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"text/tabwriter"
	"time"

	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/job/file"
	"ulysses/model"
	"ulysses/slurm"
)

// Options is what the command line says of a plan.
type Options struct {
	Path    string   // of the job file
	Sets    []string // table.key=value
	Ranks   int      // 0 = the launcher's, the cluster's or the job's
	Search  bool     // plan every mesh
	Cluster string   // a file that describes another machine; "" = this machine
	Stdout  io.Writer
	Warn    func(text string)
}

// Run predicts what a job takes: memory of a rank by component, bytes sent, the time of a step or
// of the passes, and whether it fits. It runs nothing; the job's own code is dry-run on devices
// that compute nothing.
func Run(o Options) error {
	src, err := file.Read(o.Path)
	if err != nil {
		return err
	}
	parse := func(sets ...string) (*file.Job, error) {
		return file.Parse(src, o.Path, append(slices.Clone(o.Sets), sets...), os.LookupEnv)
	}
	j, err := parse()
	if err != nil {
		return err
	}
	if o.Search && !j.IsModelJob() {
		return j.Errorf(status.InvalidArgument, "kind", "%q: all ranks share the one sequence, there is nothing to --search: leave it out", j.Kind)
	}
	x, err := SubjectOf(j)
	if err != nil {
		return err
	}
	ranks, m, err := o.machine(j, x)
	if err != nil {
		return err
	}
	defer m.close()
	if err := m.ready(); err != nil {
		return err
	}
	for _, line := range j.Warnings(x.config, nil, j.Train.Steps) {
		o.Warn(line)
	}
	if o.Search {
		return search(o.Stdout, parse, ranks, m, x)
	}
	if err := j.Resolve(ranks); err != nil {
		return err
	}
	f, err := Predict(j, m, x, true)
	if err != nil {
		return err
	}
	defer f.Close()
	if f.Model != nil {
		if i := findIdleRanks(j, f.Config, f.Model.Linear()); i != nil {
			o.Warn(i.warning(j, m, x))
		}
	}
	return f.print(o.Stdout, m)
}

// machine returns the machine of the plan and the number of ranks. The machine is the cluster's, or
// this one. The number of ranks comes from --ranks, the launcher or the cluster, otherwise from the
// job's degrees, on one node.
func (o *Options) machine(j *file.Job, x *subject) (ranks int, m *Machine, err error) {
	if o.Cluster != "" {
		c, err := file.ReadCluster(o.Cluster)
		if err != nil {
			return 0, nil, err
		}
		m, err = clusterMachine(c, j, x)
		return cmp.Or(o.Ranks, int(c.Nodes*c.PerNode)), m, err
	}
	env := slurm.Env()
	ranks = cmp.Or(o.Ranks, RanksOfReplica(j))
	here := ranks
	if o.Ranks == 0 && env.Tasks > 1 {
		ranks, here = env.Tasks, max(1, env.LocalSize)
	}
	m, err = thisMachine(j, x, here)
	return ranks, m, err
}

// RanksOfReplica returns the number of ranks of one replica, by the job's degrees.
func RanksOfReplica(j *file.Job) int {
	return int(min(file.MaxPlanned, max(1, j.Parallel.Ulysses)*j.Parallel.Ring))
}

func (f *Forecast) print(out io.Writer, m *Machine) error {
	what, err := f.printWork(out, m)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "phase\texpected s\tshare\t")
	busy := 0.0
	for _, s := range f.Phases {
		busy += s
	}
	for _, name := range slices.SortedFunc(maps.Keys(f.Phases), func(a, b string) int { return cmp.Or(cmp.Compare(f.Phases[b], f.Phases[a]), cmp.Compare(a, b)) }) {
		if name != "" {
			fmt.Fprintf(w, "%s\t%.4f\t%.1f %%\t\n", clock.Label(name), f.Phases[name], 100*f.Phases[name]/busy)
		}
	}
	fmt.Fprintf(w, "a %s\t%.4f\t\t\n\n", what, f.Seconds)
	fmt.Fprintf(w, "sent by a rank in a %s\tbytes\t\n", what)
	for _, of := range slices.SortedFunc(maps.Keys(f.Sent), func(a, b [2]string) int { return slices.Compare(a[:], b[:]) }) {
		fmt.Fprintf(w, "%s: %s\t%d\t\n", of[0], of[1], f.Sent[of])
	}
	fmt.Fprintf(w, "to ranks of its node\t%d\t\nto other nodes\t%d\t\n", f.Node, f.Network)
	if err := w.Flush(); err != nil {
		return err
	}
	rate := units.Short(float64(f.tokens) / f.Seconds)
	if f.Saved != nil {
		fmt.Fprintf(out, "\nspeed            %s tokens/s, beside reading and writing\n", rate)
	} else {
		flops := f.flops() / f.Seconds / float64(f.Job.Mesh.World)
		fmt.Fprintf(out, "\nspeed            %s tokens/s, %s causal model FLOP/s a rank, for sequences of one document\n", rate, units.Short(flops))
	}
	if f.Job.Kind == "train" && f.Job.Train.Epochs == 0 {
		all := time.Duration(f.Seconds * float64(f.Job.Train.Steps) * float64(time.Second))
		fmt.Fprintf(out, "run              %s of %d tokens in %v, beside reading, evaluations and checkpoints\n", units.Count(f.Job.Train.Steps, "step"), f.tokens, all.Round(time.Second))
	}
	_, err = fmt.Fprintf(out, "fits             %s of a rank's memory are planned%s\n", units.Bytes(model.Bytes(f.Memory)), f.limit())
	return err
}

// printWork prints ranks, machine and memory, and has a word for what takes the time.
func (f *Forecast) printWork(out io.Writer, m *Machine) (what string, err error) {
	x := f.Job.Mesh
	where := fmt.Sprintf("%d a node: %s\n\n", m.Rates.PerNode, m.text)
	switch f.Job.Kind {
	case "train":
		what = "step"
	case "eval":
		what = "pass"
	default:
		fmt.Fprintf(out, "%s, %s", units.Count(x.World, "rank"), where)
		return "run", f.printSaved(out)
	}
	fmt.Fprintf(out, "%s, ulysses %d x data %d, zero %d, %s", units.Count(x.World, "rank"), x.Ulysses, x.Replicas, f.Job.Parallel.Zero, where)
	return what, f.PrintMemory(out, f.trainer)
}

// flops is the model's arithmetic in the step, or pass, of all ranks; an evaluation is a third of
// training.
func (f *Forecast) flops() float64 {
	s := float64(f.Job.Data.Sequence)
	all := f.Config.Flops(f.tokens, float64(f.tokens)*s/2)
	if f.Job.Kind == "eval" {
		all /= 3
	}
	return all
}

// limit is what there is for a rank.
func (f *Forecast) limit() string {
	if n := f.Device.Info().Memory; n > 0 {
		return ", of " + units.Bytes(n)
	}
	if f.FreeHost > 0 {
		return ", and " + units.Bytes(f.FreeHost) + " of the host's are free for it"
	}
	return ""
}
