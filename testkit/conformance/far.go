package conformance

import (
	"fmt"
	"syscall"
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/ref"
)

// reserved is address space in which only accessed pages have memory.
type reserved struct{ memory []byte }

func (r *reserved) Pointer() unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(r.memory)) }
func (r *reserved) Bytes() int64            { return int64(len(r.memory)) }

// Munmap fails only for memory that is not mapped
func (r *reserved) Free() { _ = syscall.Munmap(r.memory) }

func reserve(bytes int64) (device.Buffer, error) {
	m, err := syscall.Mmap(-1, 0, int(bytes), syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_PRIVATE|syscall.MAP_ANON|syscall.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	return &reserved{m}, nil
}

// testFar has strides of more than 2³¹ elements, for which a 32-bit offset overflows. Activations
// of some gigabytes have such strides.
func testFar(s *suite) {
	if s.one.Info().Place != tensor.Host && !s.emulated() {
		s.t.Skipf("SKIPPED: strides beyond 2^31 need sparse memory, which %s does not have", s.one.Info().Name)
	}
	s.t.Setenv("ULYSSES_EMULATED_HOST", "1") // the emulated GPU refuses host memory otherwise
	b, err := reserve(40 << 30)
	if err != nil {
		s.t.Skipf("SKIPPED: strides beyond 2^31 need 40 GiB of address space: %v", err)
	}
	b.Free()
	s.copyCase(tensor.F32, []int64{3, 65}, far, dense)
	s.copyCase(tensor.F32, []int64{3, 65}, dense, far)
	s.copyCase(tensor.F32, []int64{65, 3}, dense, layout{order: []int{1, 0}, far: true})
	s.copyCase(tensor.BF16, []int64{3, 4, 64}, far, headMajor)
	s.typed(func(d tensor.DType, suffix string) {
		s.columnSumCase(d, suffix, 3, 65, far)
		for _, l := range []layout{far, {order: []int{1, 0}, far: true}} {
			s.gemmCase(newGemm(d, d, 3, 3, 3, 0), l, dense)
			s.gemmCase(newGemm(d, d, 3, 3, 3, 2), l, l)
		}
		s.normCase(d, suffix, []int64{3, 65}, far, far, 0, true, false)
		s.normCase(d, suffix, []int64{5, 3, 64}, farHeads, farHeads, 1, false, false)
		s.ropeCase(d, suffix, 3, 2, 64, 64, far, far)
		s.ropeCase(d, suffix, 5, 3, 40, 32, farHeads, farHeads)
		s.swigluCase(d, suffix, 3, 65, far, 0)
		s.embeddingCase(d, suffix, 3, 65, 3, far)
		s.rowsCase(d, suffix, 3, 2, 1, 65, 13, far)
		s.dropoutCase(d, suffix, 3, 65, 0.25, far)
		s.crossEntropyCase(d, suffix, 3, 65, 2, 0, false, far)
		s.gatedNormCase(d, suffix, []int64{3, 65}, far, far, false)
		s.gatedNormCase(d, suffix, []int64{5, 3, 64}, farHeads, farHeads, false)
		s.sigmoidGateCase(d, suffix, []int64{3, 65}, far, far, false)
		s.sigmoidGateCase(d, suffix, []int64{5, 3, 64}, farHeads, farHeads, false)
		s.gatesCase(d, d, suffix, 3, 65, far, false)
		s.convCase(d, suffix, &ref.Conv1d{C: 65, Width: 2, Cu: bounds(1, 2)}, far, true, false)
	})
	for i, l := range []layout{far, farHeads} {
		c := &deltaCase{GatedDelta: ref.GatedDelta{Hk: 3, Hv: 3, Dk: 8, Dv: 5, Cu: bounds(1, 2), L2Norm: true,
			Scale: 0.3, In: 1, Out: 1}}
		g := &ref.Attention{Hq: 3, Hkv: 3, D: 16, Dv: 8, CuQ: one(3), CuK: one(3), Causal: true, Scale: 0.3}
		s.typed(func(d tensor.DType, suffix string) {
			s.deltaCase(d, fmt.Sprint("gated delta ", i, suffix), c, deltaLayouts{l, l, l})
			x := newAttentionInput(d, g, seeded(30))
			s.check(fmt.Sprint("attention ", i, suffix), attentionWant("far"+suffix, g, x),
				func(b *bench) ([]*array, error) { return b.attention(g, x, l, l) })
			all := *g
			s.withOptions(&all, 92, "sinks slopes cap dropout heads", 2, 1)
			x.out, x.lse, x.wide = normal(seeded(31), g.Tq()*g.Hq*g.Dv), normal(seeded(32), g.Tq()*g.Hq), true
			s.check(fmt.Sprint("attention with options ", i, suffix), attentionWant("far with options"+suffix, &all, x),
				func(b *bench) ([]*array, error) { return b.attention(&all, x, l, l) })
		})
	}
}
