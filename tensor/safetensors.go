package tensor

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"slices"
	"sort"
	"unsafe"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// maxHeader is the format's limit on the JSON header, in bytes.
const maxHeader = 100 << 20

// foreign has the bytes of element types of the format that this program does not compute with.
var foreign = map[string]int64{"BOOL": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2,
	"U32": 4, "U64": 8, "C64": 8}

// Entry is one tensor of a safetensors file.
type Entry struct {
	Name     string
	TypeName string // as written in the file
	DType    DType  // Invalid for a type that this program does not compute with
	Shape    []int64
	lo, hi   int64 // bytes after the header
}

// Numel returns the number of elements.
func (e Entry) Numel() int64 {
	n := int64(1)
	for _, d := range e.Shape {
		n *= d
	}
	return n
}

// Bytes returns the size of the elements in the file.
func (e Entry) Bytes() int64 { return e.hi - e.lo }

// Part returns the elements from `from` on as an entry of a name and shape. They must be elements
// of e.
func (e Entry) Part(name string, from int64, shape ...int64) Entry {
	part := e
	part.Name, part.Shape = name, shape
	size := e.Bytes() / max(1, e.Numel())
	part.lo = e.lo + from*size
	part.hi = part.lo + part.Numel()*size
	if from < 0 || part.hi > e.hi {
		panic(fmt.Sprintf("tensor.Part: %v from %d on is outside of %v", part, from, e))
	}
	return part
}

// Offset returns the bytes of whole before e, which is a part of it.
func (e Entry) Offset(whole Entry) int64 { return e.lo - whole.lo }

func (e Entry) String() string {
	return fmt.Sprintf("%s %s%s", input.Short(e.Name), input.Short(e.TypeName), list(e.Shape))
}

// Safetensors is an open file of the safetensors format (huggingface/safetensors): an 8-byte
// little-endian header length, a JSON header, then the tensors' bytes without gaps. OpenSafetensors
// checks all offsets, so reads stay inside the file.
type Safetensors struct {
	Path     string
	Metadata map[string]string
	entries  []Entry // by name
	file     *os.File
	data     int64
}

// OpenSafetensors opens a file, and reads and checks its header. The error names the file and the
// tensor.
func OpenSafetensors(path string) (*Safetensors, error) {
	f, size, err := input.OpenContent(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, status.Errorf(status.IO, "%s: no such file", path)
	} else if err != nil {
		return nil, status.Errorf(status.IO, "%s: cannot be opened: %w", path, err)
	}
	s := &Safetensors{Path: path, file: f}
	if err := s.readHeader(size); err != nil {
		f.Close()
		return nil, status.Errorf(status.InvalidConfig, "%s: not a usable safetensors file: %w", path, err)
	}
	return s, nil
}

func (s *Safetensors) readHeader(size int64) error {
	var length [8]byte
	if size < 8 {
		return fmt.Errorf("%d bytes are too few for a header; the file is truncated or has another format", size)
	}
	if _, err := s.file.ReadAt(length[:], 0); err != nil {
		return err
	}
	n := binary.LittleEndian.Uint64(length[:])
	if n > uint64(size-8) {
		return fmt.Errorf(
			"the header is %d bytes long, but only %d follow its length; the file is truncated or has another format",
			n, size-8)
	}
	if n > maxHeader {
		return fmt.Errorf("the header is %d bytes long, the format allows %d", n, maxHeader)
	}
	header := make([]byte, n)
	if _, err := s.file.ReadAt(header, 8); err != nil {
		return err
	}
	s.data = 8 + int64(n)
	return s.parse(header, size-s.data)
}

