package model

import (
	"maps"
	"math"
	"slices"
	"strings"

	"ulysses/internal/input"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Published gpt-oss folders have the matrices of experts in MXFP4 (OCP Microscaling Formats 1.0,
// 2023): for each output, blocks of 32 inputs, 16 bytes each, and a scale for each block. The
// element with the number 2i of a block is the low half of byte i. Its value is that of FP4 (E2M1)
// times 2^(scale - 127). They are read as the numbers that they are, which BF16 holds exactly, and
// written as BF16.
const (
	mxBlocks = "_blocks"
	mxScales = "_scales"
	mxBlock  = 32 // inputs
)

// fp4 are the values of E2M1 by their four bits.
var fp4 = [16]float32{0, 0.5, 1, 1.5, 2, 3, 4, 6, float32(math.Copysign(0, -1)), -0.5, -1, -1.5, -2, -3, -4, -6}

// packed is a matrix of all experts in MXFP4.
type packed struct {
	blocks, scales     *tensor.Entry
	blocksIn, scalesIn *tensor.Safetensors
	kind               string
}

// mxEntry returns the name without its suffix of a tensor of a file that is a part of a matrix in
// MXFP4; ok is false for other tensors.
func (c *Config) mxEntry(name string) (matrix string, scales, ok bool) {
	matrix, scales = strings.CutSuffix(name, mxScales)
	if !scales {
		if matrix, ok = strings.CutSuffix(name, mxBlocks); !ok {
			return "", false, false
		}
	}
	_, kind, ok := c.ossEntry(matrix)
	return matrix, scales, ok && (kind == ossGateUp || kind == ossDown)
}

// addPacked notes a part of a matrix in MXFP4. It returns false for other tensors.
func (f *Folder) addPacked(e tensor.Entry, in *tensor.Safetensors) bool {
	name, scales, ok := f.Config.mxEntry(f.Config.family.files.textName(e.Name))
	if !ok {
		return false
	}
	x := f.packed[name]
	if x == nil {
		x = &packed{}
		f.packed[name] = x
	}
	if _, x.kind, _ = f.Config.ossEntry(name); scales {
		x.scales, x.scalesIn = &e, in
	} else {
		x.blocks, x.blocksIn = &e, in
	}
	return true
}

// locatePacked checks the matrices in MXFP4 and adds the matrix of each expert.
func (f *Folder) locatePacked() error {
	c := f.Config
	for _, name := range slices.Sorted(maps.Keys(f.packed)) { // the same error on all ranks
		x := f.packed[name]
		if x.blocks == nil || x.scales == nil {
			return status.Errorf(status.InvalidConfig,
				"%s: %s has blocks without scales, or scales without blocks; restore the folder", f.Dir,
				input.Short(name))
		}
		layer, _, _ := c.ossEntry(name)
		shape := c.ossShape(x.kind) // [in, out]
		want := []int64{c.Experts.Count, shape[1], shape[0] / mxBlock}
		if shape[0]%mxBlock > 0 || !slices.Equal(x.scales.Shape, want) ||
			!slices.Equal(x.blocks.Shape, append(slices.Clone(want), mxBlock/2)) || x.blocks.DType != tensor.U8 ||
			x.scales.DType != tensor.U8 {
			return status.Errorf(status.InvalidConfig,
				"%s: tensors %v and %v: config.json says U8%v and U8%v; correct one of them", f.Dir, x.blocks, x.scales,
				append(slices.Clone(want), mxBlock/2), want)
		}
		for i := range c.Experts.Count {
			own := ossName(layer, i, x.kind)
			if _, twice := f.where[own]; twice {
				return status.Errorf(status.InvalidConfig,
					"%s: %s is there twice, in MXFP4 and in another type; remove one", f.Dir, input.Short(name))
			}
			f.where[own] = location{file: x.blocksIn,
				entry:  tensor.Entry{Name: own, TypeName: "MXFP4", DType: tensor.BF16, Shape: shape},
				decode: func() ([]float32, error) { return f.unpack(own, x, i) }}
		}
	}
	return nil
}

// unpack returns the matrix [in, out] of an expert, with the columns of gate before the columns of
// up. The last matrix is kept, because it is read in several calls.
func (f *Folder) unpack(name string, x *packed, expert int64) ([]float32, error) {
	if f.unpackedName == name {
		return f.unpacked, nil
	}
	out, blocks := x.scales.Shape[1], x.scales.Shape[2]
	bytes, scales := make([]byte, out*blocks*mxBlock/2), make([]byte, out*blocks)
	if err := x.blocksIn.ReadAt(*x.blocks, expert*int64(len(bytes)), bytes); err != nil {
		return nil, err
	}
	if err := x.scalesIn.ReadAt(*x.scales, expert*int64(len(scales)), scales); err != nil {
		return nil, err
	}
	f.unpackedName = ""
	if n := int(out * blocks * mxBlock); cap(f.unpacked) < n {
		f.unpacked = make([]float32, n)
	} else {
		f.unpacked = f.unpacked[:n]
	}
	for o := range out {
		column := o
		if alternates(x.kind) {
			column = modelColumn(o, out)
		}
		for b := range blocks {
			scale := float32(math.Ldexp(1, int(scales[o*blocks+b])-127))
			if scales[o*blocks+b] == 255 {
				scale = float32(math.NaN())
			}
			for i, pair := range bytes[(o*blocks+b)*mxBlock/2:][:mxBlock/2] {
				at := ((b*mxBlock+2*int64(i))*out + column)
				f.unpacked[at], f.unpacked[at+out] = fp4[pair&15]*scale, fp4[pair>>4]*scale
			}
		}
	}
	f.unpackedName = name
	return f.unpacked, nil
}
