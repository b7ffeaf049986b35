package comm

// DirectTraffic returns what rank sends in a direct all-to-all in which rank i sends bytes(i, j) to
// rank j. nodeOf has the node of each rank.
func DirectTraffic(rank int, nodeOf []int, bytes func(from, to int) int64) (sent Traffic) {
	for j, node := range nodeOf {
		switch n := bytes(rank, j); {
		case j == rank || n == 0:
		case node == nodeOf[rank]:
			sent.InsideBytes += n
			sent.InsideMessages++
		default:
			sent.BetweenBytes += n
			sent.BetweenMessages++
		}
	}
	return sent
}

// TwoLevelTraffic returns what rank sends in the same all-to-all with two levels. All nodes have
// the same number of ranks. With equal blocks of b bytes, N ranks on each of A nodes and P = N·A:
//
//	inside   (N-1)·A·b bytes in N-1 messages, and 8·A·(N-1) bytes of counts
//	between  ·N·b bytes in A-1 messages
//
// A direct all-to-all sends (N-1)·b bytes in N-1 messages inside, and (P-N)·b bytes, which is the
// same, in P-N messages between nodes.
func TwoLevelTraffic(rank int, nodeOf []int, bytes func(from, to int) int64) (sent Traffic, err error) {
	ranks, err := byNode("comm.TwoLevelTraffic", nodeOf, len(nodeOf))
	if err != nil {
		return Traffic{}, err
	}
	var node, position int
	for a := range ranks {
		for i, r := range ranks[a] {
			if r == rank {
				node, position = a, i
			}
		}
	}
	for i := range ranks[0] {
		n := int64(0)
		for a := range ranks {
			n += bytes(rank, ranks[a][i])
		}
		if i != position && n > 0 {
			sent.InsideBytes += n
			sent.InsideMessages++
		}
	}
	for a := range ranks {
		n := int64(0)
		for _, r := range ranks[node] {
			n += bytes(r, ranks[a][position])
		}
		if a != node && n > 0 {
			sent.BetweenBytes += n
			sent.BetweenMessages++
		}
	}
	sent.CountBytes = int64(8 * len(ranks) * (len(ranks[0]) - 1))
	return sent, nil
}

// Links describes the links of a rank, for the time of an all-to-all: inside a node and between
// nodes. Bandwidths are in bytes a second, with the share of one rank while all ranks send.
type Links struct {
	Inside, Between Link
	CopyBandwidth   float64 // of a rank that reorders blocks in memory
}

// Link describes the messages of a rank on one kind of link. Latencies of messages that follow one
// another overlap, and their overheads add up. Times are in seconds.
type Link struct{ Latency, Overhead, Bandwidth float64 }

// seconds returns the time of messages that follow one another.
func (l Link) seconds(messages, bytes float64) float64 {
	if messages == 0 {
		return 0
	}
	return l.Latency + messages*l.Overhead + bytes/l.Bandwidth
}

// AllToAllSeconds returns the time of an all-to-all of bytes per rank, the block for itself
// included, in equal blocks: direct, and with two levels. In the direct all-to-all, messages inside
// nodes and between nodes overlap. The levels follow one another, after the counts inside the node,
// and two levels copy all bytes twice more.
func (l Links) AllToAllSeconds(nodes, perNode int, bytes int64) (direct, twoLevel float64) {
	a, n, b := float64(nodes), float64(perNode), float64(bytes)
	direct = max(l.Inside.seconds(n-1, b*(n-1)/(a*n)), l.Between.seconds((a-1)*n, b*(a-1)/a))
	twoLevel = l.Inside.seconds(n-1, 8*a*(n-1)) + l.Inside.seconds(n-1, b*(n-1)/n) +
		l.Between.seconds(a-1, b*(a-1)/a) + 2*b/l.CopyBandwidth
	return direct, twoLevel
}

// TwoLevel reports whether two levels take less time than a direct all-to-all.
func (l Links) TwoLevel(nodes, perNode int, bytes int64) bool {
	direct, twoLevel := l.AllToAllSeconds(nodes, perNode, bytes)
	return nodes > 1 && perNode > 1 && twoLevel < direct
}
