// Package operator runs jobs of kind "attention" and "gdn": an operator on tensors of a safetensors
// file, with its gradients if the file has dout.
//
// Open checks the input and plans the operator over the ranks. Run.Do reads, computes and writes.
// Each rank reads its own tokens; rank 0 writes the output and checks it for NaN and Inf.
package operator

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/gdn"
	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/sp"
	"ulysses/tensor"
)

// Run is an operator job on one rank. A job calls Open, then Do; a plan calls Open, Allocate,
// Compute and Free.
type Run struct{ op operation }

// header is the checked header of an input file.
type header interface {
	base() *inputFile
	String() string
	backward() bool
	spec() sp.BatchSpec
	// elements returns the number of elements of q, k and v
	elements() int64
	// plan plans the operator and sets the report's plan and formula. Collective
	plan(r run, j *file.Job, compute tensor.DType) (operation, error)
}

// Open checks the input of a job of kind "attention" or "gdn" on this rank and plans the operator
// over the ranks of the mesh, which must share one sequence. Tensors are computed in compute; LSE,
// decays, betas and recurrent states are F32. writer says that this rank will write the output.
// Collective: all ranks succeed or return the same code.
func Open(j *file.Job, d device.Device, m *comm.Mesh, clk *clock.Clock, compute tensor.DType,
	writer bool) (*Run, error) {
	if m.Replicas > 1 {
		return nil, j.Errorf(status.InvalidConfig, "parallel.ulysses",
			"%d of %d ranks share the sequence, and a job of kind %q has one sequence; set it to 0",
			m.Ulysses, m.World.Size(), j.Kind)
	}
	in, err := openHeader(j, writer)
	if err = comm.Agree(m.Seq, err); err == nil {
		err = in.base().same(m.Seq)
	}
	var op operation
	levels := ""
	if err == nil {
		levels, err = m.SetLevels(j.Parallel.TwoLevel, in.elements()/int64(m.Seq.Size())*compute.Size())
	}
	if err == nil {
		op, err = newOperation(j, in,
			run{in: in.base(), dev: d, comm: m.Seq, ring: int64(m.Ring), gather: j.Mesh.Gather, clock: clk}, compute)
	}
	if err != nil {
		in.base().close()
		return nil, err
	}
	op.base().report.Levels = levels
	return &Run{op}, nil
}

// openHeader opens the input and checks the job's table and the header. The header is not nil, also
// with an error.
func openHeader(j *file.Job, writer bool) (header, error) {
	if j.Kind == "gdn" {
		return openGDN(&j.GDN, writer)
	}
	return openAttention(&j.Attention, j.OperatorSeed(), writer)
}

func newOperation(j *file.Job, in header, r run, compute tensor.DType) (op operation, err error) {
	spec := in.spec()
	if j.Kind == "attention" {
		spec.Ring = r.ring
	}
	if r.batch, err = sp.NewBatch(r.comm, spec); err != nil {
		return nil, r.in.fault(err)
	}
	r.report = Report{Input: in.String(), Backward: in.backward()}
	return in.plan(r, j, compute)
}

// Do reads the input, computes and writes the output. free is the host memory that this rank may
// allocate; 0 = unknown. Do calls leave before it frees the memory that other ranks may read. If a
// result is NaN or Inf, Do has written the output and returns both a report and an error.
// Collective.
func (r *Run) Do(output string, free int64, leave func(error) error) (*Report, error) {
	return do(r.op, output, free, leave)
}

// Allocate allocates all memory of the run at once. free is the host memory that this rank may
// allocate; 0 = unknown.
func (r *Run) Allocate(free int64) error { return r.op.base().allocate(r.op, free) }

// Compute computes the forward pass, and the backward pass if the input has dout. Collective.
func (r *Run) Compute() error { return r.op.compute() }

// Free frees the memory of Allocate and closes the input.
func (r *Run) Free() { r.op.base().free() }

// SharesHeads reports whether the ranks compute shares of the heads, so that a rank beyond the
// number of heads has none.
func (r *Run) SharesHeads() bool {
	g, ok := r.op.(*gdnRun)
	return !ok || g.plan.Strategy() == gdn.Heads
}

// Tokens returns the length of the sequence.
func (r *Run) Tokens() int64 { return r.op.tokens() }

// Report returns the report; the fields of phases that have not run are 0.
func (r *Run) Report() *Report { return &r.op.base().report }

// Scratch returns the bytes allocated for the backward pass and for workspace.
func (r *Run) Scratch() (saved, workspace int64) {
	s, w := r.op.scratch()
	return s.Bytes(), w.Bytes()
}

// Shape describes the input of a job for a plan.
type Shape struct {
	Lengths []int64    // lengths of the sequences that are sharded
	Heads   [][2]int64 // heads and key heads
	Layer   sp.Layer   // of attention, without DType; the zero Layer for the gated delta rule
	// elements of a token over all heads, of a head, and of a head's keys and values in the gated
	// delta rule
	Hidden, Dim, KeyDim, ValueDim int64
}

// Describe reads the shapes in the header of a job's input.
func Describe(j *file.Job) (*Shape, error) {
	in, err := openHeader(j, false)
	defer in.base().close()
	if err != nil {
		return nil, err
	}
	if in, ok := in.(*gdnInput); ok {
		return &Shape{Lengths: []int64{in.s}, Heads: [][2]int64{{in.hv, in.hk}}, Hidden: in.hv * in.dv, Dim: in.dk,
			KeyDim: in.dk, ValueDim: in.dv}, nil
	}
	a := in.(*attentionInput)
	return &Shape{Lengths: []int64{a.sq, a.sk}, Heads: [][2]int64{{a.hq, a.hkv}}, Hidden: a.hq * a.d, Dim: a.d,
		Layer: a.layer(&j.Attention)}, nil
}
