package cpu

/*
#include "kernels/kernels.h"
*/
import "C"

import (
	"time"
	"unsafe"
)

// PeakFMA measures the rate of independent multiply-adds in registers, in GFLOP/s, on a number of
// workers. Benchmarks compare the rates of operations with it. isa is as in Options. It takes about
// a tenth of a second.
func PeakFMA(workers int, isa string) (float64, error) { return peak(workers, isa, 0) }

// PeakDot is PeakFMA for products of BF16. Without VDPBF16PS the rate is that of PeakFMA.
func PeakDot(workers int, isa string) (float64, error) { return peak(workers, isa, 1) }

func peak(workers int, isa string, bf16 C.int64_t) (float64, error) {
	o, err := New(Options{Workers: workers, ISA: isa})
	if err != nil {
		return 0, err
	}
	d := o.(*Device)
	defer d.Close()
	n := int64(d.workers)
	sink, err := d.Alloc(4 * n)
	if err != nil {
		return 0, err
	}
	defer sink.Free()
	const rounds, chains = 400_000, 12 // some milliseconds for each task
	best := 0.0
	for range 9 {
		a := (*C.peak_args)(d.args)
		*a = C.peak_args{bf16: bf16, rounds: rounds, sink: (*C.float)(unsafe.Pointer(sink.Pointer()))}
		start := time.Now()
		if err := d.run(C.K_peak, n); err != nil {
			return 0, err
		}
		flops := 2 * rounds * chains * float64(d.table.lanes) * float64(n)
		if bf16 == 1 {
			flops *= float64(d.table.pair)
		}
		best = max(best, flops/time.Since(start).Seconds()/1e9)
	}
	return best, nil
}
