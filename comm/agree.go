package comm

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"slices"
	"unsafe"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// hostBroadcaster is a communicator with a control plane of its own for bytes of the host; done is
// false where it does not reach.
type hostBroadcaster interface {
	hostBroadcast(data []byte, root int) (done bool, err error)
}

// broadcaster is what c has of the kind, or what it stands on.
func broadcaster(c Comm) hostBroadcaster {
	for {
		if h, ok := c.(hostBroadcaster); ok {
			return h
		}
		l, ok := c.(Layered)
		if !ok {
			return nil
		}
		c = l.Host()
	}
}

// Agree is called by all ranks after a step that may have failed on some, so that they fail
// together instead of one waiting for another for ever. Without an error anywhere it returns nil
// everywhere. Otherwise every rank gets the lowest failing rank's code; the text is that rank's, or
// its own on a rank that failed itself, with the rank before it.
func Agree(c Comm, err error) error {
	var mine []byte
	if err != nil {
		mine = binary.LittleEndian.AppendUint32(nil, uint32(status.Of(err)))
		mine = append(mine, err.Error()...)
	}
	all, gatherErr := GatherBytes(c, mine)
	if gatherErr != nil {
		return gatherErr
	}
	first, failed := -1, 0
	for r, b := range all {
		if len(b) > 0 {
			failed++
			if first < 0 {
				first = r
			}
		}
	}
	if failed == 0 {
		return nil
	}
	e := &status.Error{Code: status.Code(binary.LittleEndian.Uint32(all[first])), Text: fmt.Sprintf("rank %d: %s", first, all[first][4:])}
	if err != nil {
		e.Text, e.Err = fmt.Sprintf("rank %d: %v", c.Rank(), err), err
	}
	if failed > 1 {
		e.Text += fmt.Sprintf(" (%d of %d ranks failed)", failed, c.Size())
	}
	return e
}

// Field is a value that all ranks must have alike.
type Field struct {
	Name, Value string

	list   []int64 // of List
	isList bool
}

// List is a Field of many numbers; nil = not given. A hash of them travels. Where it differs, the
// first number that does is found and named.
func List(name string, list []int64) Field {
	value := "not given"
	if list != nil {
		h := fnv.New64a()
		var word [8]byte
		for _, x := range list {
			binary.LittleEndian.PutUint64(word[:], uint64(x))
			h.Write(word[:])
		}
		value = fmt.Sprintf("%d entries, hash %016x", len(list), h.Sum64())
	}
	return Field{Name: name, Value: value, list: list, isList: true}
}

// Same compares the fields over the ranks; what they belong to starts the text of the error, which
// names a rank that differs from rank 0, the field, and both values. All ranks get the same error.
func Same(c Comm, what string, fields ...Field) error {
	var mine []byte
	for _, f := range fields {
		mine = appendString(appendString(mine, f.Name), f.Value)
	}
	all, err := GatherBytes(c, mine)
	if err != nil {
		return err
	}
	root := parseFields(all[0])
	for r := 1; r < len(all); r++ {
		theirs := parseFields(all[r])
		if len(theirs) != len(root) {
			return status.Errorf(status.InvalidArgument, "%s: rank %d compares %d fields, rank 0 %d: all ranks must run the same program", what, r, len(theirs), len(root))
		}
		for i := range root {
			if theirs[i].Name != root[i].Name {
				return status.Errorf(status.InvalidArgument, "%s: rank %d compares %s where rank 0 compares %s: all ranks must run the same program", what, r, theirs[i].Name, root[i].Name)
			}
			if theirs[i].Value != root[i].Value && fields[i].isList {
				return listDifference(c, what, fields[i])
			}
			if theirs[i].Value != root[i].Value {
				return status.Errorf(status.InvalidArgument, "%s: %s is %s on rank %d and %s on rank 0: it must be the same on all ranks", what, root[i].Name, theirs[i].Value, r, root[i].Value)
			}
		}
	}
	return nil
}

