package train

import (
	"ulysses/comm"
	"ulysses/tensor"
)

// agreed has values that all ranks compare after a step. After reduce, each field is the maximum
// over the ranks.
type agreed struct {
	peakBytes int64 // the largest use of device memory so far
	stop      int64 // 1 = a rank must stop
	writing   int64 // 1 = a rank is still writing its file of a checkpoint
	notFinite int64 // 1 + the last rank whose loss or gradient norm is NaN or Inf; 0 = no rank
	finite    int64 // 1 + the last rank whose loss and gradient norm are finite; 0 = no rank
}

// reduce replaces each field by its maximum over the ranks. Collective.
func (a *agreed) reduce(world comm.Comm) error {
	fields := []*int64{&a.peakBytes, &a.stop, &a.writing, &a.notFinite, &a.finite}
	values := make([]int64, len(fields))
	for i, f := range fields {
		values[i] = *f
	}
	err := world.AllReduce(nil, tensor.OfInt64(values, int64(len(values))), comm.Max)
	for i, f := range fields {
		*f = values[i]
	}
	return err
}
