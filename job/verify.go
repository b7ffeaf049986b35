package job

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/splitmix"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/job/file"
	"ulysses/tensor"
	"ulysses/train"
)

// verifyLimits has the largest max|Δ|/max|ref| that different orders of summation may cause, by the
// type of activations. In BF16, a slightly different sum may be rounded in the other direction, by
// 2^-8, and the following results change with it.
var verifyLimits = map[tensor.DType]float64{tensor.F32: 2e-5, tensor.BF16: 2e-2}

// Verify runs the job on all ranks and on one rank and compares the results tensor by tensor: the
// outputs and gradients of an operator job; the loss, the gradients and the updated weights of the
// first step of a training job. A difference beyond verifyLimits that rounding does not explain
// (allowRounding) is an error with the code Numeric.
func Verify(o Options) error {
	o.verb = "verify"
	return onRanks(o, func(e *Env) error {
		compute := func(e *Env) ([]named, error) { return trainTensors(e, o.tensors != "") }
		if !e.Job.IsModelJob() {
			compute = operatorTensors
		}
		if err := comm.Agree(e.Mesh.World, o.checkTensorsFile(e.Mesh.World.Rank())); err != nil {
			return err
		}
		all, err := compute(e)
		if err != nil {
			return err
		}
		if e.Mesh.World.Rank() == 0 {
			if err = writeNamed(o.tensors, all); err == nil {
				err = verifyAgainstOne(e, all, compute, &o)
			}
		}
		// e.world is not watched: the other ranks wait until rank 0 has finished
		return comm.Agree(e.world, err)
	})
}

// named is a tensor of a run in host memory. Only judged tensors count for the verdict.
type named struct {
	name   string
	shape  []int64
	data   []float32
	judged bool
	whole  bool // the values are whole numbers
	kind   tensorKind
	param  string // the parameter of a gradient or of updated weights
}

// tensorKind tells gradients and updated weights from other tensors.
type tensorKind int

const (
	isOther tensorKind = iota
	isGradient
	isUpdated
)

// scalar returns a judged number.
func scalar(name string, x float64) named {
	return named{name: name, data: []float32{float32(x)}, judged: true}
}

// verifyAgainstOne computes the job on rank 0 alone and prints the comparison with all.
func verifyAgainstOne(e *Env, all []named, compute func(*Env) ([]named, error), o *Options) error {
	alone, err := e.onOneRank()
	if err != nil {
		return err
	}
	one, err := compute(alone)
	if err != nil {
		return err
	}
	r := &verdict{Ranks: e.Mesh.World.Size(), Ulysses: e.Mesh.Ulysses, Ring: e.Mesh.Ring,
		Experts: int(e.Job.Parallel.Experts), Data: e.Mesh.Replicas, DType: file.DTypeName(e.Compute),
		Kernels: e.Device.Info().Kernels, Limit: verifyLimits[e.Compute], Tensors: []compared{}}
	if err := r.compareAll(all, one); err != nil {
		return err
	}
	if _, far := r.judge(); far > 0 && e.Job.Kind == "train" && e.Compute == tensor.F32 {
		if alone, err = e.onOneRank(); err != nil {
			return err
		}
		alone.nudged = true
		changed, err := compute(alone)
		if err != nil {
			return err
		}
		if err := r.allowRounding(changed, one); err != nil {
			return err
		}
	}
	switch {
	case o.json:
		err = r.printJSON(e.Result)
	case o.Quiet:
		_, err = fmt.Fprintln(e.Result, r.sentence())
	default:
		err = r.print(e.Result, o.all || o.Verbose)
	}
	if judged, far := r.judge(); err == nil && far > 0 {
		err = status.Errorf(status.Numeric,
			"verify: %d of %s differ by more than %g of the largest element; run ulysses-mpi doctor on every host, and compare",
			far, units.Count(judged, "tensor"), r.Limit)
	}
	return err
}

// zeroGradient is the largest share of the model's largest gradient that counts as zero: half a
// unit in the last place of F32. The gradient of a bias of keys without RoPE, for example, or of a
// router with one expert per token, is zero by definition. Its values are then rounding errors,
// which depend on the order of sums.
const zeroGradient = 0x1p-24

