package data

import "container/list"

// cacheBytes limits the memory of decoded blocks. The newest block is kept even if it is larger.
const cacheBytes = 32 << 20

// blockCache decodes blocks when their sequences are needed and keeps the blocks used last. Each
// rank decodes its whole sequence, as do the other ranks of the sequence. That takes no longer than
// if one rank decoded it and sent the tokens, and no rank waits for another.
type blockCache struct {
	*decoder
	limit int64 // bytes
	bytes int64
	kept  map[*block]*list.Element
	order *list.List   // of *cachedBlock, the last one used first
	spare *cachedBlock // evicted; its memory is used for the next block
}

type cachedBlock struct {
	of *block
	decodedBlock
}

func newBlockCache(d *decoder, limit int64) *blockCache {
	return &blockCache{decoder: d, limit: limit, kept: map[*block]*list.Element{}, order: list.New()}
}

// get returns the content of a block, which load stores in p if it is not in the cache. The result
// is valid until the next call.
func (c *blockCache) get(b *block, load func(d *decoder, p *decodedBlock) error) (*decodedBlock, error) {
	if e := c.kept[b]; e != nil {
		c.order.MoveToFront(e)
		return &e.Value.(*cachedBlock).decodedBlock, nil
	}
	x := c.spare
	if c.spare = nil; x == nil {
		x = &cachedBlock{}
	}
	if err := load(c.decoder, &x.decodedBlock); err != nil {
		return nil, err
	}
	x.of = b
	c.bytes += x.decodedBlock.bytes()
	for c.bytes > c.limit && c.order.Len() > 0 {
		last := c.order.Remove(c.order.Back()).(*cachedBlock)
		delete(c.kept, last.of)
		if c.bytes -= last.decodedBlock.bytes(); last.decodedBlock.bytes() <= maxKept {
			c.spare = last
		}
	}
	c.kept[b] = c.order.PushFront(x)
	return &x.decodedBlock, nil
}
