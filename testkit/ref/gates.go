package ref

import "math"

// softplus returns log(1 + e^x) and its derivative. As in PyTorch, it is x above 20.
func softplus[T Float](x T) (y, slope T) {
	if x > 20 {
		return x, 1
	}
	return T(math.Log1p(math.Exp(float64(x)))), 1 / (1 + exp(-x))
}

// DeltaGates returns g = -e^alog·softplus(a + bias), beta = 1/(1 + e^-b): a, b [T, H], alog and
// bias [H].
func DeltaGates[T Float](a, b, alog, bias []T) (g, beta []T) {
	g, beta = make([]T, len(a)), make([]T, len(a))
	for i := range a {
		h := i % len(alog)
		y, _ := softplus(a[i] + bias[h])
		g[i], beta[i] = -exp(alog[h])*y, 1/(1+exp(-b[i]))
	}
	return g, beta
}

// DeltaGatesGrad is the derivative of DeltaGates. It adds to dalog and dbias [H].
func DeltaGatesGrad[T Float](a, b, alog, bias, dg, dbeta, dalog, dbias []T) (da, db []T) {
	da, db = make([]T, len(a)), make([]T, len(a))
	for i := range a {
		h := i % len(alog)
		y, slope := softplus(a[i] + bias[h])
		sigmoid := 1 / (1 + exp(-b[i]))
		da[i], db[i] = -dg[i]*exp(alog[h])*slope, dbeta[i]*sigmoid*(1-sigmoid)
		dalog[h] -= dg[i] * exp(alog[h]) * y
		dbias[h] += da[i]
	}
	return da, db
}

// SigmoidGate returns y = x/(1 + e^-gate), element by element.
func SigmoidGate[T Float](x, gate []T) []T {
	y := make([]T, len(x))
	for i, g := range gate {
		y[i] = x[i] / (1 + exp(-g))
	}
	return y
}

// SigmoidGateGrad is the derivative of SigmoidGate.
func SigmoidGateGrad[T Float](x, gate, dy []T) (dx, dgate []T) {
	dx, dgate = make([]T, len(x)), make([]T, len(x))
	for i, g := range gate {
		sigmoid := 1 / (1 + exp(-g))
		dx[i], dgate[i] = dy[i]*sigmoid, dy[i]*x[i]*sigmoid*(1-sigmoid)
	}
	return dx, dgate
}

// GatedRMSNorm returns y = RMSNorm(x)·silu(gate) over lines of n: x, gate, y [rows, n]; w [n]; rstd
// [rows].
func GatedRMSNorm[T Float](n int64, x, gate, w []T, eps float64) (y, rstd []T) {
	y, rstd = RMSNorm(n, x, w, 0, eps)
	return SwiGLU(gate, y), rstd
}

// GatedRMSNormGrad returns dx and dgate [rows, n] and adds to dw [n]: the derivative of the
// product, then of the norm.
func GatedRMSNormGrad[T Float](n int64, x, gate, w, rstd, dy, dw []T) (dx, dgate []T) {
	y := make([]T, len(x))
	for i := range x {
		y[i] = x[i] * rstd[int64(i)/n] * w[int64(i)%n]
	}
	dgate, dnorm := SwiGLUGrad(gate, y, dy)
	return RMSNormGrad(n, x, w, 0, rstd, dnorm, dw), dgate
}
