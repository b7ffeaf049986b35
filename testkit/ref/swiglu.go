package ref

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
