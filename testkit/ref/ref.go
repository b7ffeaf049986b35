// Package ref is the reference of the operations of package device, forward and backward, in simple
// loops. It is the specification against which devices are tested.
//
// Each function is generic over the precision. In float64 it is the reference. In float32 it is a
// plain, unfused implementation: an optimized kernel may have at most twice its error. Arrays are
// dense and row-major. Functions add gradients of weights to their arguments and return everything
// else.
package ref

import "math"

// Float is the precision of the computation.
type Float interface{ float32 | float64 }

func exp[T Float](x T) T  { return T(math.Exp(float64(x))) }
func log[T Float](x T) T  { return T(math.Log(float64(x))) }
func sqrt[T Float](x T) T { return T(math.Sqrt(float64(x))) }

// Convert returns an array in another precision.
func Convert[T, S Float](x []S) []T {
	y := make([]T, len(x))
	for i, v := range x {
		y[i] = T(v)
	}
	return y
}
