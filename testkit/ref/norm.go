package ref

// RMSNorm returns y = x·rstd·(w + centre), rstd = 1/sqrt(mean(x²) + eps), on rows of n: x, y [rows,
// n]; w [n]; rstd [rows] (Zhang & Sennrich 2019, without the optional bias).
func RMSNorm[T Float](n int64, x, w []T, centre T, eps float64) (y, rstd []T) {
	rows := int64(len(x)) / n
	y, rstd = make([]T, len(x)), make([]T, rows)
	for r := range rows {
		xr := x[r*n : (r+1)*n]
		rstd[r] = 1 / sqrt(SumSquares(xr)/T(n)+T(eps))
		for i, v := range xr {
			y[r*n+int64(i)] = v * rstd[r] * (w[i] + centre)
		}
	}
	return y, rstd
}

// RMSNormGrad returns dx [rows, n] and adds to dw [n]. With x̂ = x·rstd and g = dy·(w + centre):
//
//	dx = rstd·(g - x̂·mean(g·x̂)),  dw += Σ_rows dy·x̂
func RMSNormGrad[T Float](n int64, x, w []T, centre T, rstd, dy, dw []T) (dx []T) {
	dx = make([]T, len(x))
	for r, rs := range rstd {
		at := int64(r) * n
		var mean T
		for i := range n {
			mean += dy[at+i] * (w[i] + centre) * x[at+i] * rs
		}
		mean /= T(n)
		for i := range n {
			hat := x[at+i] * rs
			dx[at+i] = rs * (dy[at+i]*(w[i]+centre) - hat*mean)
			dw[i] += dy[at+i] * hat
		}
	}
	return dx
}
