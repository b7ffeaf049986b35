package comm

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"ulysses/internal/input"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// File is a file that all ranks read. Ranks on other machines may see another copy of it.
type File struct {
	Name  string // for messages; equal on all ranks
	Path  string
	Parts []Part // ranges of the file, in order; nil = one range
}

// Part is a range of bytes of a file with a name for messages.
type Part struct {
	Name  string
	Bytes int64
}

// SafetensorsFile returns an open file whose parts are its tensors.
func SafetensorsFile(name string, s *tensor.Safetensors) File {
	header, tensors := s.Layout()
	f := File{Name: name, Path: s.Path, Parts: []Part{{"its header", header}}}
	for _, e := range tensors {
		f.Parts = append(f.Parts, Part{"tensor " + e.Name, e.Bytes()})
	}
	return f
}

// unitBytes is the number of bytes of one checksum. round is how long a rank reads before it
// communicates, because the watchdog ends the job if a rank is late.
const (
	unitBytes = 64 << 20
	round     = 20 * time.Second
)

// copies records which ranks see the same copies of the files.
type copies struct {
	hosts []string
	group []int // by rank: the lowest rank that sees the same copies
}

// members returns this rank's position among the ranks that see its copies, and their number.
func (x *copies) members(rank int) (index, n int) {
	for r, g := range x.group {
		if g == x.group[rank] {
			if n++; r < rank {
				index++
			}
		}
	}
	return index, n
}

// Copies returns this rank's position among the ranks that see the same copies of the files, and
// the number of these ranks, which can share the work of reading the files. Two ranks see the same
// copy if the file is on one machine's disk or on one network file system, and has not changed.
// Collective.
func Copies(c Comm, paths ...string) (index, n int, err error) {
	x, err := findCopies(c, paths)
	if err != nil {
		return 0, 0, err
	}
	index, n = x.members(c.Rank())
	return index, n, nil
}

func findCopies(c Comm, paths []string) (*copies, error) {
	var ids []string
	var err error
	for _, p := range paths {
		var info os.FileInfo
		if info, err = input.Stat(p); err != nil {
			err = status.Errorf(status.IO, "%w", err)
			break
		}
		ids = append(ids, identity(p, info))
	}
	if err = Agree(c, err); err != nil {
		return nil, err
	}
	seen := sha256.Sum256([]byte(strings.Join(ids, "\n")))
	all, err := GatherBytes(c, append(seen[:], hostName()...))
	if err != nil {
		return nil, err
	}
	x, first := &copies{}, map[string]int{}
	for r, b := range all {
		id := string(b[:len(seen)])
		if _, ok := first[id]; !ok {
			first[id] = r
		}
		x.hosts, x.group = append(x.hosts, string(b[len(seen):])), append(x.group, first[id])
	}
	return x, nil
}

func hostName() string {
	name, _ := os.Hostname()
	return name
}

// SameFiles returns an error if files are not equal, byte for byte, on all ranks, or if a rank has
// other files than rank 0, or none. key starts the text of the error, which names the file, the
// first part that differs, and a rank and host of either copy. If all ranks see one copy, nothing
// is read. Otherwise every copy is read once, by the ranks that see it together. Collective: all
// ranks return the same error.
func SameFiles(c Comm, key string, files []File) error {
	if c.Size() == 1 {
		return nil
	}
	paths := make([]string, len(files))
	for i, f := range files {
		paths[i] = f.Path
	}
	if err := sameLayout(c, key, files); err != nil {
		return err
	}
	x, err := findCopies(c, paths)
	if err != nil {
		return err
	}
	one := true
	for _, g := range x.group {
		one = one && g == 0
	}
	if one {
		return nil
	}
	units, err := unitsOf(files)
	if err = Agree(c, err); err != nil {
		return err
	}
	index, n := x.members(c.Rank())
	mine, err := sums(c, files, units, index, n)
	if err != nil {
		return err
	}
	all, err := GatherBytes(c, mine)
	if err != nil {
		return err
	}
	return x.compare(key, files, units, all)
}

// layoutEntry describes a file for the comparison between ranks.
type layoutEntry struct {
	Name  string
	Bytes int64
	Parts []Part
}

// sameLayout compares the names, lengths and parts of the files. Collective over c.
func sameLayout(c Comm, key string, files []File) error {
	var list []layoutEntry
	var err error
	for _, f := range files {
		var info os.FileInfo
		if info, err = input.Stat(f.Path); err != nil {
			err = status.Errorf(status.IO, "%s: %w", key, err)
			break
		}
		list = append(list, layoutEntry{f.Name, info.Size(), f.Parts})
	}
	if err = Agree(c, err); err != nil {
		return err
	}
	text, err := json.Marshal(list)
	if err != nil {
		return status.Errorf(status.Internal, "%s: %w", key, err)
	}
	sum := crc32.Checksum(text, castagnoli)
	all, err := GatherBytes(c, append(binary.LittleEndian.AppendUint32(nil, sum), hostName()...))
	if err != nil {
		return err
	}
	other := slices.IndexFunc(all, func(b []byte) bool { return !bytes.Equal(b[:4], all[0][:4]) })
	if other < 0 {
		return nil
	}
	var lists [2][]layoutEntry
	for i, root := range []int{0, other} {
		b, err := BroadcastBytes(c, text, root)
		if err == nil {
			err = json.Unmarshal(b, &lists[i])
		}
		if err != nil {
			return err
		}
	}
	return layoutDifference(key, betweenRanks(0, string(all[0][4:]), other, string(all[other][4:])), lists[0], lists[1])
}

