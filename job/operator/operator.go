// Package operator runs jobs of kind "attention" and "gdn": an operator applied to tensors of a
// file, with its gradients if the file has dout. Open checks the input and plans the operator over
// the ranks; Do reads, computes and writes. Each rank reads its own rows; rank 0 writes the output,
// in which NaN and Inf are errors.
package operator

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/tensor"
)

// Run is an operator job on one rank, in the order of its life: Open, then Do; or, for a plan,
// Open, Allocate, Compute and Free.
type Run struct{ op operation }

// Open checks the input of a job of kind "attention" or "gdn" on this rank and plans the operator
// over the ranks of the mesh, which must share one sequence. writer says that this rank will write
// the output. Collective: all ranks succeed or return the same code.
func Open(j *file.Job, d device.Device, m *comm.Mesh, clk *clock.Clock, compute tensor.DType, writer bool) (*Run, error) {
	if m.Replicas > 1 {
		return nil, j.Errorf(status.InvalidConfig, "parallel.ulysses", "%d of %d ranks share the sequence and a job of kind %q has one: set 0 for all of them",
			m.Ulysses, m.World.Size(), j.Kind)
	}
	var op operation
	var err error
	if j.Kind == "gdn" {
		op, err = newGDNRun(d, m.Seq, clk, compute, &j.GDN, writer)
	} else {
		op, err = newAttentionRun(d, m.Seq, clk, compute, &j.Attention, writer)
	}
	if err != nil {
		return nil, err
	}
	return &Run{op}, nil
}

// Do reads the input, computes and writes the output. It calls leave at the end, before it frees
// the memory that ranks exchanged. With a report beside it, an error is about results that are NaN
// or Inf, and the output is written. Collective.
func (r *Run) Do(output string, leave func(error) error) (*Report, error) {
	return do(r.op, output, leave)
}

// Allocate allocates all memory of the run at once.
func (r *Run) Allocate() error { return r.op.base().allocate(r.op) }

// Compute computes the forward pass, and the backward pass if the input has dout. Collective.
func (r *Run) Compute() error { return r.op.compute() }

// Free frees what Allocate allocated and closes the input.
func (r *Run) Free() { r.op.base().free() }

// Tokens is the length of the sequence.
func (r *Run) Tokens() int64 { return r.op.tokens() }

// Report is the report; the fields of later phases are 0.
func (r *Run) Report() *Report { return &r.op.base().report }

// Scratch returns the bytes allocated for the backward pass and for workspace.
func (r *Run) Scratch() (saved, workspace int64) {
	s, w := r.op.scratch()
	return s.Bytes(), w.Bytes()
}

// Shape describes the input of a job for a plan.
type Shape struct {
	Rows  []int64    // lengths of the sequences that are sharded
	Heads [][2]int64 // heads, and heads of keys
	// elements of a token over all heads, of a head, and of a head's keys and values in the gated
	// delta rule
	Hidden, Dim, KeyDim, ValueDim int64
}

// Describe reads the shapes in the header of a job's input.
func Describe(j *file.Job) (*Shape, error) {
	if j.Kind == "gdn" {
		in, err := openGDN(&j.GDN, false)
		defer in.close()
		if err != nil {
			return nil, err
		}
		return &Shape{Rows: []int64{in.s}, Heads: [][2]int64{{in.hv, in.hk}}, Hidden: in.hv * in.dv, Dim: in.dk, KeyDim: in.dk, ValueDim: in.dv}, nil
	}
	in, err := openAttention(&j.Attention, false)
	defer in.close()
	if err != nil {
		return nil, err
	}
	return &Shape{Rows: []int64{in.sq, in.sk}, Heads: [][2]int64{{in.hq, in.hkv}}, Hidden: in.hq * in.d, Dim: in.d}, nil
}