// parse reads the JSON object token by token, because a map would silently drop duplicate names.
func (s *Safetensors) parse(header []byte, size int64) error {
	d := json.NewDecoder(bytes.NewReader(header))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return errors.New("the header is not a JSON object")
	}
	seen := map[string]bool{}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return fmt.Errorf("the header is not valid JSON: %w", err)
		}
		name := key.(string)
		if seen[name] {
			return fmt.Errorf("tensor %s is listed twice", input.Quote(name))
		}
		seen[name] = true
		if name == "__metadata__" {
			if err := decode(d, &s.Metadata); err != nil {
				return fmt.Errorf("__metadata__ is not a map of strings: %w", err)
			}
			continue
		}
		var e struct {
			DType   string  `json:"dtype"`
			Shape   []int64 `json:"shape"`
			Offsets []int64 `json:"data_offsets"`
		}
		if err := decode(d, &e); err != nil {
			return fmt.Errorf("tensor %s: %w", input.Quote(name), err)
		}
		entry := Entry{Name: name, TypeName: e.DType, DType: ParseDType(e.DType), Shape: e.Shape}
		if len(e.Offsets) != 2 {
			return fmt.Errorf("tensor %s: data_offsets must be two numbers", input.Quote(name))
		}
		entry.lo, entry.hi = e.Offsets[0], e.Offsets[1]
		if err := entry.check(size); err != nil {
			return fmt.Errorf("tensor %s: %w", input.Quote(name), err)
		}
		s.entries = append(s.entries, entry)
	}
	if _, err := d.Token(); err != nil {
		return fmt.Errorf("the header is not valid JSON: %w", err)
	}
	if rest, _ := io.ReadAll(d.Buffered()); len(bytes.TrimSpace(rest)) > 0 {
		return errors.New("the header has text after its JSON object")
	}
	return s.checkLayout(size)
}

// decode reads the next value of the header. An object with a duplicate key is an error.
func decode(d *json.Decoder, v any) error {
	var raw json.RawMessage
	if err := d.Decode(&raw); err != nil {
		return err
	}
	return input.JSON(raw, v)
}

func (e Entry) check(size int64) error {
	width := e.DType.Size()
	if e.DType == Invalid {
		var ok bool
		if width, ok = foreign[e.TypeName]; !ok {
			return fmt.Errorf("unknown dtype %s", input.Quote(e.TypeName))
		}
	}
	if len(e.Shape) > MaxDims {
		return fmt.Errorf("%d dimensions, at most %d are supported", len(e.Shape), MaxDims)
	}
	n := width
	for _, d := range e.Shape {
		if d < 0 {
			return fmt.Errorf("shape %v has a negative extent", e.Shape)
		}
		if d > 0 && n > math.MaxInt64/d {
			return fmt.Errorf("shape %v overflows", e.Shape)
		}
		n *= d
	}
	switch {
	case e.lo < 0 || e.hi < e.lo || e.hi > size:
		return fmt.Errorf("data_offsets [%d, %d] are outside the %d bytes of data; the file is truncated or damaged",
			e.lo, e.hi, size)
	case e.hi-e.lo != n:
		return fmt.Errorf("data_offsets [%d, %d] hold %d bytes, shape %v of %s needs %d", e.lo, e.hi, e.hi-e.lo,
			e.Shape, e.TypeName, n)
	}
	return nil
}

// checkLayout checks that the tensors' bytes follow each other without overlaps and gaps, up to the
// end of the file.
func (s *Safetensors) checkLayout(size int64) error {
	sort.Slice(s.entries, func(i, j int) bool {
		a, b := s.entries[i], s.entries[j]
		return a.lo < b.lo || a.lo == b.lo && a.hi < b.hi
	})
	end, before := int64(0), "the header"
	for _, e := range s.entries {
		if e.lo < end {
			return fmt.Errorf("tensors %s and %s overlap at byte %d", input.Quote(before), input.Quote(e.Name), e.lo)
		}
		if e.lo > end {
			return fmt.Errorf("%d unused bytes before tensor %s", e.lo-end, input.Quote(e.Name))
		}
		end, before = e.hi, e.Name
	}
	if end != size {
		return fmt.Errorf("the file has %d bytes of data, its tensors have %d; it is damaged", size, end)
	}
	sort.Slice(s.entries, func(i, j int) bool { return s.entries[i].Name < s.entries[j].Name })
	return nil
}

// Close closes the file.
func (s *Safetensors) Close() error { return s.file.Close() }

