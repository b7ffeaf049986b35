package gdn

// gatherStates sends states in one all-to-all.
func (c *chain) gatherStates() error {
	if err := c.packForAll(); err != nil {
		return err
	}
	at, err := c.allToAll(c.scratch)
	if err != nil {
		return err
	}
	// Maps apply from the farthest position on: in the order in which they were received, or in the
	// opposite order.
	if c.backward {
		for _, n := range c.recv {
			at += n
		}
	}
	positions := int64(len(c.layout.shards.ranks))
	for i := range positions {
		position := i
		if c.backward {
			position = positions - 1 - i
		}
		if at, err = c.applyFrom(at, position); err != nil {
			return err
		}
	}
	return nil
}

// packForAll packs the maps of this rank for each position that needs them, and counts the elements
// that each rank sends and receives.
func (c *chain) packForAll() error {
	clear(c.send)
	clear(c.recv)
	at := int64(0)
	for position, rank := range c.layout.shards.ranks {
		ahead := c.layout.ahead(int64(position), c.backward)
		start := at
		for i := range c.layout.segments {
			x := &c.layout.segments[i]
			sources, targets := x.peers(c.backward)
			if ahead > 0 && ahead <= targets {
				if err := c.pack(c.scratch, at, x, x.interior()); err != nil {
					return err
				}
				at += c.blockElements(x.interior())
			}
			if behind := -ahead; behind > 0 && behind <= sources {
				c.recv[rank] += c.blockElements(behind < sources)
			}
		}
		c.send[rank] = at - start
	}
	return nil
}

// applyFrom applies the maps that were received from a position to the states that the positions
// behind it have given. at is the element where the position's maps begin, or backward where they
// end. It returns the element where the next position's maps begin, or backward end.
func (c *chain) applyFrom(at, position int64) (int64, error) {
	behind, segments := -c.layout.ahead(position, c.backward), c.layout.segments
	for j := range segments {
		i := j
		if c.backward {
			i = len(segments) - 1 - j
		}
		x := &segments[i]
		sources, _ := x.peers(c.backward)
		if behind <= 0 || behind > sources {
			continue
		}
		withM := behind < sources
		if c.backward {
			at -= c.blockElements(withM)
		}
		e, m := c.block(c.scratch, at, withM)
		if !c.backward {
			at += c.blockElements(withM)
		}
		y := e
		if behind == 1 {
			y = c.into.Select(0, x.sequence)
		}
		var err error
		if withM {
			err = c.apply(m, c.running[i], e, y)
		} else if behind == 1 {
			err = c.dev.Copy(c.stream, y, e)
		}
		if err != nil {
			return at, err
		}
		c.running[i] = y
	}
	return at, nil
}
