package ref

import "math"

// SwiGLU returns y = silu(gate)·up, silu(x) = x/(1 + e^-x), element by element (Shazeer 2020).
func SwiGLU[T Float](gate, up []T) []T {
	y := make([]T, len(gate))
	for i, g := range gate {
		y[i] = g / (1 + exp(-g)) * up[i]
	}
	return y
}

// SwiGLUGrad is the derivative of SwiGLU. With σ = 1/(1 + e^-gate), silu' = σ·(1 + gate·(1 - σ)).
func SwiGLUGrad[T Float](gate, up, dy []T) (dgate, dup []T) {
	dgate, dup = make([]T, len(gate)), make([]T, len(gate))
	for i, g := range gate {
		s := 1 / (1 + exp(-g))
		dgate[i] = dy[i] * up[i] * s * (1 + g*(1-s))
		dup[i] = dy[i] * g * s
	}
	return dgate, dup
}

// geluSigmoid returns the argument z of GELU's approximation x·σ(z), which equals
// x/2·(1 + tanh(z/2)) (Hendrycks & Gimpel 2016), and the derivative of z.
func geluSigmoid[T Float](x T) (z, slope T) {
	const a = 0.044715
	f := T(2 * math.Sqrt(2/math.Pi))
	return f * (x + a*x*x*x), f * (1 + 3*a*x*x)
}

// GELUGate returns y = gelu(gate)·up.
func GELUGate[T Float](gate, up []T) []T {
	y := make([]T, len(gate))
	for i, g := range gate {
		z, _ := geluSigmoid(g)
		y[i] = g / (1 + exp(-z)) * up[i]
	}
	return y
}

// GELUGateGrad is the derivative of GELUGate. gelu' = σ·(1 + gate·z'·(1 - σ)).
func GELUGateGrad[T Float](gate, up, dy []T) (dgate, dup []T) {
	dgate, dup = make([]T, len(gate)), make([]T, len(gate))
	for i, g := range gate {
		z, slope := geluSigmoid(g)
		s := 1 / (1 + exp(-z))
		dgate[i] = dy[i] * up[i] * s * (1 + g*slope*(1-s))
		dup[i] = dy[i] * g * s
	}
	return dgate, dup
}
