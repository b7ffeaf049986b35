package cpu

import (
	"fmt"
	"testing"

	"ulysses/device"
	"ulysses/tensor"
)

// BenchmarkAddNorm reports how much longer Add and then RMSNormForward take than AddRMSNorm, by
// processor time, and the rate of AddRMSNorm. Its result overwrites an operand, as in a layer.
func BenchmarkAddNorm(b *testing.B) {
	for _, isa := range ISAs()[:max(1, len(ISAs())-1)] {
		for _, dtype := range []tensor.DType{tensor.F32, tensor.BF16} {
			for _, shape := range [][2]int64{{256, 256}, {2048, 1024}, {8192, 4096}} {
				b.Run(fmt.Sprintf("%s/%v/%dx%d", isa, dtype, shape[0], shape[1]), func(b *testing.B) {
					d := open(b, isa, 2)
					x, y, sum := normal(b, d, dtype, shape[0], shape[1]), normal(b, d, dtype, shape[0], shape[1]),
						normal(b, d, dtype, shape[0], shape[1])
					w, rstd := normal(b, d, dtype, 1, shape[1]).Select(0, 0),
						normal(b, d, tensor.F32, 1, shape[0]).Select(0, 0)
					wall, cpu := best(b, func() error {
						if err := d.Add(nil, sum, x, y); err != nil {
							return err
						}
						return d.RMSNormForward(nil, &device.RMSNorm{X: sum, W: w, Y: y, RStd: rstd, Eps: 1e-5})
					}, func() error {
						return d.AddRMSNorm(nil,
							&device.AddRMSNorm{A: x, B: y, W: w, Sum: sum, Y: y, RStd: rstd, Eps: 1e-5})
					})
					b.ReportMetric(cpu[0]/cpu[1], "two/one")
					b.ReportMetric(wall[0]/wall[1], "two/one-wall")
					b.ReportMetric(float64(4*x.Numel()*dtype.Size())/wall[1]/1e9, "GB/s")
				})
			}
		}
	}
}
