package cluster

import (
	"fmt"
	"math"
	"time"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/tensor"
)

// slowDevice is the share of the median speed below which a device is named, the threshold of
// NVIDIA's straggler detection.
const slowDevice = 0.75

// sampleTime is the least time of one of the products' samples.
const sampleTime = 20 * time.Millisecond

// productRate returns the operations per second of a product of two square matrices of the type:
// the best of ten samples.
func productRate(d device.Device, dtype tensor.DType) (rate float64, err error) {
	n := int64(512)
	if d.Info().Place != tensor.Host {
		n = 4096
	}
	var matrices [3]tensor.Tensor
	for i := range matrices {
		b, err := d.Alloc(n * n * dtype.Size())
		if err != nil {
			return 0, err
		}
		defer b.Free()
		matrices[i] = tensor.Of(b.Pointer(), dtype, n, n)
		matrices[i].Where = d.Info().Place
	}
	s, err := d.NewStream()
	if err != nil {
		return 0, err
	}
	defer s.Close()
	for i, x := range matrices[:2] { // a GPU that multiplies zeros needs less power
		if err := d.Fill(s, x, math.Pi/float64(i+4)); err != nil {
			return 0, err
		}
	}
	sample := func(products int) (time.Duration, error) {
		began := time.Now()
		for range products {
			if err := d.Gemm(s, &device.Gemm{A: matrices[0], B: matrices[1], C: matrices[2]}); err != nil {
				return 0, err
			}
		}
		err := s.Sync()
		return max(time.Since(began), time.Nanosecond), err
	}
	products := 1
	for range 12 { // also loads the kernel
		took, err := sample(products)
		if err != nil {
			return 0, err
		}
		if took >= sampleTime {
			break
		}
		products *= 2
	}
	best := time.Duration(math.MaxInt64)
	for range 10 {
		took, err := sample(products)
		if err != nil {
			return 0, err
		}
		best = min(best, took)
	}
	return 2 * float64(n) * float64(n) * float64(n) * float64(products) / best.Seconds(), nil
}

// speeds finds devices that are slower than the others.
func speeds(all []Facts) (found []Finding) {
	var rates []float64
	for _, f := range all {
		if f.Rate > 0 {
			rates = append(rates, f.Rate)
		}
	}
	middle := median(rates)
	for r, f := range all {
		if f.Rate > 0 && f.Rate < slowDevice*middle {
			fix := "look for other processes on its cores, and give each rank cores of its own (srun --cpus-per-task, --cpu-bind=cores)"
			if f.Kind == "cuda" {
				fix = "look for other processes, a power limit or heat with nvidia-smi -q, or leave this node out"
			}
			found = append(found,
				Finding{status.Device, "slow device",
					fmt.Sprintf("%s: %s multiplies matrices with %sFLOP/s, the median is %sFLOP/s; %s",
						who(all, r), f.Device, units.Spaced(f.Rate), units.Spaced(middle), fix)})
		}
	}
	return found
}
