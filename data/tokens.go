package data

import (
	"encoding/binary"
	"hash/crc32"
	"math"
	"slices"
	"unsafe"

	"ulysses/internal/input"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// tokens is the rows [first, first+n) of a .safetensors file with input_ids [rows, sequence] and
// perhaps labels and position_ids of the same shape. Rows are read when they are needed; opening
// has read all of them once, to check them.
type tokens struct {
	file                   *tensor.Safetensors
	ids, labels, positions tensor.Entry // the last two without a name when absent
	first, n, sequence     int64
	vocab                  int64
	sums                   []uint32 // CRC-32C of all of the file's rows
}

// openTokens opens a file and checks its rows, each rank its share. Collective.
func openTokens(o *opening, path string) (*tokens, error) {
	t := &tokens{sequence: o.config.Sequence, vocab: o.Vocab}
	var err error
	if t.file, err = tensor.OpenSafetensors(path); err == nil {
		err = t.check()
	}
	if err = o.agree(err); err == nil {
		err = t.survey(o)
	}
	if err != nil {
		if t.file != nil {
			t.file.Close()
		}
		return nil, err
	}
	return t, nil
}

// survey reads this rank's share of the rows, and brings their checksums together.
func (t *tokens) survey(o *opening) error {
	rank, size := o.place()
	lo, hi := t.n*rank/size, t.n*(rank+1)/size
	sums := make([]byte, 0, 4*(hi-lo))
	var m MicroBatch
	var err error
	for r := lo; r < hi && err == nil; r++ {
		if err = t.load(&m, r); err == nil {
			err = t.checkRow(&m, r)
		}
		sums = binary.LittleEndian.AppendUint32(sums, t.sum(&m))
	}
	if err = o.agree(err); err != nil {
		return err
	}
	all, err := o.gather(sums)
	if err != nil {
		return err
	}
	t.sums = make([]uint32, 0, t.n)
	for _, b := range all {
		for ; len(b) > 0; b = b[4:] {
			t.sums = append(t.sums, binary.LittleEndian.Uint32(b))
		}
	}
	return nil
}

// sum is the checksum of the row in the scratch.
func (t *tokens) sum(m *MicroBatch) (crc uint32) {
	for _, x := range m.scratch {
		crc = crc32.Update(crc, castagnoli, unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 8*len(x)))
	}
	return crc
}

func (t *tokens) check() error {
	path := t.file.Path
	for _, e := range t.file.Entries() {
		switch e.Name {
		case "input_ids":
			t.ids = e
		case "labels":
			t.labels = e
		case "position_ids":
			t.positions = e
		default:
			return status.Errorf(status.Unsupported, "%s: tensor %s is not one this data has a meaning for (input_ids, labels, position_ids): write the file without it; documents are marked by position_ids", path, input.Quote(e.Name))
		}
	}
	if t.ids.Name == "" {
		return status.Errorf(status.InvalidConfig, "%s: no tensor input_ids: it must hold the token ids [rows, %d]", path, t.sequence)
	}
	for _, e := range []tensor.Entry{t.ids, t.labels, t.positions} {
		switch {
		case e.Name == "":
		case e.DType != tensor.I32 && e.DType != tensor.I64:
			return status.Errorf(status.InvalidConfig, "%s: %s is %s: I32 or I64 is needed", path, e.Name, e.TypeName)
		case len(e.Shape) != 2:
			return status.Errorf(status.InvalidConfig, "%s: %v has %d dimensions: [rows, sequence] is needed", path, e, len(e.Shape))
		case !slices.Equal(e.Shape, t.ids.Shape):
			return status.Errorf(status.InvalidConfig, "%s: %v and %v have different shapes: they must be alike", path, e, t.ids)
		case e.Shape[1] != t.sequence:
			return status.Errorf(status.InvalidConfig, "%s: %v is %d tokens wide, data.sequence is %d: set data.sequence = %d", path, e, e.Shape[1], t.sequence, e.Shape[1])
		}
	}
	t.n = t.ids.Shape[0]
	return nil
}

