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

// tokenFile is sequences [first, first+n) of a .safetensors file. The file has input_ids
// [sequences, length] and optionally labels and position_ids of the same shape. Sequences are read
// when they are needed. openTokenFile reads all of them once, to check them.
type tokenFile struct {
	file                   *tensor.Safetensors
	ids, labels, positions tensor.Entry // labels and positions have no name if they are absent
	first, n, width        int64        // width: tokens of a sequence
	vocab                  int64
	sums                   []uint32 // CRC-32C of each sequence of the file
}

// openTokenFile opens a file and checks its sequences; each rank checks a share. Collective.
func openTokenFile(o *opener, path string) (*tokenFile, error) {
	t := &tokenFile{width: o.config.Sequence, vocab: o.Vocab}
	var err error
	if t.file, err = tensor.OpenSafetensors(path); err == nil {
		err = t.checkTensors()
	}
	if err = o.agreeOnFiles(err); err == nil {
		err = t.checkAll(o)
	}
	if err != nil {
		if t.file != nil {
			t.file.Close()
		}
		return nil, err
	}
	return t, nil
}

// checkAll checks this rank's share of the sequences and gathers the checksums of all. Collective.
func (t *tokenFile) checkAll(o *opener) error {
	rank, size := o.rank()
	lo, hi := t.n*rank/size, t.n*(rank+1)/size
	sums := make([]byte, 0, 4*(hi-lo))
	var m MicroBatch
	var err error
	for s := lo; s < hi && err == nil; s++ {
		if err = t.load(&m, s); err == nil {
			err = t.check(&m, s)
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

// checkTensors finds the tensors of the file and checks their types and shapes.
func (t *tokenFile) checkTensors() error {
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
			return status.Errorf(status.Unsupported,
				"%s: tensor %s is not supported (supported: input_ids, labels, position_ids); write the file without it, and separate documents by position_ids that restart at 0",
				path, input.Quote(e.Name))
		}
	}
	if t.ids.Name == "" {
		return status.Errorf(status.InvalidConfig, "%s: there is no tensor input_ids; add one of shape [sequences, %d]",
			path, t.width)
	}
	for _, e := range []tensor.Entry{t.ids, t.labels, t.positions} {
		switch {
		case e.Name == "":
		case e.DType != tensor.I32 && e.DType != tensor.I64:
			return status.Errorf(status.InvalidConfig, "%s: %s has the type %s; convert it to I32 or I64", path, e.Name,
				e.TypeName)
		case len(e.Shape) != 2:
			return status.Errorf(status.InvalidConfig, "%s: %v has %d dimensions; give it the shape [sequences, %d]",
				path, e, len(e.Shape), t.width)
		case !slices.Equal(e.Shape, t.ids.Shape):
			return status.Errorf(status.InvalidConfig, "%s: %v and %v have different shapes; give both the same shape",
				path, e, t.ids)
		case e.Shape[1] != t.width:
			return status.Errorf(status.InvalidConfig,
				"%s: the sequences of %v have %d tokens, data.sequence is %d; set data.sequence = %d", path, e,
				e.Shape[1], t.width, e.Shape[1])
		}
	}
	t.n = t.ids.Shape[0]
	return nil
}

// load reads a sequence of each tensor into m.scratch. An absent tensor gives an empty slice.
func (t *tokenFile) load(m *MicroBatch, s int64) error {
	for k, e := range []tensor.Entry{t.ids, t.labels, t.positions} {
		m.scratch[k] = m.scratch[k][:0]
		if e.Name == "" {
			continue
		}
		m.scratch[k] = slices.Grow(m.scratch[k], int(t.width))[:t.width]
		if err := t.file.ReadInt64(e, s*t.width, m.scratch[k]); err != nil {
			return err
		}
	}
	return nil
}

// check checks the values of sequence s, which load has read.
func (t *tokenFile) check(m *MicroBatch, s int64) error {
	ids, labels, positions := m.scratch[0], m.scratch[1], m.scratch[2]
	for i, id := range ids {
		if id < 0 || id >= t.vocab {
			return status.Errorf(status.InvalidConfig, "%s: input_ids, sequence %d%s", t.file.Path, s,
				outsideVocabulary(int64(i), id, t.vocab))
		}
	}
	for i, id := range labels {
		if id != Ignore && (id < 0 || id >= t.vocab) {
			return status.Errorf(status.InvalidConfig, "%s: labels (%d = ignored), sequence %d%s", t.file.Path, Ignore,
				s, outsideVocabulary(int64(i), id, t.vocab))
		}
	}
	for i, p := range positions {
		if p < 0 || p > math.MaxInt32 {
			return status.Errorf(status.InvalidConfig,
				"%s: position_ids, sequence %d, position %d: %d is out of range; use values from 0 to %d", t.file.Path,
				s, i, p, math.MaxInt32)
		}
	}
	return nil
}

// sum returns the checksum of the sequence that load has read.
func (t *tokenFile) sum(m *MicroBatch) (crc uint32) {
	for _, x := range m.scratch {
		crc = crc32.Update(crc, castagnoli, unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 8*len(x)))
	}
	return crc
}

// fill appends the sequence that load has read to the micro-batch. A document starts at the start
// of the sequence and at each position id of 0.
func (t *tokenFile) fill(m *MicroBatch) {
	ids, labels, given := m.scratch[0], m.scratch[1], m.scratch[2]
	if len(labels) == 0 {
		labels = ids
	}
	start := int64(len(m.IDs))
	toIDs, targets, positions := m.grow(t.width)
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
	m.CuSeqlens = append(m.CuSeqlens, start+t.width)
}

func (t *tokenFile) documents() int64 { return t.n }
func (t *tokenFile) sequences() int64 { return t.n }
func (t *tokenFile) tokens() int64    { return t.n * t.width }
func (t *tokenFile) longest() int64   { return t.width }
func (t *tokenFile) cut() int64       { return 0 } // files of other widths are refused

func (t *tokenFile) checksum() uint32 { return checksum(t.sums) }

func (t *tokenFile) length(int64) (int64, error) { return t.width, nil }

// appendSequence checks the sequence again, because the file may have changed since it was opened.
// A kernel that received an id outside the vocabulary would read outside the embedding.
func (t *tokenFile) appendSequence(m *MicroBatch, sequence int64) error {
	s := t.first + sequence
	if err := t.load(m, s); err != nil {
		return err
	}
	if err := t.check(m, s); err != nil {
		return err
	}
	if t.sum(m) != t.sums[s] {
		return status.Errorf(status.IO,
			"%s: sequence %d has changed since the job began; start the job again, and do not change the files of data.path and eval.path while a job runs",
			t.file.Path, s)
	}
	t.fill(m)
	return nil
}

func (t *tokenFile) split(document int64) (before, after source, _ error) {
	a, b := *t, *t
	a.n, b.first, b.n = document, t.first+document, t.n-document
	return &a, &b, nil
}

func (t *tokenFile) splitDocument(func(int64) int64) (head, tail source, _ error) {
	return nil, nil, status.Errorf(status.InvalidConfig,
		"eval.split: %s has one sequence, which cannot be split; name other files with eval.path", t.file.Path)
}
