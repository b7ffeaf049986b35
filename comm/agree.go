package comm

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"time"
	"unsafe"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// byteBroadcaster is a communicator with its own way of broadcasting bytes in host memory.
// broadcastBytes returns done = false if it does not support the call; nothing has been sent then.
type byteBroadcaster interface {
	broadcastBytes(data []byte, root int) (done bool, err error)
}

// findBroadcaster returns c, or a communicator on which c is built, as a byteBroadcaster; nil if
// there is none.
func findBroadcaster(c Comm) byteBroadcaster {
	for {
		if h, ok := c.(byteBroadcaster); ok {
			return h
		}
		l, ok := c.(Layered)
		if !ok {
			return nil
		}
		c = l.Host()
	}
}

// Agree compares the errors of all ranks after a step that may have failed on some of them, so that
// all ranks fail together and none waits for ever. It returns nil if err is nil on all ranks.
// Otherwise it returns an error with the code of the lowest rank that failed. Its text is "rank R:"
// or "rank R on HOST:" for ranks on several hosts, and the error of this rank, if it failed, or of
// the lowest rank that failed. If all ranks failed with the same error, the text is that error's.
// Told reports whether rank 0 has the same text. Collective over c.
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
	if failed > 1 && failed == c.Size() &&
		!slices.ContainsFunc(all, func(b []byte) bool { return !bytes.Equal(b, mine) }) {
		return told{&status.Error{Code: status.Of(err), Text: err.Error(), Err: err}}
	}
	hosts, gatherErr := GatherBytes(c, []byte(hostName()))
	if gatherErr != nil { // the failure that brought the ranks here says more
		hosts = make([][]byte, c.Size())
	}
	e := &status.Error{Code: status.Code(binary.LittleEndian.Uint32(all[first])),
		Text: fmt.Sprintf("%s: %s", place(first, hosts), all[first][4:])}
	if err != nil {
		e.Text, e.Err = fmt.Sprintf("%s: %v", place(c.Rank(), hosts), err), err
	}
	if failed > 1 {
		e.Text += fmt.Sprintf(" (%d of %d ranks failed)", failed, c.Size())
	}
	if err == nil || bytes.Equal(mine, all[first]) {
		return told{e}
	}
	return e
}

// roundTime is the time between two rounds of Rounds. A rank that waited in one call for as long as
// work takes on another would end the job (Watch).
const roundTime = time.Second

// Rounds runs work, which must not communicate, in a goroutine, and meanwhile calls round every
// second, until it returns done or an error. ended says that work has ended on this rank. round is
// collective; it says that it is done once work has ended on all ranks, and ends work early if it
// fails. Rounds returns its error after work has ended. Collective.
func Rounds(work func(), round func(ended bool) (done bool, err error)) (err error) {
	finished := make(chan struct{})
	go func() {
		work()
		close(finished)
	}()
	for done := false; !done && err == nil; {
		ended := false
		select {
		case <-finished:
			ended = true
		case <-time.After(roundTime):
		}
		done, err = round(ended)
	}
	<-finished
	return err
}

// AgreeAfter calls f and returns what Agree returns for its error. While f runs on some ranks, all
// ranks communicate, as in Rounds. Collective over c.
func AgreeAfter(c Comm, f func() error) error {
	var own error
	err := Rounds(func() { own = f() }, func(ended bool) (bool, error) {
		state := []byte{'r'}
		if ended {
			state[0] = 'e'
		}
		all, err := GatherBytes(c, state)
		return !slices.ContainsFunc(all, func(b []byte) bool { return b[0] == 'r' }), err
	})
	if err != nil {
		return err
	}
	return Agree(c, own)
}

// place names a rank, with its host if the ranks are on several.
func place(rank int, hosts [][]byte) string {
	if slices.ContainsFunc(hosts, func(host []byte) bool { return !bytes.Equal(host, hosts[0]) }) {
		return fmt.Sprintf("rank %d on %s", rank, hosts[rank])
	}
	return fmt.Sprint("rank ", rank)
}

// told is an error of Agree that rank 0 has as well.
type told struct{ error }

func (e told) Unwrap() error { return e.error }

// Told reports whether err is an error of Agree that rank 0 has as well. One message of rank 0 is
// enough then. On rank 0 it is true.
func Told(err error) bool {
	var e told
	return errors.As(err, &e)
}

// Field is a named value that must be equal on all ranks.
type Field struct {
	Name, Value string

	list   []int64 // for fields made by List
	isList bool
}

// notGiven is the value of a list that is nil.
const notGiven = "not given"

