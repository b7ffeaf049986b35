package ref

import "math"

// AdamW has the settings of one step of Loshchilov & Hutter 2019, as in PyTorch. Step counts from
// 1.
type AdamW struct {
	LR, Beta1, Beta2, Eps, WeightDecay, GradScale float64
	Step                                          int64
}

// Update updates w and the moments m and v in place with the gradient g·GradScale:
//
//	w ← w·(1 - lr·wd)
//	m ← m + (1-β₁)(g - m),  v ← β₂v + (1-β₂)g²
//	w ← w - lr/(1-β₁ᵗ) · m / (sqrt(v)/sqrt(1-β₂ᵗ) + eps)
func Update[T Float](a AdamW, w, g, m, v []T) {
	size := T(a.LR / (1 - math.Pow(a.Beta1, float64(a.Step))))
	root := T(math.Sqrt(1 - math.Pow(a.Beta2, float64(a.Step))))
	for i := range w {
		gi := g[i] * T(a.GradScale)
		w[i] *= T(1 - a.LR*a.WeightDecay)
		m[i] += T(1-a.Beta1) * (gi - m[i])
		v[i] = v[i]*T(a.Beta2) + T(1-a.Beta2)*gi*gi
		w[i] -= size * m[i] / (sqrt(v[i])/root + T(a.Eps))
	}
}

// SGD updates w in place: w ← w·(1 - lr·wd) - lr·scale·g.
func SGD[T Float](w, g []T, lr, wd, scale float64) {
	for i := range w {
		w[i] = w[i]*T(1-lr*wd) - T(lr*scale)*g[i]
	}
}
