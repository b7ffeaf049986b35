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

// ClampedGate returns y = g·σ(1.702·g)·(u + 1), the activation of gpt-oss, with g = min(gate, 7)
// and u = min(max(up, -7), 7).
func ClampedGate[T Float](gate, up []T) []T {
	y := make([]T, len(gate))
	for i := range gate {
		g, u := min(gate[i], 7), min(max(up[i], -7), 7)
		y[i] = g / (1 + exp(-1.702*g)) * (u + 1)
	}
	return y
}

// ClampedGateGrad is the derivative of ClampedGate. It is 0 where a limit is reached.
func ClampedGateGrad[T Float](gate, up, dy []T) (dgate, dup []T) {
	dgate, dup = make([]T, len(gate)), make([]T, len(gate))
	for i := range gate {
		g, u := min(gate[i], 7), min(max(up[i], -7), 7)
		s := 1 / (1 + exp(-1.702*g))
		if gate[i] < 7 {
			dgate[i] = dy[i] * (u + 1) * s * (1 + 1.702*g*(1-s))
		}
		if up[i] < 7 && up[i] > -7 {
			dup[i] = dy[i] * g * s
		}
	}
	return dgate, dup
}

// Form is a form of SwiGLU, with its derivative.
type Form[T Float] struct {
	Gate func(gate, up []T) []T
	Grad func(gate, up, dy []T) (dgate, dup []T)
}

// SwiGLUForm returns the form that the arguments of device.SwiGLU name.
func SwiGLUForm[T Float](gelu, clamped bool) Form[T] {
	switch {
	case gelu:
		return Form[T]{GELUGate[T], GELUGateGrad[T]}
	case clamped:
		return Form[T]{ClampedGate[T], ClampedGateGrad[T]}
	}
	return Form[T]{SwiGLU[T], SwiGLUGrad[T]}
}