// listDifference names the first number of a list that is another on some rank than on rank 0. All
// ranks call it.
func listDifference(c Comm, what string, f Field) error {
	first, err := BroadcastBytes(c, tensor.OfInt64(f.list, int64(len(f.list))).RawBytes(), 0)
	if err != nil {
		return err
	}
	var mine string
	root := make([]int64, len(first)/8)
	for i := range root {
		root[i] = int64(binary.LittleEndian.Uint64(first[8*i:]))
	}
	switch at := 0; {
	case len(f.list) == 0 && len(root) > 0:
		mine = fmt.Sprintf("%s is not given on rank %d and has %d entries on rank 0", f.Name, c.Rank(), len(root))
	case len(f.list) > 0 && len(root) == 0:
		mine = fmt.Sprintf("%s has %d entries on rank %d and is not given on rank 0", f.Name, len(f.list), c.Rank())
	default:
		for at < min(len(root), len(f.list)) && root[at] == f.list[at] {
			at++
		}
		switch {
		case at < min(len(root), len(f.list)):
			mine = fmt.Sprintf("%s[%d] is %d on rank %d and %d on rank 0", f.Name, at, f.list[at], c.Rank(), root[at])
		case len(root) != len(f.list):
			mine = fmt.Sprintf("%s has %d entries on rank %d and %d on rank 0", f.Name, len(f.list), c.Rank(), len(root))
		}
	}
	all, err := GatherBytes(c, []byte(mine))
	if err != nil {
		return err
	}
	for _, said := range all {
		if len(said) > 0 {
			return status.Errorf(status.InvalidArgument, "%s: %s: it must be the same on all ranks", what, said)
		}
	}
	return status.Errorf(status.Internal, "%s: %s differs between ranks, and no entry does", what, f.Name)
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func parseFields(b []byte) []Field {
	var words []string
	for len(b) > 0 {
		n, k := binary.Uvarint(b)
		words = append(words, string(b[k:k+int(n)]))
		b = b[k+int(n):]
	}
	var fields []Field
	for pair := range slices.Chunk(words, 2) {
		fields = append(fields, Field{Name: pair[0], Value: pair[1]})
	}
	return fields
}

// GatherBytes brings every rank's bytes to all ranks, in rank order.
func GatherBytes(c Comm, mine []byte) ([][]byte, error) {
	size := c.Size()
	own, lengths, ones := []int64{int64(len(mine))}, make([]int64, size), make([]int64, size)
	for i := range ones {
		ones[i] = 1
	}
	if err := c.AllGather(nil, int64s(lengths), int64s(own), ones); err != nil {
		return nil, err
	}
	all := make([]byte, total(lengths))
	if len(all) > 0 {
		if err := c.AllGather(nil, bytesOf(all), bytesOf(mine), lengths); err != nil {
			return nil, err
		}
	}
	parts := make([][]byte, size)
	for r := range parts {
		lo := before(lengths, r)
		parts[r] = all[lo : lo+lengths[r]]
	}
	return parts, nil
}

// BroadcastBytes returns the root's data on every rank; the others' data is ignored.
func BroadcastBytes(c Comm, data []byte, root int) ([]byte, error) {
	if err := checkRoot(root, c.Size()); err != nil {
		return nil, err
	}
	length := []int64{int64(len(data))}
	if err := c.Broadcast(nil, int64s(length), root); err != nil {
		return nil, err
	}
	if c.Rank() != root {
		data = make([]byte, length[0])
	}
	if len(data) == 0 {
		return data, nil
	}
	if h := broadcaster(c); h != nil {
		if done, err := h.hostBroadcast(data, root); done || err != nil {
			return data, err
		}
	}
	return data, c.Broadcast(nil, bytesOf(data), root)
}

func int64s(x []int64) tensor.Tensor {
	return tensor.Of(unsafe.Pointer(unsafe.SliceData(x)), tensor.I64, int64(len(x)))
}

func bytesOf(x []byte) tensor.Tensor {
	return tensor.Of(unsafe.Pointer(unsafe.SliceData(x)), tensor.U8, int64(len(x)))
}

// Meet is called before a wait for a device whose work waits for peers' work there, as NCCL's does:
// a peer that never comes is then late in a call that is watched, where the device would wait for
// ever. Elsewhere ranks meet in each exchange, and it does nothing.
func Meet(c Comm) error {
	if c.Kind() != "nccl" || c.Size() == 1 {
		return nil
	}
	return c.Barrier()
}
