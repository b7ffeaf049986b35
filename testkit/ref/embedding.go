package ref

// Embedding returns y [T, n], y[t] = table[ids[t]], from table [V, n].
func Embedding[T Float](n int64, table []T, ids []int64) []T {
	y := make([]T, 0, int64(len(ids))*n)
	for _, id := range ids {
		y = append(y, table[id*n:(id+1)*n]...)
	}
	return y
}

// EmbeddingGrad adds dy[t] to dtable[ids[t]], in the order of t.
func EmbeddingGrad[T Float](n int64, ids []int64, dy, dtable []T) {
	for t, id := range ids {
		for i := range n {
			dtable[id*n+i] += dy[int64(t)*n+i]
		}
	}
}
