package ref

// Conv1d has the shapes of a causal depthwise convolution over packed documents, see
// device.Conv1d.
type Conv1d struct {
	C, Width int64
	Cu       []int64 // [documents+1] boundaries of the documents in tokens
}

// T returns the number of tokens.
func (a *Conv1d) T() int64 { return a.Cu[len(a.Cu)-1] }

// taps calls f for each term of the sum at [t, c], with the index of its weight and its index in x,
// or in before [Width-1, C].
func (a *Conv1d) taps(f func(t, c, weight, x, before int64)) {
	for document := range int64(len(a.Cu) - 1) {
		lo := a.Cu[document]
		for t := lo; t < a.Cu[document+1]; t++ {
			for c := range a.C {
				for i := range a.Width {
					switch from := t - a.Width + 1 + i; {
					case from >= lo:
						f(t, c, c*a.Width+i, from*a.C+c, -1)
					case document == 0:
						f(t, c, c*a.Width+i, -1, (from-lo+a.Width-1)*a.C+c)
					}
				}
			}
		}
	}
}

// convSum returns the convolution of x [T, C] with w [C, Width], before its activation. A nil
// before is zero.
func convSum[T Float](a *Conv1d, x, w, before []T) []T {
	y := make([]T, len(x))
	a.taps(func(t, c, weight, at, early int64) {
		switch {
		case at >= 0:
			y[t*a.C+c] += w[weight] * x[at]
		case before != nil:
			y[t*a.C+c] += w[weight] * before[early]
		}
	})
	return y
}

// Conv1dForward returns y [T, C], silu of the convolution, with silu(x) = x/(1 + e^-x).
func Conv1dForward[T Float](a *Conv1d, x, w, before []T) []T {
	y := convSum(a, x, w, before)
	for i, s := range y {
		y[i] = s / (1 + exp(-s))
	}
	return y
}

// Conv1dBackward returns dx [T, C] and dbefore [Width-1, C] and adds to dw [C, Width]. With s the
// sum before the activation and σ = 1/(1 + e^-s), ds = dy·σ·(1 + s·(1 - σ)).
func Conv1dBackward[T Float](a *Conv1d, x, w, before, dy, dw []T) (dx, dbefore []T) {
	ds := convSum(a, x, w, before)
	for i, s := range ds {
		sigmoid := 1 / (1 + exp(-s))
		ds[i] = dy[i] * sigmoid * (1 + s*(1-sigmoid))
	}
	dx, dbefore = make([]T, len(x)), make([]T, (a.Width-1)*a.C)
	a.taps(func(t, c, weight, at, early int64) {
		d := ds[t*a.C+c]
		if at >= 0 {
			dx[at] += w[weight] * d
			dw[weight] += x[at] * d
			return
		}
		dbefore[early] += w[weight] * d
		if before != nil {
			dw[weight] += before[early] * d
		}
	})
	return dx, dbefore
}
