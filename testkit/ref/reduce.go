package ref

// ColumnSum adds the sum over the rows of x [T, N] to dst [N].
func ColumnSum[T Float](dst, x []T) {
	n := len(dst)
	for i, v := range x {
		dst[i%n] += v
	}
}

// Sum returns Σx.
func Sum[T Float](x []T) (s T) {
	for _, v := range x {
		s += v
	}
	return s
}

// SumSquares returns Σx².
func SumSquares[T Float](x []T) (s T) {
	for _, v := range x {
		s += v * v
	}
	return s
}
