// Package ref says in slow, obvious loops what every operation of package device computes, forward
// and backward: the readable specification, against which devices are tested.
//
// Every function is written once for both precisions. In float64 it is the reference. In float32 it
// is the plain, unfused implementation that anybody would write first: an optimised kernel may have
// at most twice its error. Arrays are dense and row-major; gradients of weights are added to what
// is there, everything else is returned.
package ref

import "math"

// Float is the precision in which a specification is evaluated.
type Float interface{ float32 | float64 }

func exp[T Float](x T) T  { return T(math.Exp(float64(x))) }
func log[T Float](x T) T  { return T(math.Log(float64(x))) }
func sqrt[T Float](x T) T { return T(math.Sqrt(float64(x))) }

// Convert rounds an array to another precision.
func Convert[T, S Float](x []S) []T {
	y := make([]T, len(x))
	for i, v := range x {
		y[i] = T(v)
	}
	return y
}
