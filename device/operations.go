package device

import (
	"fmt"
	"reflect"
	"strings"
	"unsafe"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// The operations as data. The only list of the operations is the interface Ops: each method that
// takes a Stream and returns an error is one. Its arguments are a struct of this package, whose
// fields are the same bytes in C. The tag `op` of a field says how the operation uses a tensor or a
// list:
//
//	in, out         the operation reads or writes the tensor
//	in=F, out=F     ... only if the bool field F of the same struct is set
//	add             the operation adds to the tensor (gradients of weights)
//	scratch         the contents are undefined before and after
//	optional        the tensor may be absent
//	host            the tensor may be in host memory
//	documents       a list of boundaries of documents, with at least one entry; all such lists
//	                of a call have the same length
//	shifts          a list with one entry for each document, or nil
//	heads=T         a list with one entry for each head (axis 1) of the tensor T, or nil
//	unused=T        of an embedded struct: the operation does not use its tensor T
//
// The arguments of a gradient embed the arguments of the forward operation. The gradient reads all
// their tensors.
//
// `make generate` (device/generate) writes two files from the interface and the structs: calls.go
// here, and cuda/operations.h, which has the enum, the names, the structs and their sizes in C. Go
// is the source because the structs are used from Go, their comments are the specification, and
// package reflect gives their layout. A test fails if a generated file is not up to date.

// Op is the number of an operation, the same in Go and in C.
type Op int32

// Operation describes one operation.
type Operation struct {
	Name     string // of the method of Ops
	Args     reflect.Type
	Size     int64 // bytes of Args
	Operands []Operand
	Lists    []List

	call func(d Ops, s Stream, args unsafe.Pointer) error
}

// Call runs the operation on a device. args points to a value of type Args.
func (o *Operation) Call(d Ops, s Stream, args unsafe.Pointer) error { return o.call(d, s, args) }

// Operand is one tensor of an operation.
type Operand struct {
	Name        string
	In, Out     bool // read, written; on the conditions ifIn, ifOut, if these are set
	Add         bool // added to
	Scratch     bool
	Optional    bool
	Host        bool // may be in host memory
	Unused      bool
	offset      uintptr
	ifIn, ifOut flagAt
}

// flagAt is the offset of a bool field; 0 = there is no condition, as no such field is the first of
// its struct.
type flagAt uintptr

func (f flagAt) set(args unsafe.Pointer) bool {
	return f == 0 || *(*bool)(unsafe.Add(args, uintptr(f)))
}

// Tensor returns the operand in args, a value of type Operation.Args.
func (p *Operand) Tensor(args unsafe.Pointer) *tensor.Tensor {
	return (*tensor.Tensor)(unsafe.Add(args, p.offset))
}

// Passes returns how many times a call with these arguments passes over the operand's memory: once
// for each of reading, writing and adding; 0 for scratch, an unused operand and an absent one.
func (p *Operand) Passes(args unsafe.Pointer) int64 {
	if p.Unused || p.Scratch || p.Tensor(args).IsNil() {
		return 0
	}
	n := int64(0)
	for _, yes := range [...]bool{p.In && p.ifIn.set(args), p.Out && p.ifOut.set(args), p.Add} {
		if yes {
			n++
		}
	}
	return n
}

// List is a slice, or a pointer to a Window, in host memory. It has the same bytes in Go and C: the
// address, and for a slice the length and the capacity.
type List struct {
	Name      string
	Documents bool  // boundaries of documents
	shifts    bool  // one entry for each document
	entry     int64 // bytes; 0 = a pointer
	heads     string
	of        uintptr // the tensor whose heads are counted, where heads is set
	offset    uintptr
	elem      reflect.Type
}

// Data returns the address of the list in args, or nil if the list is nil or empty.
func (l *List) Data(args unsafe.Pointer) unsafe.Pointer {
	if l.entry > 0 && l.len(args) == 0 {
		return nil
	}
	return *(*unsafe.Pointer)(unsafe.Add(args, l.offset))
}

// len is the length of a slice.
func (l *List) len(args unsafe.Pointer) int64 {
	return int64(len(*(*[]struct{})(unsafe.Add(args, l.offset))))
}

func (l *List) isNil(args unsafe.Pointer) bool {
	return *(*unsafe.Pointer)(unsafe.Add(args, l.offset)) == nil
}

// Check checks the lengths of the lists in args. sizesOnly: the call asks only for sizes, for which
// documents may be nil.
func (o *Operation) Check(args unsafe.Pointer, sizesOnly bool) error {
	var first *List
	for i := range o.Lists {
		l := &o.Lists[i]
		switch {
		case l.Documents && l.len(args) == 0 && !(sizesOnly && l.isNil(args)):
			return status.Errorf(status.InvalidArgument, "%s is empty; it must go from 0 to the number of tokens",
				l.Name)
		case l.Documents && first == nil:
			first = l
		case l.Documents && l.len(args) != first.len(args):
			return status.Errorf(status.InvalidArgument, "%s has %d documents, %s has %d; they must agree", first.Name,
				first.len(args)-1, l.Name, l.len(args)-1)
		case l.shifts && !l.isNil(args) && first != nil && !first.isNil(args) && l.len(args) != first.len(args)-1:
			return status.Errorf(status.InvalidArgument,
				"%s has %d documents, %s has %d entries; pass one entry for each document", first.Name,
				first.len(args)-1, l.Name, l.len(args))
		case l.heads != "" && !l.isNil(args):
			if heads := (*tensor.Tensor)(unsafe.Add(args, l.of)).Shape[1]; l.len(args) != heads {
				return status.Errorf(status.InvalidArgument,
					"%s has %d entries, %s has %d heads; pass one entry for each head", l.Name, l.len(args),
					l.heads, heads)
			}
		}
	}
	return nil
}

// Clone returns a copy of args with copies of its lists.
func (o *Operation) Clone(args unsafe.Pointer) unsafe.Pointer {
	v := reflect.New(o.Args)
	v.Elem().Set(reflect.NewAt(o.Args, args).Elem())
	to := v.UnsafePointer()
	for _, l := range o.Lists {
		field := reflect.NewAt(l.elem, unsafe.Add(to, l.offset)).Elem()
		switch {
		case field.IsNil():
		case l.entry == 0:
			x := reflect.New(l.elem.Elem())
			x.Elem().Set(field.Elem())
			field.Set(x)
		default:
			x := reflect.MakeSlice(l.elem, field.Len(), field.Len())
			reflect.Copy(x, field)
			field.Set(x)
		}
	}
	return to
}

// operation describes an operation from its arguments, a zero value.
func operation(name string, args any, call func(d Ops, s Stream, args unsafe.Pointer) error) Operation {
	t := reflect.TypeOf(args)
	o := Operation{Name: name, Args: t, Size: int64(t.Size()), call: call}
	o.add(t, 0, "")
	return o
}

var tensorType = reflect.TypeFor[tensor.Tensor]()

// add appends the operands and lists of a struct at an offset. unused is the name of an operand
// that the operation does not use; it is "-" for an embedded struct without one.
func (o *Operation) add(t reflect.Type, base uintptr, unused string) {
	field := func(name string) uintptr {
		f, ok := t.FieldByName(name)
		if !ok {
			panic(fmt.Sprintf("device: %v has no field %s", t, name))
		}
		return base + f.Offset
	}
	for i := range t.NumField() {
		f := t.Field(i)
		at := base + f.Offset
		switch {
		case f.Anonymous:
			skip, ok := strings.CutPrefix(f.Tag.Get("op"), "unused=")
			if !ok {
				skip = "-"
			}
			o.add(f.Type, at, skip)
		case f.Type == tensorType:
			p := newOperand(t, f, field)
			p.offset, p.Unused = at, f.Name == unused
			if unused != "" && !p.Scratch {
				p.In, p.Out, p.Add, p.ifIn = true, false, false, 0
			}
			o.Operands = append(o.Operands, p)
		case f.Type.Kind() == reflect.Slice, f.Type.Kind() == reflect.Pointer:
			l := newList(t, f, field)
			l.offset = at
			o.Lists = append(o.Lists, l)
		}
	}
}

// newOperand returns the operand of a tensor field, from its tag. field returns the offset of a
// field in the arguments.
func newOperand(t reflect.Type, f reflect.StructField, field func(name string) uintptr) Operand {
	p := Operand{Name: f.Name}
	for word := range strings.SplitSeq(f.Tag.Get("op"), ",") {
		what, flag, conditional := strings.Cut(word, "=")
		var condition flagAt
		if conditional {
			condition = flagAt(field(flag))
		}
		switch what {
		case "in":
			p.In, p.ifIn = true, condition
		case "out":
			p.Out, p.ifOut = true, condition
		case "add":
			p.Add = true
		case "scratch":
			p.Scratch = true
		case "optional":
			p.Optional = true
		case "host":
			p.Host = true
		default:
			panic(fmt.Sprintf("device: %v.%s: the tag op has %q", t, f.Name, word))
		}
	}
	return p
}

// newList returns the list of a slice or pointer field, from its tag.
func newList(t reflect.Type, f reflect.StructField, field func(name string) uintptr) List {
	l := List{Name: f.Name, elem: f.Type}
	if f.Type.Kind() == reflect.Slice {
		l.entry = int64(f.Type.Elem().Size())
	}
	tag := f.Tag.Get("op")
	switch what, of, _ := strings.Cut(tag, "="); what {
	case "documents":
		l.Documents = true
	case "shifts":
		l.shifts = true
	case "heads":
		l.heads, l.of = of, field(of)
	case "":
	default:
		panic(fmt.Sprintf("device: %v.%s: the tag op is %q", t, f.Name, tag))
	}
	return l
}
