package plan

import (
	"cmp"
	"fmt"
	"math"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"

	"ulysses/device"
	"ulysses/dryrun"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/job/file"
	"ulysses/tensor"
	"ulysses/train"
)

// The choice of the mesh. The candidates are the meshes that the job allows, each with both forms
// of a ring. A formula estimates their times, and the best ones are dry-run. The choice is
// a function of the job, the ranks, the memory and a table of rates: rates that are measured would
// change it from run to run. Rank 0 chooses, because memory and devices may differ between ranks.

// nearlyBest is the time, relative to the shortest, up to which a candidate with a smaller ring, or
// without Gather, is preferred. The errors of a plan are not smaller.
const nearlyBest = 1.05

// Choice is a mesh for a job that leaves it open.
type Choice struct {
	Mesh    file.Mesh
	Seconds float64 // of a step; 0 = no mesh fits
	Text    string  // one line: the mesh and the reason
}

// meshOption is a candidate of the choice.
type meshOption struct {
	mesh file.Mesh

	estimate float64 // seconds of a step
	seconds  float64 // by the dry run; +Inf = it does not fit or is not possible
	why      error   // of +Inf
}

// LeavesMeshOpen reports whether Choose has something to choose for a job on some ranks. The gated
// delta rule of an operator job has no ring, and chooses its strategy itself.
func LeavesMeshOpen(j *file.Job, world int) bool {
	return j.Kind != "gdn" && world > 1 &&
		(j.Parallel.Ulysses == 0 || j.Parallel.Ring > 1 && j.Parallel.Gather == "auto")
}

// Choose returns the mesh for a job that leaves degrees, or the form of its ring, open. The
// sequences of a step do not change: replicas divide data.accumulate. If no mesh fits into memory,
// it returns the mesh with the job's degrees, or that of all ranks in one sequence, and the
// caller's checks name the reason. If the job is not possible on any mesh, or planning fails for
// another reason, it returns the error.
func Choose(j *file.Job, world int, m *Machine, x *subject) (*Choice, error) {
	options := meshOptions(j, int64(world), m, x)
	for i := range options {
		options[i].estimate = estimate(j, &options[i].mesh, m, x)
	}
	// Estimates within 3 % are alike: smaller rings come first, then more ranks for each sequence,
	// which need less memory.
	alike := func(o *meshOption) float64 { return math.Floor(math.Log(o.estimate) / math.Log(1.03)) }
	slices.SortStableFunc(options, func(a, b meshOption) int {
		return cmp.Or(cmp.Compare(alike(&a), alike(&b)), cmp.Compare(a.mesh.Ring, b.mesh.Ring),
			cmp.Compare(b.mesh.Ulysses, a.mesh.Ulysses))
	})
	tried, err := dryRun(j, options, m, x)
	if err != nil {
		return nil, err
	}
	best := math.Inf(1)
	for i := range tried {
		best = min(best, tried[i].seconds)
	}
	if math.IsInf(best, 1) {
		all, ring := int64(world), max(1, j.Parallel.Ring)
		ulysses := cmp.Or(j.Parallel.Ulysses, max(1, all/ring))
		whole := meshOption{mesh: file.Mesh{World: all, Ulysses: ulysses, Ring: ring,
			Replicas: max(1, all/ulysses/ring)}} // the product of two large degrees may overflow
		if !slices.ContainsFunc(tried, func(o meshOption) bool { return status.Of(o.why) == status.OutOfMemory }) {
			if err := whole.plan(j, m, x); err != nil {
				return nil, err
			}
			if whole.why != nil && status.Of(whole.why) != status.OutOfMemory {
				return nil, whole.why
			}
		}
		return &Choice{Mesh: whole.mesh,
			Text: fmt.Sprintf("mesh: %v: no mesh of %d ranks fits with parallel.zero = %d", whole.mesh, world,
				j.Parallel.Zero)}, nil
	}
	chosen := slices.MinFunc(tried, func(a, b meshOption) int {
		return cmp.Or(compareTrue(b.seconds <= nearlyBest*best, a.seconds <= nearlyBest*best),
			cmp.Compare(a.mesh.Ring, b.mesh.Ring), compareTrue(a.mesh.Gather, b.mesh.Gather),
			cmp.Compare(a.seconds, b.seconds),
			cmp.Compare(a.mesh.Replicas, b.mesh.Replicas))
	})
	text, err := reason(j, chosen, tried, m, x)
	if err != nil {
		return nil, err
	}
	return &Choice{chosen.mesh, chosen.seconds, text}, nil
}

