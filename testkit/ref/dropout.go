package ref

import "math"

// Keeps reports whether dropout keeps the softmax weight of a query and a key of a head. It is a
// hash of its arguments (counter-based, Salmon et al. 2011), so every device, mesh and order of the
// computation makes the same choice. head, query and key are numbers in the whole batch.
//
// A query has 64 random bits, a key 32. For each pair, three multiplications modulo 2^32 mix them
// (the finalizer is "lowbias32" of C. Wellons). The 24 highest bits are compared with p·2^24.
func Keeps(p float64, seed, head, query, key int64) bool {
	q := mix64(mix64(uint64(seed)^uint64(head)*0x9e3779b97f4a7c15) + uint64(query))
	k := uint32(mix64(^uint64(seed) + uint64(key)))
	x := (uint32(q) ^ k) * (uint32(q>>32) | 1)
	x ^= x >> 16
	x *= 0x7feb352d
	x ^= x >> 15
	x *= 0x846ca68b
	x ^= x >> 16
	return x>>8 >= uint32(math.RoundToEven(p*(1<<24)))
}

// mix64 is the function of SplitMix64 (Steele et al. 2014), a bijection of 64 bits.
func mix64(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Dropout returns y + x / (1 - p) for the elements of x [T, n] that are kept, and y for the others.
// y may be nil.
func Dropout[F Float](x, y []F, tokens []int64, n int64, p float64, seed int64) []F {
	out := make([]F, len(x))
	copy(out, y)
	for i := range x {
		if Keeps(p, seed, 0, tokens[int64(i)/n], int64(i)%n) {
			out[i] += x[i] * F(1/(1-p))
		}
	}
	return out
}