// keyBias is the end of the names of biases of keys. Their gradients are sums over tokens that
// cancel, because a vector that is added to all keys changes attention only by RoPE. In BF16 the
// terms are rounded, so a sum may be off by its own size. Therefore the bias is measured in BF16 by
// the largest value of its matrix (weight), whose gradient is a sum of the same terms times inputs.
const keyBias = "k_proj.bias"

// compareAll compares each tensor of a run with the tensor of the run on one rank. A gradient
// counts as zero if it has at most zeroGradient of the model's largest gradient in both runs. So do
// the updated weights of such a gradient if they have at most this share of the largest weight:
// they began at zero.
func (r *verdict) compareAll(all, one []named) error {
	zeros := map[string]bool{} // parameters whose gradients are zero
	most := [2]map[tensorKind]float64{largestOfKinds(all), largestOfKinds(one)}
	// the largest values of the matrices of keys, by the names of their biases
	matrices := map[tensorKind]map[string]float64{isGradient: {}, isUpdated: {}}
	for _, x := range one {
		if path, ok := strings.CutSuffix(x.param, "k_proj.weight"); ok && r.DType == "bf16" {
			matrices[x.kind][path+keyBias] = maxAbs(x.data)
		}
	}
	for i, a := range all {
		d, err := compare(a, one[i])
		if err != nil {
			return err
		}
		if top := matrices[a.kind][a.param]; top > 0 && !math.IsInf(top, 0) {
			d.relative = min(d.relative, d.max/top)
		}
		zero := a.kind == isGradient || a.kind == isUpdated && zeros[a.param]
		for run, x := range [2]named{a, one[i]} {
			bound := zeroGradient * most[run][x.kind]
			zero = zero && !math.IsInf(bound, 0) && maxAbs(x.data) <= bound
		}
		if a.kind == isGradient {
			zeros[a.param] = zero
		}
		r.Tensors = append(r.Tensors,
			compared{Name: a.name, Shape: append([]int64{}, a.shape...), Max: quantity(d.max), Mean: quantity(d.mean),
				Relative: quantity(d.relative), Bits: d.equal, Judged: a.judged, Zero: zero, Within: zero ||
					d.relative <= r.Limit})
	}
	return nil
}

// A tensor beyond the limit is within tolerance if it differs by at most roundings times as much as
// a change of all weights in their last bit changes it on one rank, and by at most mostRounding. In
// a trained model of many layers, rounding alone may change gradients of norms by more than the
// limit.
const (
	roundings    = 2
	mostRounding = 1e-3
)

// A gradient that a change of the weights in their last bit changes by noise of itself or more
// consists of rounding errors. It is zero by definition, also if a long sum or a small model makes
// it larger than zeroGradient, up to mostNoise of the model's largest gradient.
const (
	noise     = 0.5
	mostNoise = 0x1p-20
)

// allowRounding judges the tensors beyond the limit again. changed is the run on one rank with
// weights that were changed in their last bit.
func (r *verdict) allowRounding(changed, one []named) error {
	zeros, most := map[string]bool{}, largestOfKinds(one)
	for i, ref := range one {
		x := &r.Tensors[i]
		if !x.Judged || x.Within {
			continue
		}
		d, err := compare(changed[i], ref)
		if err != nil {
			return err
		}
		x.Rounding = quantity(d.relative)
		x.Within = float64(x.Relative) <= min(roundings*d.relative, mostRounding)
		if bound := mostNoise * most[ref.kind]; !math.IsInf(bound, 0) && maxAbs(ref.data)+float64(x.Max) <= bound {
			x.Zero = ref.kind == isGradient && d.relative >= noise || ref.kind == isUpdated && zeros[ref.param]
		}
		zeros[ref.param] = zeros[ref.param] || x.Zero
		x.Within = x.Within || x.Zero
	}
	return nil
}

// largestOfKinds returns the largest absolute value of the tensors of each kind.
func largestOfKinds(tensors []named) map[tensorKind]float64 {
	most := map[tensorKind]float64{}
	for _, x := range tensors {
		most[x.kind] = max(most[x.kind], maxAbs(x.data))
	}
	return most
}

// maxAbs returns the largest absolute value; +Inf if there is a NaN.
func maxAbs(x []float32) (top float64) {
	for _, v := range x {
		if v != v {
			return math.Inf(1)
		}
		top = max(top, math.Abs(float64(v)))
	}
	return top
}

