// Package plan predicts the memory, the bytes sent and the time of a job. It runs the job's code on
// the device of package dryrun, which computes nothing and adds up the cost of each operation.
//
// A Machine has the rates of a rank's device and links: measured on this machine, published for a
// GPU, or read from a --cluster file. Predict plans one job on a Machine and returns a Forecast.
// Run is the verb plan. Rank measures the machine of a run and plans one step for comparison.
package plan

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"text/tabwriter"

	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/job/assembly"
	"ulysses/job/file"
	"ulysses/model"
	"ulysses/slurm"
	"ulysses/tensor"
)

// Options are the arguments of the verb plan.
type Options struct {
	Path    string   // of the job file
	Sets    []string // table.key=value
	Ranks   int      // 0 = as many as the launcher, the cluster or the job has
	Search  bool     // plan every mesh
	Cluster string   // path of a --cluster file; "" = this machine
	Stdout  io.Writer
	Warn    func(text string)
}

// Run prints the predicted memory of a rank by component, the bytes sent, the time of a step or of
// the passes, and whether the job fits. It executes nothing.
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
		return j.Errorf(status.InvalidArgument, "kind",
			"%q: all ranks share one sequence, so there is no mesh to search; leave out --search", j.Kind)
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
	steps := j.Train.Steps
	if j.Train.Epochs > 0 { // the data decides
		steps = 0
	}
	for _, line := range j.Warnings(x.config, nil, steps, m.Info.Place == tensor.Host) {
		o.Warn(line)
	}
	if o.Search {
		return search(o.Stdout, parse, ranks, m, x)
	}
	if LeavesMeshOpen(j, ranks) {
		choice, err := Choose(j, ranks, m.ForChoice(m.Rates.PerNode), x)
		if err != nil {
			return err
		}
		j.Choose(choice.Mesh)
		if _, err := fmt.Fprintln(o.Stdout, choice.Text); err != nil {
			return err
		}
	}
	if err := j.Resolve(ranks); err != nil {
		return err
	}
	f, err := Predict(j, m, x, true)
	if status.Of(err) == status.OutOfMemory && j.IsModelJob() {
		return status.Errorf(status.OutOfMemory, "%w; --search lists the meshes and ZeRO stages that fit", err)
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if i := findIdleRanks(j, f.sharedHeads(x)); i != nil {
		o.Warn(i.warning(j, m, x))
	}
	return f.print(o.Stdout, m)
}

