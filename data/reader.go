package data

import "container/list"

// cacheBytes limits the decoded blocks that are kept, except for the newest one.
const cacheBytes = 32 << 20

// reader decodes blocks when their sequences are needed, and caches the last ones used. Each rank
// decodes all of its sequence, as the other ranks of the sequence do. That takes no longer than if
// one rank decoded it and sent the tokens, and no rank waits for another.
type reader struct {
	*decoder
	limit int64
	bytes int64
	kept  map[place]*list.Element
	order *list.List // of *cached, the last one used first
	spare *cached    // to be filled next
}

type place struct {
	x     *index
	block int
}

type cached struct {
	place
	piece
}

func newReader(d *decoder, limit int64) *reader {
	return &reader{decoder: d, limit: limit, kept: map[place]*list.Element{}, order: list.New()}
}

// piece is a block's tokens, to be read before the next call.
func (r *reader) piece(x *index, b int) (*piece, error) {
	at := place{x, b}
	if e := r.kept[at]; e != nil {
		r.order.MoveToFront(e)
		return &e.Value.(*cached).piece, nil
	}
	c := r.spare
	if r.spare = nil; c == nil {
		c = &cached{}
	}
	if err := x.load(r.decoder, b, &c.piece); err != nil {
		return nil, err
	}
	c.place = at
	r.bytes += c.bytes()
	for r.bytes > r.limit && r.order.Len() > 0 {
		last := r.order.Remove(r.order.Back()).(*cached)
		delete(r.kept, last.place)
		if r.bytes -= last.bytes(); last.bytes() <= large {
			r.spare = last
		}
	}
	r.kept[at] = r.order.PushFront(c)
	return &c.piece, nil
}