// difference is the result of compare.
type difference struct {
	max, mean, relative float64
	equal               bool
}

// compare returns max|Δ|, mean|Δ| and max|Δ|/max|ref|. Two values of -Inf (the LSE of a query
// without keys) are equal; a NaN gives an infinite difference.
func compare(a, ref named) (difference, error) {
	if a.name != ref.name || len(a.data) != len(ref.data) {
		return difference{}, status.Errorf(status.Internal, "verify: %s has %d elements, on one rank %s has %d", a.name,
			len(a.data), ref.name, len(ref.data))
	}
	d, top := difference{equal: true}, 0.0
	for i, x := range a.data {
		y := ref.data[i]
		if math.Float32bits(x) == math.Float32bits(y) {
			if !math.IsInf(float64(y), 0) && y == y {
				top = max(top, math.Abs(float64(y)))
			}
			continue
		}
		d.equal = false
		delta := math.Abs(float64(x) - float64(y))
		if math.IsNaN(delta) {
			delta = math.Inf(1)
		}
		d.max = max(d.max, delta)
		d.mean += delta / float64(len(a.data))
		top = max(top, math.Abs(float64(y)))
	}
	if d.max > 0 {
		d.relative = d.max / max(top, math.SmallestNonzeroFloat32)
	}
	return d, nil
}

// warnOfNoTargets warns that the losses of a verify are 0: then equal tensors prove nothing.
func (e *Env) warnOfNoTargets(of string) {
	e.Log.Warn().Msg("verify: no token of " + of + " is a target (" + notTargets +
		"), so losses and gradients are 0 on any number of ranks, and the comparison has no meaning; use longer documents, or labels")
}

// trainTensors returns the loss, the gradients and the updated weights of the first step, or the
// losses of an evaluation. With tokens it also returns the logits and the loss of each token of the
// step. Collective.
func trainTensors(e *Env, tokens bool) (out []named, err error) {
	s, err := prepare(e, false)
	if err != nil {
		return nil, err
	}
	defer s.close()
	defer func() { err = e.leave(err) }()
	err = s.inStep(func() (err error) { out, err = s.tensorsOfJob(tokens); return err })
	return out, err
}

// tensorsOfJob is trainTensors after prepare.
func (s *session) tensorsOfJob(tokens bool) (out []named, err error) {
	if s.Job.Kind == "eval" {
		return s.evalTensors()
	}
	if s.nudged {
		if err := s.nudge(); err != nil {
			return nil, err
		}
	}
	if out, err = s.stepTensors(tokens); err != nil {
		return nil, err
	}
	stream, err := s.Device.NewStream()
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	for _, grads := range []bool{true, false} { // gathering weights overwrites the gradients
		values, err := s.paramTensors(grads, stream)
		if err != nil {
			return nil, err
		}
		for _, g := range s.parts.Model.Groups() { // in an order that does not depend on the ranks
			for _, p := range g.Params {
				if x, ok := values[p.Name]; ok {
					out = append(out, x)
				}
			}
		}
	}
	return out, nil
}

// evalTensors returns the losses of an evaluation. Collective.
func (s *session) evalTensors() ([]named, error) {
	r, err := s.trainer.Evaluate(train.EvaluationStep)
	if err != nil {
		return nil, err
	}
	if r.EvalTokens == 0 {
		s.warnOfNoTargets("the evaluation's files")
	}
	out := []named{scalar("eval_loss", float64(r.EvalLoss))}
	for _, set := range r.Sets {
		out = append(out, scalar("eval_"+set.Name+"_loss", float64(set.Loss)))
	}
	return out, nil
}

// stepTensors runs the first step and returns its losses and the norm of its gradients, and with
// tokens what tokenTensors returns. Collective.
func (s *session) stepTensors(tokens bool) ([]named, error) {
	var own []train.TokenResult
	if tokens {
		s.trainer.Hooks.Logits = true
		s.trainer.Hooks.Tokens = func(results []train.TokenResult) error { own = append(own, results...); return nil }
	}
	r, err := s.trainer.Step(0)
	if err != nil {
		return nil, err
	}
	if r.TargetTokens == 0 {
		s.warnOfNoTargets("the first step")
	}
	out := []named{scalar("loss", float64(r.Loss)), scalar("gradient norm", float64(r.GradNorm))}
	if r.AuxLoss != nil {
		out = append(out, scalar("aux_loss", float64(*r.AuxLoss)))
	}
	if !tokens {
		return out, nil
	}
	all, err := tokenTensors(s.Mesh.World, own, s.parts.Config.VocabSize)
	return append(out, all...), err
}