// work returns the name of the work whose time is planned.
func (x *subject) work(j *file.Job) string {
	return map[string]string{"train": "step", "eval": "pass", "attention": "run", "gdn": "run"}[j.Kind]
}

// compareTrue orders false before true.
func compareTrue(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// meshes returns the meshes of some ranks with the job's ring, or with every ring that the machine
// runs, and with the forms of a ring that the job allows. parallel.ulysses does not matter.
func meshes(j *file.Job, world int64, m *Machine, x *subject) (all []file.Mesh) {
	rings, given := ringRuns(m, x), j.Parallel.Ring > 0
	for u := int64(1); u <= world; u++ {
		if world%u != 0 {
			continue
		}
		for r := int64(1); u*r <= world; r++ {
			if world/u%r != 0 || given && r != j.Parallel.Ring {
				continue
			}
			if r > 1 && !given && (!rings || 2*u*r > x.tokens(j)) {
				continue // a rank has less than a token in each chunk of a zigzag
			}
			mesh := file.Mesh{World: world, Ulysses: u, Ring: r, Replicas: world / (u * r)}
			for _, mesh.Gather = range ringForms(j, r) {
				all = append(all, mesh)
			}
		}
	}
	return all
}

// meshOptions returns the meshes that a job allows on some ranks.
func meshOptions(j *file.Job, world int64, m *Machine, x *subject) (all []meshOption) {
	open := j.Parallel.Ulysses == 0
	for _, mesh := range meshes(j, world, m, x) {
		switch {
		case !open && mesh.Ulysses != j.Parallel.Ulysses:
		case !j.IsModelJob() && mesh.Replicas > 1: // one sequence
		case open && j.Kind == "eval" && mesh.Replicas > 1: // the sequences to evaluate may be few
		case open && j.Kind == "train" && j.SequencesOfStep()%(mesh.Replicas*j.Data.Batch) != 0:
		default:
			all = append(all, meshOption{mesh: mesh})
		}
	}
	return all
}

// ringForms returns the forms of a ring of r groups that a job allows, as values of Mesh.Gather.
func ringForms(j *file.Job, r int64) []bool {
	switch g := j.Parallel.Gather; {
	case g != "auto":
		return []bool{g == "on" && r > 1}
	case r > 2:
		return []bool{false, true}
	}
	return []bool{false} // two groups send the same in both forms
}

// ringRuns reports whether a device has the kernels of a ring for a subject's attention: those that
// continue a softmax.
func ringRuns(m *Machine, x *subject) bool {
	d, ok := m.Sizes.(device.AttentionKernels)
	if !ok || x.attention.Heads == 0 {
		return x.attention.Heads > 0
	}
	layer := x.attention
	layer.DType, layer.Ring = m.Info.Compute[0], 2
	_, _, err := layer.Kernels(d, m.Info.Place)
	return err == nil
}

// load is the work of a micro-batch on one replica, which an estimate divides among ranks.
type load struct {
	layers   float64 // of attention
	tokens   float64
	pairs    float64 // of a query and a key that it sees
	products float64 // FLOPs of matrix products in the forward pass
	weights  float64 // of ZeRO stage 3; elements that are gathered in a pass
	backward bool

	documents float64 // of a sequence
	times     float64 // micro-batches of all replicas in a step
}

// load returns the work of a job.
func (x *subject) load(j *file.Job) load {
	c, d := x.config, &j.Data
	if c == nil {
		q, k := float64(x.Lengths[0]), float64(x.Lengths[len(x.Lengths)-1])
		w := load{layers: 1, tokens: q, pairs: q * k, backward: !x.attention.NoBackward, times: 1, documents: 1}
		if x.attention.Causal {
			w.pairs /= 2
		}
		return w
	}
	w := load{layers: float64(c.NumHiddenLayers - c.LinearLayers()), tokens: float64(d.Sequence * d.Batch),
		pairs: float64(d.Batch) * pairs(j, c), products: c.Flops(d.Sequence*d.Batch, 0) / 3,
		backward: j.Kind == "train", times: 1,
		documents: float64(j.Documents())}
	if w.backward {
		w.times = float64(j.SequencesOfStep()) / float64(d.Batch)
	}
	if w.backward && j.Parallel.Zero == 3 {
		w.weights = c.Flops(1, 0) / 6
	}
	return w
}

// estimate returns about the time of a step: matrix products, attention, the all-to-alls between
// tokens and heads, the keys that a ring sends while attention computes, and gathered weights. The
// dry run has the rest, such as recomputation.
func estimate(j *file.Job, mesh *file.Mesh, m *Machine, x *subject) float64 {
	w, l, r := x.load(j), &x.attention, &m.Rates
	u, ring, ranks, perNode := float64(mesh.Ulysses), float64(mesh.Ring), float64(mesh.Ulysses*mesh.Ring),
		float64(r.PerNode)
	bytes := 2.0 // of an element
	if m.Info.Place == tensor.Host {
		bytes = 4
	}
	// the time of bytes to n consecutive ranks, or groups of near ranks
	sent := func(bytes, n, near float64) float64 {
		far := max(0, n-max(1, near)) / n
		return max(bytes*far/r.Network, bytes*((n-1)/n-far)/r.Node)
	}
	latency := r.Latency * math.Log2(2*ranks)
	attention, back, exchange, link := 0.0, 0.0, 0.0, 0.0 // link: seconds in which keys and weights occupy it
	if l.Heads > 0 {
		width, heads := float64(l.Dim+l.VDim), float64((l.Heads+mesh.Ulysses-1)/mesh.Ulysses)
		keys := math.Ceil(heads * float64(l.KVHeads) / float64(l.Heads))
		attention = w.pairs * 2 * heads * width / ring / r.Attention
		back = 2.5 * attention * r.Attention / r.Gradient
		if u > 1 {
			exchange = sent(w.tokens/ranks*width*(float64(l.Heads)+u*keys)*bytes, u, perNode) + 2*latency
		}
		if ring > 1 {
			// elements of all groups; only documents that cross the end of a chunk are sent
			key := w.tokens * keys * width * min(1, 2*ring/w.documents)
			keys, grads := sent(key*bytes, ring, perNode/u), sent(key*(bytes+4), ring, perNode/u)
			attention, back = inRing(mesh, attention, keys, latency), inRing(mesh, back, grads, 2*latency)
			link = w.layers * (keys + grads)
		}
	}
	products := w.products / ranks / r.Products
	if !w.backward {
		return w.layers*(attention+exchange) + products
	}
	micro := w.layers*(attention+back+2*exchange) + 3*products
	if w.weights > 0 {
		moved := w.weights * (2*bytes + 4)
		link += max(sent(moved/min(perNode, float64(mesh.World)), float64(mesh.World), perNode), moved/r.Node)
	}
	return max(micro, link+2*w.layers*exchange) * w.times / float64(mesh.Replicas)
}

// inRing returns the time of attention in a ring, where keys are sent while it computes. With
// Gather, only attention of the group's own keys overlaps with the one all-to-all.
func inRing(mesh *file.Mesh, attention, keys, latency float64) float64 {
	n := float64(mesh.Ring)
	if mesh.Gather {
		return max(attention/n, keys+latency) + attention*(1-1/n)
	}
	return max(attention, keys, (n-1)*latency)
}

// dryRun dry-runs the options with the shortest estimates, until the next estimate is worse than
// the best time by more than the error of estimates. They are run in groups of fixed size, so the
// choice does not depend on the number of cores.
func dryRun(j *file.Job, options []meshOption, m *Machine, x *subject) (tried []meshOption, err error) {
	const group, slack, most = 4, 1.1, 12
	shared, best := *m, math.Inf(1)
	shared.Sizes = &lockedSizes{sizes: m.Sizes}
	for at := 0; at < len(options); at += group {
		if options[at].estimate > slack*best || at >= most && !math.IsInf(best, 1) {
			break
		}
		next := options[at:min(at+group, len(options))]
		errs := make([]error, len(next))
		var wait sync.WaitGroup
		slots := make(chan struct{}, runtime.GOMAXPROCS(0))
		for i := range next {
			wait.Go(func() {
				slots <- struct{}{}
				defer func() { <-slots }()
				errs[i] = next[i].plan(j, &shared, x)
			})
		}
		wait.Wait()
		if err := cmp.Or(errs...); err != nil {
			return nil, err
		}
		for i := range next {
			best = min(best, next[i].seconds)
		}
		tried = options[:at+len(next)]
	}
	return tried, nil
}

// plan sets the time of a step by the dry run, or why the job does not fit or is not possible on
// the mesh. It returns any other error.
func (o *meshOption) plan(j *file.Job, m *Machine, x *subject) (err error) {
	defer func() {
		if p := recover(); p != nil { // it may be on a goroutine, whose caller cannot recover it
			err = panicked(p)
		}
	}()
	other := *j
	other.Choose(o.mesh)
	var f *Forecast
	if err = other.Resolve(int(o.mesh.World)); err == nil {
		f, err = Predict(&other, m, x, true)
	}
	if err == nil {
		defer f.Close()
		o.seconds = f.Seconds
		return nil
	}
	if !isMisfit(err) {
		return err
	}
	o.seconds, o.why = math.Inf(1), err
	return nil
}

// isMisfit reports whether the error of a plan may be of its mesh alone. Any other error, such as
// one of the device, is of every mesh.
func isMisfit(err error) bool {
	return slices.Contains([]status.Code{status.OutOfMemory, status.InvalidConfig, status.Unsupported}, status.Of(err))
}

// panicked returns the error of a panic in a plan.
func panicked(p any) error {
	return status.Errorf(status.Internal, "panic: %v\n%s", p, debug.Stack())
}

// idleHeads returns how many ranks of a mesh have no head of softmax attention.
func (x *subject) idleHeads(mesh *file.Mesh) int64 {
	if x.attention.Heads == 0 {
		return 0
	}
	return max(0, mesh.Ulysses-x.attention.Heads) * mesh.Ring * mesh.Replicas
}

// tokens returns the length of a sequence; of queries and keys with different lengths, the smaller.
func (x *subject) tokens(j *file.Job) int64 {
	if x.config != nil {
		return j.Data.Sequence
	}
	return slices.Min(x.Lengths)
}

// reason returns the line that explains a choice: the numbers that decide, and a comparison with
// all ranks in one sequence by heads, or with the best other mesh.
func reason(j *file.Job, chosen meshOption, tried []meshOption, m *Machine, x *subject) (string, error) {
	mesh := chosen.mesh
	text := fmt.Sprintf("mesh: %v: %d ranks, %d a node, %s", mesh, mesh.World, m.Rates.PerNode,
		units.Count(x.Heads[0][0], "query head"))
	if j.Kind == "train" {
		text += ", " + units.Count(j.SequencesOfStep(), "sequence") + " a step"
	}
	text += fmt.Sprintf(" of %s tokens", units.Grouped(x.tokens(j)))
	if n := j.Documents(); n > 1 && x.config != nil {
		text += fmt.Sprintf(" in %d documents (data.document)", n)
	}
	if mesh.Gather {
		text += "; keys are sent at once"
	}
	if !m.nominal {
		text += fmt.Sprintf("; expected %.3g s a %s", chosen.seconds, x.work(j))
	}
	other := meshOption{mesh: file.Mesh{World: mesh.World, Ulysses: mesh.World, Ring: 1, Replicas: 1},
		seconds: math.Inf(1)}
	known := false
	for _, o := range tried {
		if o.mesh == other.mesh {
			other, known = o, true
		}
	}
	switch {
	case j.Parallel.Ulysses > 0 || j.Parallel.Ring > 1:
		return text, nil
	case other.mesh == mesh:
		others := slices.DeleteFunc(slices.Clone(tried), func(o meshOption) bool {
			return o.mesh == mesh || math.IsInf(o.seconds, 1)
		})
		if len(others) == 0 {
			return text + "; no other mesh is possible", nil
		}
		other = slices.MinFunc(others, func(a, b meshOption) int { return cmp.Compare(a.seconds, b.seconds) })
	case !known:
		if err := other.plan(j, m, x); err != nil {
			return "", err
		}
	}
	name := other.mesh.String()
	if other.mesh.Ulysses == mesh.World {
		name = fmt.Sprintf("ulysses %d", mesh.World)
	}
	text += versus(name, other.seconds, chosen.seconds, m.nominal)
	if idle := x.idleHeads(&other.mesh); idle > 0 && !math.IsInf(other.seconds, 1) {
		text += fmt.Sprintf(" with %d ranks idle", idle)
	}
	return text, nil
}

// versus compares the time of another mesh with the time of the chosen one, which may be a little
// longer (nearlyBest). Of nominal rates only ratios have a meaning.
func versus(other string, seconds, chosen float64, nominal bool) (text string) {
	switch {
	case math.IsInf(seconds, 1):
		return fmt.Sprintf("; %s does not fit", other)
	case nominal:
		text = fmt.Sprintf("; %s would take %.2f times as long", other, seconds/chosen)
	default:
		text = fmt.Sprintf(", %s would take %.3g s", other, seconds)
	}
	if seconds < chosen {
		text += ", within the error of a plan"
	}
	return text
}

// nominalCPU has typical rates of a thread, and of links of 10 Gb/s. Only ratios matter for the
// choice of a mesh.
var nominalCPU = dryrun.Rates{Products: 60e9, Attention: 25e9, Gradient: 20e9, Delta: 10e9, Stencil: 2e9, Memory: 8e9,
	Copies: 8e9, Node: 4e9, Network: 1e9, Launch: 2e-6, Latency: 10e-6, Message: 5e-6}

// TypicalLinks are the links by which a run and a plan choose the levels of all-to-alls on CPUs.
var TypicalLinks = nominalCPU.Links()

// ForChoice returns the machine with the rates by which a mesh is chosen, which are the same in a
// plan and in a run: the published ones of a GPU (unknown GPUs: an H100's), and typical ones of a
// CPU. The rates of a --cluster file replace them.
func (m *Machine) ForChoice(perNode int) *Machine {
	o := *m
	switch {
	case m.Info.Place == tensor.Host:
		o.nominal, o.Rates = true, nominalCPU
		_, o.Share = sharedBy(perNode, m.Info.Workers)
		for _, rate := range []*float64{&o.Rates.Products, &o.Rates.Attention, &o.Rates.Gradient, &o.Rates.Delta,
			&o.Rates.Stencil} {
			*rate *= float64(max(1, m.Info.Workers))
		}
		o.Rates = o.Rates.Shared(o.Share)
	case m.Rates.Check() != nil:
		host := o.Rates.Host
		o.Rates, o.nominal = gpuByName["h100"].rates[tensor.BF16], true
		o.Rates.Host = host
	}
	o.Rates.PerNode = max(1, perNode)
	if m.cluster != nil {
		applyRates(m.cluster, &o)
	}
	return &o
}

// StepRates returns the rates by which a run chooses where the step of an offloaded optimizer runs.
// An unknown GPU has the rates of an H100.
func StepRates(j *file.Job, d device.Device, compute tensor.DType, perNode int) train.StepRates {
	m := &Machine{Info: d.Info()}
	if m.Info.Place == tensor.Host {
		return train.StepRates{}
	}
	m.recognize(j, compute, perNode)
	return m.ForChoice(perNode).stepRates()
}

// ChooseHere is Choose for this rank's device in a run. It returns nil for a faulty configuration,
// which the checks of the run report.
func ChooseHere(j *file.Job, world int, d device.Device, compute tensor.DType, perNode int,
	freeHost int64) (*Choice, error) {
	x, err := SubjectOf(j)
	if err != nil {
		return nil, nil
	}
	m := &Machine{Info: d.Info(), Sizes: d, Host: freeHost, close: func() {}}
	if m.Info.Place != tensor.Host {
		m.recognize(j, compute, perNode)
	}
	return Choose(j, world, m.ForChoice(perNode), x)
}
