package sp

import (
	"math"
	"strconv"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Option is a mask or another option of an attention layer. Options is the one list of them: it
// makes what ranks must agree on, the checks and refusals of NewPlan, the cases of the tests on
// every mesh and device, and the table of docs/attention.md.
type Option struct {
	Name string // as in "soft cap"
	// How a job of kind attention, a C program and a Python program ask for it, in Markdown.
	Job, C, Python string

	has func(l *Layer) bool
	// fields are the option's settings, which must be equal on all ranks
	fields func(l *Layer) []comm.Field
	// check refuses impossible settings; nil if all are possible
	check func(l *Layer) error
	// ask sets the option in a call that asks a device for its kernels, for options that not every
	// kernel supports. rows is the length of queries and of keys; of returns a tensor without
	// memory.
	ask func(l *Layer, a *device.Attention, rows int64, of func(tensor.DType, ...int64) tensor.Tensor)
}

// Options are the options of attention, in the order of docs/attention.md.
var Options = []Option{
	{Name: "causal, aligned with the last key of a document", Job: "`attention.causal`", C: "`ULYSSES_CAUSAL`",
		Python: "`causal=`",
		has:    func(l *Layer) bool { return l.Causal },
		fields: func(l *Layer) []comm.Field { return []comm.Field{flag("causal", l.Causal)} }},
	{Name: "window", Job: "`attention.window`", C: "`ULYSSES_WINDOW`, `window_left`, `window_right`",
		Python: "`window=`",
		has:    func(l *Layer) bool { return l.Window != nil },
		fields: func(l *Layer) []comm.Field { return []comm.Field{{Name: "window", Value: windowText(l.Window)}} }},
	{Name: "factor of scores", Job: "`attention.scale`", C: "`scale`", Python: "`scale=`",
		has:    func(l *Layer) bool { return l.Scale != 0 },
		fields: func(l *Layer) []comm.Field { return []comm.Field{real("scale", l.Scale)} },
		check: func(l *Layer) error {
			if math.IsNaN(l.Scale) || math.IsInf(l.Scale, 0) {
				return status.Errorf(status.InvalidArgument,
					"sp.NewPlan: scale is %v; set a finite number, or 0 for 1/sqrt(%d)", l.Scale, l.Dim)
			}
			return nil
		}},
	{Name: "soft cap", Job: "`attention.softcap`", C: "`softcap`", Python: "`softcap=`",
		has:    func(l *Layer) bool { return l.Softcap != 0 },
		fields: func(l *Layer) []comm.Field { return []comm.Field{real("softcap", l.Softcap)} },
		check: func(l *Layer) error {
			if !device.IsSoftcap(l.Softcap) {
				return status.Errorf(status.InvalidArgument,
					"sp.NewPlan: softcap is %v; set a number from %v to %v, or 0 for none", l.Softcap,
					device.MinSoftcap, device.MaxSoftcap)
			}
			return nil
		},
		ask: func(l *Layer, a *device.Attention, _ int64, _ func(tensor.DType, ...int64) tensor.Tensor) {
			a.Softcap = l.Softcap
		}},
	{Name: "slopes (ALiBi), with gradient", Job: "tensor `alibi`; `dalibi`", C: "`ULYSSES_ALIBI`, `alibi`; `dalibi`",
		Python: "`alibi=`",
		has:    func(l *Layer) bool { return l.ALiBi },
		fields: func(l *Layer) []comm.Field { return []comm.Field{flag("alibi", l.ALiBi)} },
		ask: func(l *Layer, a *device.Attention, _ int64, of func(tensor.DType, ...int64) tensor.Tensor) {
			a.Slopes = of(tensor.F32, l.Heads)
		}},
	{Name: "sinks, with gradient", Job: "tensor `sinks`; `dsinks`", C: "`ULYSSES_SINKS`, `sinks`; `dsinks`",
		Python: "`sinks=`",
		has:    func(l *Layer) bool { return l.Sinks },
		fields: func(l *Layer) []comm.Field { return []comm.Field{flag("sinks", l.Sinks)} },
		ask: func(l *Layer, a *device.Attention, _ int64, of func(tensor.DType, ...int64) tensor.Tensor) {
			a.Sinks = of(tensor.F32, l.Heads)
		}},
	{Name: "block mask", Job: "`attention.pattern` or tensor `block_mask`; `attention.block`",
		C: "`ULYSSES_BLOCK_MASK`, `block_q`, `block_k`", Python: "`block_mask=`, `block=`",
		has: func(l *Layer) bool { return l.BlockRows > 0 },
		fields: func(l *Layer) []comm.Field {
			return []comm.Field{number("block_rows", l.BlockRows), number("block_columns", l.BlockColumns)}
		},
		check: func(l *Layer) error {
			if l.BlockRows < 0 || l.BlockColumns < 0 || (l.BlockRows == 0) != (l.BlockColumns == 0) {
				return status.Errorf(status.InvalidArgument,
					"sp.NewPlan: blocks of the mask have %d rows and %d columns; set both to 1 or more, or both to 0 for no mask",
					l.BlockRows, l.BlockColumns)
			}
			return nil
		},
		ask: func(l *Layer, a *device.Attention, rows int64, of func(tensor.DType, ...int64) tensor.Tensor) {
			a.BlockMask, a.BlockRows, a.BlockColumns, a.QuerySeq, a.KeySeq = of(tensor.U8, 1, 1, 1), rows, rows,
				rows, rows
		}},
	{Name: "dropout", Job: "`attention.dropout`, `attention.seed`", C: "`dropout`, `dropout_seed`",
		Python: "`dropout=`, `seed=`",
		has:    func(l *Layer) bool { return l.Dropout != 0 },
		fields: func(l *Layer) []comm.Field { return []comm.Field{real("dropout", l.Dropout)} },
		check: func(l *Layer) error {
			if !(l.Dropout >= 0 && l.Dropout < 1) {
				return status.Errorf(status.InvalidArgument,
					"sp.NewPlan: dropout is %v; set a probability of at least 0 and below 1", l.Dropout)
			}
			return nil
		},
		ask: func(l *Layer, a *device.Attention, _ int64, _ func(tensor.DType, ...int64) tensor.Tensor) {
			a.Dropout = l.Dropout
		}},
	{Name: "ring", Job: "`parallel.ring`", C: "`ring` of `ulysses_options`", Python: "`Context(ring=)`",
		has:    func(l *Layer) bool { return l.Ring > 1 },
		fields: func(l *Layer) []comm.Field { return []comm.Field{number("ring", l.Ring)} },
		ask: func(_ *Layer, a *device.Attention, _ int64, _ func(tensor.DType, ...int64) tensor.Tensor) {
			a.Carry = true
		}},
	{Name: "all-gather of a ring's keys", Job: "`parallel.gather`", C: "`ULYSSES_GATHER_KEYS`",
		Python: "`Context(gather_keys=)`",
		has:    func(l *Layer) bool { return l.Gather },
		fields: func(l *Layer) []comm.Field { return []comm.Field{flag("gather", l.Gather)} }},
	{Name: "no backward pass", Job: "tensor `dout` left out", C: "`ULYSSES_NO_BACKWARD`",
		Python: "inputs without `requires_grad`",
		has:    func(l *Layer) bool { return l.NoBackward },
		fields: func(l *Layer) []comm.Field { return []comm.Field{flag("no_backward", l.NoBackward)} }},
	{Name: "bitwise reproducible backward pass", Job: "`device.deterministic`", C: "`ULYSSES_DETERMINISTIC`",
		Python: "`deterministic=`",
		has:    func(l *Layer) bool { return l.Deterministic },
		fields: func(l *Layer) []comm.Field { return []comm.Field{flag("deterministic", l.Deterministic)} }},
}

func number(name string, n int64) comm.Field {
	return comm.Field{Name: name, Value: strconv.FormatInt(n, 10)}
}

func real(name string, x float64) comm.Field {
	return comm.Field{Name: name, Value: strconv.FormatFloat(x, 'g', -1, 64)}
}

func flag(name string, set bool) comm.Field {
	return comm.Field{Name: name, Value: strconv.FormatBool(set)}
}

// NeedsKernels reports whether the layer has options that not every kernel supports.
func (l *Layer) NeedsKernels() bool {
	for i := range Options {
		if o := &Options[i]; o.ask != nil && o.has(l) {
			return true
		}
	}
	return false
}

// ask sets the options that not every kernel supports in a call that asks a device for its kernels.
func (l *Layer) ask(a *device.Attention, rows int64, of func(tensor.DType, ...int64) tensor.Tensor) {
	for i := range Options {
		if o := &Options[i]; o.ask != nil && o.has(l) {
			o.ask(l, a, rows, of)
		}
	}
}
