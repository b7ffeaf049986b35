package data

import "slices"

// Ignore is the target of positions that have no loss, as in PyTorch.
const Ignore = -100

// MicroBatch is the whole sequences that one data-parallel replica processes in one forward and
// backward pass, concatenated. All ranks of a replica have the same MicroBatch. Targets are shifted
// over whole sequences, so a rank needs no token of the next rank's shard.
type MicroBatch struct {
	IDs       []int32 // [tokens]
	Targets   []int32 // [tokens]; the next id of the document, or Ignore
	Positions []int32 // [tokens]; position ids, for RoPE
	CuSeqlens []int64 // [documents+1]; first token of each document, then the number of tokens
	Valid     int64   // targets that are not Ignore
	First     int64   // number of the first sequence: in the training order, or of the files
	Sequences []Sequence

	labels  []int32    // of one sequence of an index
	scratch [3][]int64 // input_ids, labels and position_ids of one sequence of a .safetensors file
}

// Sequence is a sequence of a micro-batch.
type Sequence struct {
	Number int64 // in the training order, or of the files
	At     int64 // its first token in the micro-batch
}

// reset makes the micro-batch empty. It keeps the memory.
func (m *MicroBatch) reset() {
	m.IDs, m.Targets, m.Positions, m.CuSeqlens, m.Valid = m.IDs[:0], m.Targets[:0], m.Positions[:0],
		append(m.CuSeqlens[:0], 0), 0
	m.Sequences = m.Sequences[:0]
}

// grow makes the micro-batch n tokens longer and returns the new elements, whose content is
// undefined.
func (m *MicroBatch) grow(n int64) (ids, targets, positions []int32) {
	more := func(s *[]int32) []int32 {
		at := len(*s)
		*s = slices.Grow(*s, int(n))[:at+int(n)]
		return (*s)[at:]
	}
	return more(&m.IDs), more(&m.Targets), more(&m.Positions)
}
