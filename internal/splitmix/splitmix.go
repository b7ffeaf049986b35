// Package splitmix has the hash by which the program draws: numbers that depend on keys alone.
package splitmix

// Mix is the function of SplitMix64 (Steele, Lea & Flood 2014), a bijection of 64 bits.
func Mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
