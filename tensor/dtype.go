// Package tensor describes arrays in memory: address, element type, extents and strides. A Tensor
// is a value and owns no memory. The package also reads and writes safetensors files.
package tensor

import "math"

// DType is an element type.
type DType uint8

const (
	Invalid DType = iota
	F32
	BF16
	F16
	F64
	I32
	I64
	U8
)

// dtypes is indexed by DType. The names are the names in the safetensors format.
var dtypes = [...]struct {
	name string
	size int64
}{{"invalid", 0}, {"F32", 4}, {"BF16", 2}, {"F16", 2}, {"F64", 8}, {"I32", 4}, {"I64", 8}, {"U8", 1}}

// Size returns the bytes of an element.
func (d DType) Size() int64 { return dtypes[d].size }

// String returns the name in the safetensors format.
func (d DType) String() string { return dtypes[d].name }

// ParseDType is the inverse of String. It returns Invalid for an unknown name.
func ParseDType(name string) DType {
	for i, d := range dtypes {
		if d.name == name && i > 0 {
			return DType(i)
		}
	}
	return Invalid
}

// BF16ToF32 converts the bits of a bfloat16. The result is exact.
func BF16ToF32(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }

// F32ToBF16 rounds to nearest even; a NaN stays a NaN.
func F32ToBF16(f float32) uint16 {
	u := math.Float32bits(f)
	if f != f {
		return uint16(u>>16) | 0x40
	}
	return uint16((u + 0x7fff + (u>>16)&1) >> 16)
}

// F16ToF32 converts the bits of an IEEE half. The result is exact.
func F16ToF32(h uint16) float32 {
	sign, exp, frac := uint32(h>>15)<<31, int(h>>10)&31, uint32(h&1023)
	switch {
	case exp == 31:
		return math.Float32frombits(sign | 0xff<<23 | frac<<13)
	case exp == 0:
		f := float32(frac) / (1 << 24)
		return math.Float32frombits(math.Float32bits(f) | sign)
	}
	return math.Float32frombits(sign | uint32(exp+112)<<23 | frac<<13)
}