// machine returns the number of ranks and the machine of the plan: the cluster's, or this one. The
// number of ranks comes from --ranks, the launcher or the cluster, otherwise from the job's
// degrees, on one node.
func (o *Options) machine(j *file.Job, x *subject) (ranks int, m *Machine, err error) {
	if o.Cluster != "" {
		c, err := file.ReadCluster(o.Cluster)
		if err != nil {
			return 0, nil, err
		}
		ranks = cmp.Or(o.Ranks, int(c.Nodes*c.PerNode))
		c.PerNode = min(c.PerNode, int64(ranks)) // which share the memory of the node
		m, err = clusterMachine(c, j, x)
		return ranks, m, err
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

// RanksOfReplica returns the number of ranks of one replica, by the job's degrees; at most
// MaxPlanned.
func RanksOfReplica(j *file.Job) int {
	// each is limited before, because the product of two large degrees may overflow
	return int(min(file.MaxPlanned,
		min(file.MaxPlanned, max(1, j.Parallel.Ulysses))*min(file.MaxPlanned, max(1, j.Parallel.Ring))))
}

// print prints the tables of the verb plan.
func (f *Forecast) print(out io.Writer, m *Machine) error {
	work, err := f.printWork(out, m)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "phase\texpected s\tshare\t")
	busy := 0.0
	for _, s := range f.Phases {
		busy += s
	}
	for _, name := range slices.SortedFunc(maps.Keys(f.Phases), func(a, b string) int {
		return cmp.Or(cmp.Compare(f.Phases[b], f.Phases[a]), cmp.Compare(a, b))
	}) {
		if f.Phases[name] > 0 || name != "" {
			fmt.Fprintf(w, "%s\t%.4f\t%.1f %%\t\n", cmp.Or(clock.Label(name), "other"), f.Phases[name],
				100*f.Phases[name]/busy)
		}
	}
	fmt.Fprintf(w, "a %s\t%.4f\t\t\n\n", work, f.Seconds)
	fmt.Fprintf(w, "sent by a rank in a %s\tbytes\t\n", work)
	for _, key := range slices.SortedFunc(maps.Keys(f.Sent), func(a, b [2]string) int {
		return slices.Compare(a[:], b[:])
	}) {
		fmt.Fprintf(w, "%s: %s\t%d\t\n", key[0], key[1], f.Sent[key])
	}
	fmt.Fprintf(w, "to ranks of its node\t%d\t\nto other nodes\t%d\t\n", f.Node, f.Network)
	if err := w.Flush(); err != nil {
		return err
	}
	f.printRing(out)
	levels := f.Levels
	if f.Operator != nil {
		levels = f.Operator.Levels
	}
	if levels != "" {
		fmt.Fprintf(out, "\nlevels           %s\n", levels)
	}
	rate := units.Short(float64(f.tokens) / f.Seconds)
	if f.Operator != nil {
		fmt.Fprintf(out, "\nspeed            %s tokens/s, without reading and writing\n", rate)
	} else {
		flops := f.flops() / f.Seconds / float64(f.Job.Mesh.World)
		fmt.Fprintf(out, "\nspeed            %s tokens/s, %s causal model FLOP/s a rank, for sequences of %s\n", rate,
			units.Short(flops), units.Count(f.Job.Documents(), "document"))
	}
	if f.Job.Kind == "train" && f.Job.Train.Epochs == 0 {
		fmt.Fprintf(out, "run              %s of %d tokens in %v, without reading data, evaluations and checkpoints\n",
			units.Count(f.Job.Train.Steps, "step"), f.tokens, units.Duration(f.Seconds*float64(f.Job.Train.Steps)))
	}
	_, err = fmt.Fprintf(out, "fits             %s of a rank's memory are planned%s\n",
		units.Bytes(model.Bytes(f.Memory)), f.limit())
	return err
}

// printRing prints the form of a ring of a model, and the formula of what it sends.
func (f *Forecast) printRing(out io.Writer) {
	x := f.Job.Mesh
	if x.Ring == 1 || f.Model == nil {
		return
	}
	form := "the keys of one group are sent while attention with the previous keys computes"
	if x.Gather {
		form = "the keys of all groups are sent at once"
	}
	c, tokens := f.Config, f.Job.Data.Batch*f.Job.Data.Sequence
	most := int64(0) // key heads of a rank
	for rank := range x.Ulysses {
		_, keys := headsOf([2]int64{c.NumAttentionHeads, c.NumKeyValueHeads}, x.Ulysses, rank)
		most = max(most, keys)
	}
	others := tokens - tokens/x.Ring // of the other groups
	elements := others * most * (c.HeadDim + c.ValueDim())
	fmt.Fprintf(out, "\nring             %d groups of %d ranks; %s\n", x.Ring, x.Ulysses, form)
	fmt.Fprintf(out, "                 for each layer a rank receives at most %d tokens x %d/%d x %s x (%d + %d) = %d elements\n",
		tokens, x.Ring-1, x.Ring, units.Count(most, "key head"), c.HeadDim, c.ValueDim(), elements)
	fmt.Fprintf(out, "                 in forward and again in backward, and returns as many gradients in F32\n")
}

// printWork prints ranks, machine and memory. It returns the name of the work whose time is
// planned: step, pass or run.
func (f *Forecast) printWork(out io.Writer, m *Machine) (work string, err error) {
	x := f.Job.Mesh
	where := fmt.Sprintf("%d a node: %s\n\n", m.Rates.PerNode, m.text)
	switch f.Job.Kind {
	case "train":
		work = "step"
	case "eval":
		work = "pass"
	default:
		fmt.Fprintf(out, "%s, %s", units.Count(x.World, "rank"), where)
		return "run", f.printOperator(out)
	}
	fmt.Fprintf(out, "%s, %v, zero %d, %s", units.Count(x.World, "rank"), x, f.Job.Parallel.Zero, where)
	return work, f.PrintMemory(out, f.trainer, assembly.RankPlan{Rank: "a rank", Components: f.trainer.Components()})
}

// flops returns the model FLOPs of a step, or of a pass, on all ranks. An evaluation has a third of
// the FLOPs of training.
func (f *Forecast) flops() float64 {
	all := f.Model.Flops(f.tokens, float64(f.tokens)/float64(f.Job.Data.Sequence)*pairs(f.Job, f.Config))
	if f.Job.Kind == "eval" {
		all /= 3
	}
	return all
}

// pairs returns the pairs of a query and a key that it sees in a sequence of the job's documents.
func pairs(j *file.Job, c *model.Config) (sum float64) {
	s, n := j.Data.Sequence, j.Documents()
	longer := s % n // documents that have one token more than the others
	return float64(longer)*c.Pairs(s/n+1) + float64(n-longer)*c.Pairs(s/n)
}

// limit describes the memory that is available for a rank.
func (f *Forecast) limit() string {
	if n := f.Device.Info().Memory; n > 0 {
		return ", of " + units.Bytes(n)
	}
	if f.FreeHost > 0 {
		return ", and " + units.Bytes(f.FreeHost) + " of host memory are free"
	}
	return ""
}
