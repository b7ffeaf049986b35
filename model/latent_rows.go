package model

import "strings"

// In the files, a head of q has its rotated features last, and with rope_interleave features 2i and
// 2i + 1 are rotated together. In the program, they are first, and i and i + half are rotated
// together, because a plan rotates like that. A score is a sum over the features of q and k, so
// their order is free. The rotated features of k are the last rows of kv_a_proj_with_mqa; the
// program moves them to the front of each head (latentAttention).

// latentOrder returns the order of a tensor's rows in the files, nil if it is that of the model. Of
// an adapter, B has such rows.
func (c *Config) latentOrder(name string) *rowOrder {
	queries := ".self_attn.q_b_proj."
	if c.QLoraRank == 0 {
		queries = ".self_attn.q_proj."
	}
	switch {
	case strings.HasSuffix(name, loraA):
	case strings.Contains(name, queries):
		return &rowOrder{file: c.fileRowOfQuery, model: c.queryOfFileRow}
	case strings.Contains(name, ".self_attn.kv_a_proj_with_mqa.") && c.RopeInterleave:
		return &rowOrder{
			file:  func(row int64) int64 { return c.behindLatent(row, interleaved) },
			model: func(row int64) int64 { return c.behindLatent(row, separated) }}
	}
	return nil
}

// fileRowOfQuery returns the row in the files of a row of q, and queryOfFileRow the reverse.
func (c *Config) fileRowOfQuery(row int64) int64 {
	head, i := row/c.HeadDim*c.HeadDim, row%c.HeadDim
	if i >= c.QKRopeHeadDim {
		return head + i - c.QKRopeHeadDim
	}
	if c.RopeInterleave {
		i = interleaved(i, c.QKRopeHeadDim)
	}
	return head + c.QKNopeHeadDim + i
}

func (c *Config) queryOfFileRow(row int64) int64 {
	head, i := row/c.HeadDim*c.HeadDim, row%c.HeadDim
	if i < c.QKNopeHeadDim {
		return head + c.QKRopeHeadDim + i
	}
	if i -= c.QKNopeHeadDim; c.RopeInterleave {
		i = separated(i, c.QKRopeHeadDim)
	}
	return head + i
}

// behindLatent applies an order of rotated features to a row of kv_a_proj_with_mqa, whose first
// rows compute the compressed vector.
func (c *Config) behindLatent(row int64, order func(i, n int64) int64) int64 {
	if row < c.KVLoraRank {
		return row
	}
	return c.KVLoraRank + order(row-c.KVLoraRank, c.QKRopeHeadDim)
}

// interleaved returns where feature i of n rotated ones is if the two of a pair are neighbours, and
// separated the reverse.
func interleaved(i, n int64) int64 {
	if i < n/2 {
		return 2 * i
	}
	return 2*(i-n/2) + 1
}

func separated(i, n int64) int64 { return i/2 + i%2*(n/2) }