// layoutDifference returns the error for the first file that differs between two ranks.
func layoutDifference(key, between string, first, second []layoutEntry) error {
	name := func(list []layoutEntry, i int) string {
		if i < len(list) {
			return input.Short(list[i].Name)
		}
		return "absent"
	}
	for i := range max(len(first), len(second)) {
		if i >= min(len(first), len(second)) || first[i].Name != second[i].Name {
			return status.Errorf(status.InvalidConfig,
				"%s: the files differ %s: file %d is %s on the first and %s on the second; %s",
				key, between, i+1, name(first, i), name(second, i), copyFix)
		}
		a, b := first[i], second[i]
		difference := "its header"
		if a.Bytes != b.Bytes {
			difference = fmt.Sprintf("it has %d bytes on the first and %d on the second", a.Bytes, b.Bytes)
		} else if fmt.Sprint(a.Parts) == fmt.Sprint(b.Parts) {
			continue
		}
		return status.Errorf(status.InvalidConfig, "%s: %s differs %s: %s; %s", key, input.Short(a.Name), between,
			difference, copyFix)
	}
	return status.Errorf(status.Internal, "%s: the files differ %s", key, between)
}

const copyFix = "copy it to every node again, or put it on a file system that all nodes share"

func betweenRanks(a int, hostA string, b int, hostB string) string {
	return fmt.Sprintf("between rank %d on %s and rank %d on %s", a, hostA, b, hostB)
}

// unit is the range of one checksum: a part of a file, or a range of a large part.
type unit struct {
	file   int
	part   string
	lo, hi int64
}

func unitsOf(files []File) (all []unit, err error) {
	for i, f := range files {
		info, err := input.Stat(f.Path)
		if err != nil {
			return nil, status.Errorf(status.IO, "%w", err)
		}
		at := int64(0)
		add := func(name string, end int64) {
			for at < end {
				hi := min(end, at+unitBytes)
				all = append(all, unit{i, name, at, hi})
				at = hi
			}
		}
		for _, p := range f.Parts {
			add(p.Name, min(at+p.Bytes, info.Size()))
		}
		add("", info.Size())
	}
	return all, nil
}

// sums reads the units whose number mod n is index, and returns their numbers and checksums.
// Collective: ranks communicate at intervals.
func sums(c Comm, files []File, units []unit, index, n int) (mine []byte, err error) {
	buffer := make([]byte, 1<<20)
	var f *os.File
	open := -1
	defer func() {
		if f != nil {
			f.Close()
		}
	}()
	one := func(u unit) (crc uint32, err error) {
		if u.file != open {
			if f != nil {
				f.Close()
			}
			open = -1
			if f, _, err = input.Open(files[u.file].Path); err != nil {
				f = nil
				return 0, err
			}
			open = u.file
		}
		h := crc32.New(castagnoli)
		_, err = io.CopyBuffer(struct{ io.Writer }{h}, struct{ io.Reader }{io.NewSectionReader(f, u.lo, u.hi-u.lo)},
			buffer)
		return h.Sum32(), err
	}
	for at := index; ; {
		var failed error
		for end := time.Now().Add(round); at < len(units) && failed == nil && time.Now().Before(end); at += n {
			var crc uint32
			if crc, failed = one(units[at]); failed != nil {
				failed = status.Errorf(status.IO, "%s: %w", files[units[at].file].Path, failed)
			}
			mine = binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint64(mine, uint64(at)), crc)
		}
		if err := Agree(c, failed); err != nil {
			return nil, err
		}
		more := []byte{0}
		if at < len(units) {
			more[0] = 1
		}
		all, err := GatherBytes(c, more)
		if err != nil || bytes.IndexByte(bytes.Join(all, nil), 1) < 0 {
			return mine, err
		}
	}
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// compare collects the checksums of each group and returns the first unit that differs from rank
// 0's.
func (x *copies) compare(key string, files []File, units []unit, all [][]byte) error {
	groups := map[int][]uint32{}
	for r, b := range all {
		g := x.group[r]
		if groups[g] == nil {
			groups[g] = make([]uint32, len(units))
		}
		for ; len(b) > 0; b = b[12:] {
			groups[g][binary.LittleEndian.Uint64(b)] = binary.LittleEndian.Uint32(b[8:])
		}
	}
	for i, u := range units {
		for g := range x.group {
			if own, ok := groups[g]; !ok || own[i] == groups[0][i] {
				continue
			}
			what := fmt.Sprintf("bytes %d to %d", u.lo, u.hi)
			if u.part != "" {
				what = input.Short(u.part)
			}
			return status.Errorf(status.InvalidConfig, "%s: %s differs %s: %s; %s", key,
				input.Short(files[u.file].Name), betweenRanks(0, x.hosts[0], g, x.hosts[g]), what, copyFix)
		}
	}
	return nil
}
