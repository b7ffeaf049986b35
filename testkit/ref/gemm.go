package ref

// Gemm returns a·b (+ bias) (+ c): a [M, K], b [K, N], bias [N] or nil, c [M, N] or nil.
func Gemm[T Float](m, n, k int64, a, b, bias, c []T) []T {
	y := make([]T, m*n)
	for i := range m {
		for j := range n {
			var s T
			for p := range k {
				s += a[i*k+p] * b[p*n+j]
			}
			if bias != nil {
				s += bias[j]
			}
			if c != nil {
				s += c[i*n+j]
			}
			y[i*n+j] = s
		}
	}
	return y
}
