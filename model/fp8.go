package model

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"ulysses/internal/input"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Published folders of DeepSeek-V3, and of other models that end with FP8, have matrices in FP8
// (E4M3; Micikevicius et al. 2022, arXiv:2209.05433) with a scale for each block of 128 x 128
// elements, or for each matrix: X.weight and X.weight_scale_inv. An element is its number times the
// scale of its block. They are read as the numbers that they are, and written as BF16.
// X.activation_scale, by which activations are rounded to FP8, is not read.
const (
	fp8Type        = "F8_E4M3"
	fp8Scales      = "_scale_inv"
	fp8Activations = ".activation_scale"
)

// fp8 are the values of E4M3 by their bits.
var fp8 = func() (values [256]float32) {
	for i := range values {
		exponent, mantissa := i>>3&15, i&7
		x := math.Ldexp(float64(8+mantissa), exponent-10)
		switch {
		case exponent == 0:
			x = math.Ldexp(float64(mantissa), -9)
		case i&127 == 127:
			x = math.NaN()
		}
		if i >= 128 {
			x = -x
		}
		values[i] = float32(x)
	}
	return values
}()

// scaled is a matrix in FP8 with its scales.
type scaled struct {
	matrix, scales     *tensor.Entry
	matrixIn, scalesIn *tensor.Safetensors
	block              [2]int64  // 0 = the whole matrix
	table              []float32 // the scales, once they are read
}

// addScaled notes a tensor of a file that is a matrix in FP8 or its scales. It returns nil for
// other tensors.
func (f *Folder) addScaled(e tensor.Entry, in *tensor.Safetensors) *scaled {
	name, scales := strings.CutSuffix(e.Name, fp8Scales)
	if !f.Config.packing.fp8 || !scales && e.TypeName != fp8Type {
		return nil
	}
	x := f.scaled[name]
	if x == nil {
		x = &scaled{block: f.Config.packing.block}
		f.scaled[name] = x
	}
	if scales {
		x.scales, x.scalesIn = &e, in
	} else {
		x.matrix, x.matrixIn = &e, in
	}
	return x
}

// isScales reports whether a tensor of a file has scales of FP8.
func (c *Config) isScales(name string) bool {
	return c.packing.fp8 && (strings.HasSuffix(name, fp8Scales) || strings.HasSuffix(name, fp8Activations))
}

// checkScaled checks the matrices in FP8.
func (f *Folder) checkScaled() error {
	var faults []string
	for _, name := range slices.Sorted(maps.Keys(f.scaled)) { // the same error on all ranks
		switch x := f.scaled[name]; {
		case f.Config.ignored(f.Config.nameOf(name)):
		case x.matrix == nil:
			faults = append(faults,
				fmt.Sprintf("%s has scales, and is not in %s; restore the folder", input.Short(name), fp8Type))
		case x.scales == nil:
			faults = append(faults,
				fmt.Sprintf("%s%s is missing; restore the folder", input.Short(name), fp8Scales))
		case len(x.matrix.Shape) != 2:
			faults = append(faults, fmt.Sprintf("tensor %v in FP8 is not a matrix", x.matrix))
		case !isFloat(x.scales.DType):
			faults = append(faults, fmt.Sprintf("tensor %v: scales in F32, BF16 and F16 can be read", x.scales))
		default:
			want := x.blocks()
			if slices.Equal(x.scales.Shape, want[:]) || x.block[0] == 0 && x.scales.Numel() == 1 {
				continue
			}
			faults = append(faults,
				fmt.Sprintf("tensor %v: %v has scales of %v (weight_block_size); correct one of them", x.scales,
					x.matrix, want))
		}
	}
	return list(status.InvalidConfig, f.Dir, faults)
}

// size returns the rows and columns of a block, blocks the numbers of rows and columns of blocks.
func (x *scaled) size() (n [2]int64) {
	for i, size := range x.block {
		n[i] = cmp.Or(size, x.matrix.Shape[i], 1)
	}
	return n
}
func (x *scaled) blocks() (n [2]int64) {
	for i, size := range x.size() {
		n[i] = (x.matrix.Shape[i] + size - 1) / size
	}
	return n
}

// read fills dst with elements from at on of a part of the matrix.
func (x *scaled) read(part tensor.Entry, at int64, dst []float32) error {
	block, n, columns := x.size(), x.blocks(), x.matrix.Shape[1]
	if x.table == nil {
		table := make([]float32, n[0]*n[1])
		if err := x.scalesIn.ReadFloat32(*x.scales, 0, table); err != nil {
			return err
		}
		x.table = table
	}
	bytes := make([]byte, len(dst))
	if err := x.matrixIn.ReadAt(part, at, bytes); err != nil {
		return err
	}
	first := part.Offset(*x.matrix) + at // an element is a byte
	row, column := first/columns, first%columns
	for i, b := range bytes {
		dst[i] = fp8[b] * x.table[row/block[0]*n[1]+column/block[1]]
		if column++; column == columns {
			row, column = row+1, 0
		}
	}
	return nil
}
