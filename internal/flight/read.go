package flight

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
	"unsafe"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// Call is one operation of a rank. Times are since a moment that all ranks have in common.
type Call struct {
	Op           string
	Group        Group
	Seq          int64 // number of the operation in the group
	Bytes        int64 // that the rank sends
	Control      bool
	Checksum     uint8 // of what must be equal on all ranks; 0 = nothing
	Step         int64
	Began, Ended time.Duration
	InProgress   bool
}

// String returns the operation with its number and group.
func (c *Call) String() string { return fmt.Sprintf("%s #%d on %v", c.Op, c.Seq, c.Group) }

// Rank is the record of one rank.
type Rank struct {
	Rank, Size, PID int
	Host            string
	State           State
	Text            string // the reason of Failed and Late
	Step            int64
	Blames          int           // the rank because of which a call has failed; -1 = none
	Zero            time.Time     // the common moment, by the clock of the rank's host
	Beat            time.Duration // when the process last showed that it runs
	Ended           time.Duration // when the process recorded its end
	Signalled       bool          // a signal that ends processes has come
	Calls           []Call        // the last operations, the oldest first
}

// InProgress returns the oldest operation in progress; nil if there is none.
func (r *Rank) InProgress() *Call {
	for i := range r.Calls {
		if r.Calls[i].InProgress {
			return &r.Calls[i]
		}
	}
	return nil
}

// Last returns the operation that began last; nil if there is none.
func (r *Rank) Last() *Call {
	if len(r.Calls) == 0 {
		return nil
	}
	return &r.Calls[len(r.Calls)-1]
}

// Read reads the file of a rank.
func Read(path string) (*Rank, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, status.Errorf(status.IO, "%w", err)
	}
	var h header
	if len(b) != fileSize || string(b[:8]) != magic {
		return nil, status.Errorf(status.IO, "%s is not a record of the flight recorder; remove it", path)
	}
	if _, err := binary.Decode(b[:headerSize], binary.NativeEndian, &h); err != nil {
		return nil, status.Errorf(status.IO, "%s: %w", path, err)
	}
	if h.Version != version {
		return nil, status.Errorf(status.Unsupported, "%s has version %d; this program reads version %d", path,
			h.Version, version)
	}
	since := func(t int64) time.Duration { return time.Duration(t - h.Zero) }
	r := &Rank{Rank: int(h.Rank), Size: int(h.Size), PID: int(h.PID), Host: text(h.Host[:]), State: State(h.State),
		Text: text(h.Text[:]), Step: h.Step, Blames: int(h.Blames) - 1, Zero: time.Unix(0, h.Wall+h.Zero),
		Beat: since(h.Beat), Ended: since(h.Ended), Signalled: h.Signalled != 0}
	var ring [Capacity]entry
	if _, err := binary.Decode(b[headerSize:], binary.NativeEndian, &ring); err != nil {
		return nil, status.Errorf(status.IO, "%s: %w", path, err)
	}
	slices.SortFunc(ring[:], func(a, b entry) int { return int(int64(a.Number) - int64(b.Number)) })
	name := func(i uint8) string {
		if int(i) >= maxNames {
			return "?"
		}
		return text(h.Name[i][:])
	}
	for _, e := range ring {
		if e.Number == 0 {
			continue // not used, or written just now
		}
		r.Calls = append(r.Calls,
			Call{Op: name(e.Op), Group: Group{name(e.Axis), int(e.First), int(e.Stride), int(e.Size)}, Seq: e.Seq,
				Bytes: e.Bytes, Control: e.Control != 0, Checksum: e.Checksum, Step: e.Step, Began: since(e.Began),
				Ended:      since(e.Ended),
				InProgress: e.Ended == 0})
	}
	return r, nil
}

// text returns the text in a field that ends with zeros.
func text(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return strings.ToValidUTF8(string(b), "?")
}

// maxSize is the largest number of ranks of a run. A larger one, in a damaged file, would make an
// enormous list.
const maxSize = 1 << 20

// ReadFolder reads the records of all ranks in a folder. Element r is the record of rank r, or nil
// if the rank has left none.
func ReadFolder(dir string) ([]*Rank, error) {
	paths := input.Match(dir, "rank-*.flight")
	if len(paths) == 0 {
		return nil, status.Errorf(status.IO,
			"%s has no records of the flight recorder (rank-NNNNN.flight), which a run that ends without a fault removes; name the output.dir of a run that hangs or has failed",
			dir)
	}
	var ranks []*Rank
	for _, path := range paths {
		r, err := Read(path)
		if err != nil {
			return nil, err
		}
		if r.Rank >= r.Size || r.Size > maxSize {
			return nil, status.Errorf(status.IO, "%s is damaged: it has rank %d of %d ranks; remove it", path,
				r.Rank, r.Size)
		}
		for len(ranks) < r.Size {
			ranks = append(ranks, nil)
		}
		ranks[r.Rank] = r
	}
	return ranks, nil
}

// Beats returns a number that changes when any rank shows a sign of life. ok is false if there is
// no record that was written after a time.
func Beats(dir string, after time.Time) (sum int64, ok bool) {
	for _, path := range input.Match(dir, "rank-*.flight") {
		f, err := os.Open(path)
		if err != nil {
			continue
		}
		b := make([]byte, unsafe.Offsetof(header{}.Host))
		_, err = io.ReadFull(f, b)
		f.Close()
		if err != nil || string(b[:8]) != magic {
			continue
		}
		begun := int64(binary.NativeEndian.Uint64(b[unsafe.Offsetof(header{}.Wall):]))
		if time.Unix(0, begun).Before(after.Add(-time.Minute)) { // clocks of hosts differ
			continue // of an earlier run
		}
		sum, ok = sum+int64(binary.NativeEndian.Uint64(b[unsafe.Offsetof(header{}.Beat):])), true
	}
	return sum, ok
}