// List returns a Field for a list of numbers; nil means not given. Ranks compare a hash of the
// list. If the hashes differ, the error names the first number that differs.
func List(name string, list []int64) Field {
	value := notGiven
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

// Same returns an error if a field is not equal on all ranks. The text of the error starts with
// what (the operation that the fields belong to) and names the field, a rank that differs from rank
// 0, the hosts of these ranks, and both values. All ranks get the same error. Ranks may have
// different numbers of fields if an earlier field differs. Collective over c.
func Same(c Comm, what string, fields ...Field) error {
	var mine []byte
	for _, f := range fields {
		mine = appendString(appendString(mine, f.Name), f.Value)
		mine = append(mine, f.kind())
	}
	all, err := GatherBytes(c, mine)
	if err != nil {
		return err
	}
	root := parseFields(all[0])
	for r := 1; r < len(all); r++ {
		if bytes.Equal(all[r], all[0]) {
			continue
		}
		theirs := parseFields(all[r])
		for i := range min(len(root), len(theirs)) {
			if theirs[i].Name != root[i].Name {
				return status.Errorf(status.InvalidArgument,
					"%s: rank %d compares %s, rank 0 compares %s; start all ranks with the same program", what, r,
					theirs[i].Name, root[i].Name)
			}
			if theirs[i].Value != root[i].Value && root[i].isList {
				own := Field{Name: root[i].Name} // of a rank that has fewer fields than these two
				if i < len(fields) && fields[i].Name == own.Name {
					own = fields[i]
				}
				return listDifference(c, what, own, root[i].Value != notGiven)
			}
			if theirs[i].Value != root[i].Value {
				hosts, err := GatherBytes(c, []byte(hostName()))
				if err != nil {
					return err
				}
				return status.Errorf(status.InvalidArgument,
					"%s: %s is %s on rank %d and %s on rank 0: it must be the same on all ranks (rank %d is on host %s, rank 0 on host %s)",
					what, root[i].Name, theirs[i].Value, r, root[i].Value, r, hosts[r], hosts[0])
			}
		}
		return status.Errorf(status.InvalidArgument,
			"%s: rank %d compares %d fields, rank 0 compares %d; start all ranks with the same program", what, r,
			len(theirs), len(root))
	}
	return nil
}

// listDifference returns the error for a list that differs between ranks. It names the first number
// that differs from rank 0's. given: rank 0 has a list. Collective over c.
func listDifference(c Comm, what string, f Field, given bool) error {
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
	case f.list == nil && given:
		mine = fmt.Sprintf("%s is not given on rank %d and has %d entries on rank 0", f.Name, c.Rank(), len(root))
	case f.list != nil && !given:
		mine = fmt.Sprintf("%s has %d entries on rank %d and is not given on rank 0", f.Name, len(f.list), c.Rank())
	default:
		for at < min(len(root), len(f.list)) && root[at] == f.list[at] {
			at++
		}
		switch {
		case at < min(len(root), len(f.list)):
			mine = fmt.Sprintf("%s[%d] is %d on rank %d and %d on rank 0", f.Name, at, f.list[at], c.Rank(), root[at])
		case len(root) != len(f.list):
			mine = fmt.Sprintf("%s has %d entries on rank %d and %d on rank 0", f.Name, len(f.list), c.Rank(),
				len(root))
		}
	}
	all, err := GatherBytes(c, []byte(mine))
	if err != nil {
		return err
	}
	for _, text := range all {
		if len(text) > 0 {
			return status.Errorf(status.InvalidArgument, "%s: %s: it must be the same on all ranks", what, text)
		}
	}
	return status.Errorf(status.Internal, "%s: the hashes of %s differ between ranks, but its entries do not",
		what, f.Name)
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// kind is the byte behind a field in a message of Same.
func (f *Field) kind() byte {
	if f.isList {
		return 1
	}
	return 0
}

func parseFields(b []byte) (fields []Field) {
	word := func() string {
		n, k := binary.Uvarint(b)
		text := string(b[k : k+int(n)])
		b = b[k+int(n):]
		return text
	}
	for len(b) > 0 {
		f := Field{Name: word(), Value: word()}
		f.isList, b = b[0] == 1, b[1:]
		fields = append(fields, f)
	}
	return fields
}

// GatherBytes returns the bytes of all ranks, in rank order, on every rank. Lengths may differ.
// Collective over c.
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
	byRank := make([][]byte, size)
	for r, n := range lengths {
		byRank[r], all = all[:n:n], all[n:]
	}
	return byRank, nil
}

// GatherJSON returns the values of all ranks, in rank order, on every rank. what starts the text of
// an error. Collective over c.
func GatherJSON[T any](c Comm, what string, own T) ([]T, error) {
	text, err := json.Marshal(own)
	if err != nil {
		return nil, status.Errorf(status.Internal, "%s: %w", what, err)
	}
	texts, err := GatherBytes(c, text)
	if err != nil {
		return nil, err
	}
	values := make([]T, len(texts))
	for r := range texts {
		if err := json.Unmarshal(texts[r], &values[r]); err != nil {
			return nil, status.Errorf(status.Comm,
				"%s: the values of rank %d cannot be read: %w; start all ranks with the same program", what, r, err)
		}
	}
	return values, nil
}

// BroadcastBytes returns the root's data on every rank; the data of other ranks is ignored.
// Collective over c.
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
	if h := findBroadcaster(c); h != nil {
		if done, err := h.broadcastBytes(data, root); done || err != nil {
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

// BarrierBeforeSync is called before the host waits for a device stream that may hold kernels of
// NCCL. These kernels wait on the device for the other ranks, for ever if one does not come. The
// barrier is a call that the Watch ends if a rank is late. With other communicators the ranks
// synchronize on the host in each call, and BarrierBeforeSync does nothing. Collective over c.
func BarrierBeforeSync(c Comm) error {
	if c.Kind() != "nccl" || c.Size() == 1 {
		return nil
	}
	return c.Barrier()
}