func (t *tokens) checkRow(m *MicroBatch, r int64) error {
	ids, labels, positions := m.scratch[0], m.scratch[1], m.scratch[2]
	for i, id := range ids {
		if id < 0 || id >= t.vocab {
			return status.Errorf(status.InvalidConfig, "%s: input_ids, document (row) %d%s", t.file.Path, r, outside(int64(i), id, t.vocab))
		}
	}
	for i, id := range labels {
		if id != Ignore && (id < 0 || id >= t.vocab) {
			return status.Errorf(status.InvalidConfig, "%s: labels (%d = ignored), document (row) %d%s", t.file.Path, Ignore, r, outside(int64(i), id, t.vocab))
		}
	}
	for i, p := range positions {
		if p < 0 || p > math.MaxInt32 {
			return status.Errorf(status.InvalidConfig, "%s: position_ids, row %d, position %d: %d is not a position: 0 to %d are", t.file.Path, r, i, p, math.MaxInt32)
		}
	}
	return nil
}

// load reads a row of each tensor into the scratch; an absent one is empty.
func (t *tokens) load(m *MicroBatch, r int64) error {
	for k, e := range []tensor.Entry{t.ids, t.labels, t.positions} {
		m.scratch[k] = m.scratch[k][:0]
		if e.Name == "" {
			continue
		}
		m.scratch[k] = slices.Grow(m.scratch[k], int(t.sequence))[:t.sequence]
		if err := t.file.ReadInt64(e, r*t.sequence, m.scratch[k]); err != nil {
			return err
		}
	}
	return nil
}

// fill adds the row in the scratch to the micro batch. A position of 0 starts a document, and so
// does the row.
func (t *tokens) fill(m *MicroBatch) {
	ids, labels, given := m.scratch[0], m.scratch[1], m.scratch[2]
	if len(labels) == 0 {
		labels = ids
	}
	start := int64(len(m.IDs))
	toIDs, targets, positions := m.grow(t.sequence)
	for i := range ids {
		toIDs[i], targets[i], positions[i] = int32(ids[i]), Ignore, int32(i)
		if len(given) > 0 {
			positions[i] = int32(given[i])
		}
	}
	for i := 1; i < len(ids); i++ {
		if len(given) > 0 && given[i] == 0 {
			m.CuSeqlens = append(m.CuSeqlens, start+int64(i))
		} else {
			targets[i-1] = int32(labels[i])
		}
	}
	m.CuSeqlens = append(m.CuSeqlens, start+t.sequence)
}

func (t *tokens) units() int64   { return t.n }
func (t *tokens) rows() int64    { return t.n }
func (t *tokens) tokens() int64  { return t.n * t.sequence }
func (t *tokens) longest() int64 { return t.sequence }

func (t *tokens) checksum() uint32 { return checksum(t.sums) }

func (t *tokens) length(int64) (int64, error) { return t.sequence, nil }

// appendRow checks the row again: the file may have been written to since it was opened, and an id
// outside the embedding must never reach a kernel.
func (t *tokens) appendRow(m *MicroBatch, r int64) error {
	if err := t.load(m, t.first+r); err != nil {
		return err
	}
	if err := t.checkRow(m, t.first+r); err != nil {
		return err
	}
	if t.sum(m) != t.sums[t.first+r] {
		return status.Errorf(status.IO, "%s: row %d is not the one that was there when the job began: leave the files of data.path and eval.path alone while a job runs; start it again",
			t.file.Path, t.first+r)
	}
	t.fill(m)
	return nil
}

func (t *tokens) split(unit int64) (before, after source, _ error) {
	a, b := *t, *t
	a.n, b.first, b.n = unit, t.first+unit, t.n-unit
	return &a, &b, nil
}

func (t *tokens) cut(func(int64) int64) (head, tail source, _ error) {
	return nil, nil, status.Errorf(status.InvalidConfig, "eval.split: %s has a single row, which cannot be split: give eval.path", t.file.Path)
}