// Content returns the bytes of the file that was opened, also if its name is of another file now.
func (s *Safetensors) Content() (*io.SectionReader, error) {
	info, err := s.file.Stat()
	if err != nil {
		return nil, err
	}
	return io.NewSectionReader(s.file, 0, info.Size()), nil
}

// Entries returns the tensors, sorted by name.
func (s *Safetensors) Entries() []Entry { return s.entries }

// Layout returns the size of the header in bytes, and the tensors in the order of their bytes,
// without gaps.
func (s *Safetensors) Layout() (header int64, inOrder []Entry) {
	inOrder = slices.Clone(s.entries)
	slices.SortFunc(inOrder, func(a, b Entry) int { return cmp.Or(cmp.Compare(a.lo, b.lo), cmp.Compare(a.hi, b.hi)) })
	return s.data, inOrder
}

// Entry returns the tensor of a name.
func (s *Safetensors) Entry(name string) (Entry, bool) {
	i := sort.Search(len(s.entries), func(i int) bool { return s.entries[i].Name >= name })
	if i == len(s.entries) || s.entries[i].Name != name {
		return Entry{}, false
	}
	return s.entries[i], true
}

// ReadAt fills dst with the bytes of e in the file, from element start on. The length of dst is a
// multiple of the element size.
func (s *Safetensors) ReadAt(e Entry, start int64, dst []byte) error {
	width := (e.hi - e.lo) / max(1, e.Numel())
	lo := e.lo + start*width
	if start < 0 || lo+int64(len(dst)) > e.hi {
		return status.Errorf(status.Internal, "%s: read past tensor %v", s.Path, e)
	}
	if _, err := s.file.ReadAt(dst, s.data+lo); err != nil {
		return status.Errorf(status.IO, "%s: tensor %s cannot be read: %w", s.Path, input.Short(e.Name), err)
	}
	return nil
}

// ReadFloat32 fills dst with the elements of e from element start on, converted to F32. The type of
// e is F32, BF16, F16 or F64.
func (s *Safetensors) ReadFloat32(e Entry, start int64, dst []float32) error {
	if e.DType == F32 {
		return s.ReadAt(e, start, unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(dst))), 4*len(dst)))
	}
	return s.convert(e, start, int64(len(dst)), "floats", map[DType]func(i int64, b []byte){
		BF16: func(i int64, b []byte) { dst[i] = BF16ToF32(binary.LittleEndian.Uint16(b)) },
		F16:  func(i int64, b []byte) { dst[i] = F16ToF32(binary.LittleEndian.Uint16(b)) },
		F64:  func(i int64, b []byte) { dst[i] = float32(math.Float64frombits(binary.LittleEndian.Uint64(b))) },
	})
}

// ReadInt64 fills dst with the elements of e from element start on. The type of e is I32, I64 or
// U8.
func (s *Safetensors) ReadInt64(e Entry, start int64, dst []int64) error {
	return s.convert(e, start, int64(len(dst)), "integers", map[DType]func(i int64, b []byte){
		I32: func(i int64, b []byte) { dst[i] = int64(int32(binary.LittleEndian.Uint32(b))) },
		I64: func(i int64, b []byte) { dst[i] = int64(binary.LittleEndian.Uint64(b)) },
		U8:  func(i int64, b []byte) { dst[i] = int64(b[0]) },
	})
}

// convert reads elements through a buffer of at most 65536 elements, and calls the function of
// their type for each.
func (s *Safetensors) convert(e Entry, start, n int64, want string, table map[DType]func(int64, []byte)) error {
	put, ok := table[e.DType]
	if !ok {
		return status.Errorf(status.InvalidConfig, "%s: tensor %s is %s, %s are needed", s.Path, input.Short(e.Name),
			input.Short(e.TypeName), want)
	}
	width := e.DType.Size()
	buffer := make([]byte, min(n, 1<<16)*width)
	for i := int64(0); i < n; {
		b := buffer[:min(n-i, 1<<16)*width]
		if err := s.ReadAt(e, start+i, b); err != nil {
			return err
		}
		for ; len(b) > 0; b, i = b[width:], i+1 {
			put(i, b)
		}
	}
	return nil
}