// paramTensors returns the gradients of all trained parameters, or their values after the step, by
// the names of the parameters. Only rank 0 returns them. Collective.
func (s *session) paramTensors(grads bool, stream device.Stream) (map[string]named, error) {
	// AdamW's first update is lr·sign(g) if |g| is large compared with eps. Rounding may change the
	// sign of a gradient near zero, so these weights are not judged.
	what, kind, judged := " updated", isUpdated, s.Job.Optimizer.Name == "sgd"
	if grads {
		what, kind, judged = " gradient", isGradient, true
	}
	values := map[string]named{}
	for _, g := range s.parts.Weights.Portions() {
		if g.Frozen {
			continue
		}
		all, err := s.whole(g, grads, stream)
		if err != nil {
			return nil, err
		}
		if s.Mesh.World.Rank() > 0 {
			continue
		}
		at := int64(0)
		for _, p := range g.Params {
			x, err := fetch(s.Device, stream, all.Slice(0, at, at+p.Numel()))
			if err != nil {
				return nil, err
			}
			at += p.Numel()
			values[p.Name] = named{name: p.Name + what, shape: p.Shape, data: s.parts.Model.Config.InFileOrder(p, x),
				judged: judged, kind: kind, param: p.Name}
		}
	}
	return values, nil
}

// nudge changes the last bit of each weight, up or down by its position.
func (s *session) nudge() error {
	stream, err := s.Device.NewStream()
	if err != nil {
		return err
	}
	defer stream.Close()
	stored := s.parts.Weights.Stored()
	if w, ok := s.parts.Weights.(*train.Partial); ok {
		stored = append(stored, w.StoredFrozen()...)
	}
	for _, x := range stored {
		values, err := fetch(s.Device, stream, x.Master)
		if err != nil {
			return err
		}
		for i, v := range values {
			to := float32(math.Inf(1))
			if splitmix.Mix(uint64(i))&1 == 0 {
				to = -to
			}
			if v != 0 {
				values[i] = math.Nextafter32(v, to)
			}
		}
		n := int64(len(values))
		if err := s.Device.Copy(stream, x.Master.View(n), tensor.OfFloat32(values, n)); err != nil {
			return err
		}
		if err := stream.Sync(); err != nil {
			return err
		}
	}
	if err := s.parts.Weights.Loaded(stream); err != nil {
		return err
	}
	return stream.Sync()
}

// fetch copies a dense tensor to host memory, in F32.
func fetch(d device.Device, s device.Stream, t tensor.Tensor) ([]float32, error) {
	x := make([]float32, t.Numel())
	if err := d.Copy(s, tensor.OfFloat32(x, int64(len(x))), t.View(t.Numel())); err != nil {
		return nil, err
	}
	return x, s.Sync()
}

// operatorTensors runs the operator job with a temporary output file and returns the tensors of
// that file. Collective; only rank 0 returns tensors.
func operatorTensors(e *Env) ([]named, error) {
	j := *e.Job
	_, output := j.OperatorFiles()
	*output = filepath.Join(filepath.Dir(*output),
		fmt.Sprintf(".verify-%d-%s", e.Mesh.World.Size(), filepath.Base(*output)))
	run := *e
	run.Job = &j
	if e.Mesh.World.Rank() == 0 {
		defer os.Remove(*output)
	}
	if _, err := computeOperator(&run); err != nil || e.Mesh.World.Rank() > 0 {
		return nil, err
	}
	f, err := tensor.OpenSafetensors(*output)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var out []named
	for _, t := range f.Entries() {
		n := named{name: t.Name, shape: t.Shape, data: make([]float32, t.Numel()), judged: true}
		if err := f.ReadFloat32(t, 0, n.data); err != nil {
			return nil, err
		}
		out = append(out, n)
	}
	return out, nil
}
