package jinja

// textOf returns Python's str(v), after it has counted the elements and bytes of v.
func (in *interp) textOf(line int, v Value) Text {
	in.visit(line, v)
	return textOf(v)
}

// key returns a key of a dict, after it has counted what its hash is made of.
func (in *interp) key(line int, key Value) Value {
	in.readText(line, key)
	if l, ok := key.(*List); ok && l.tuple {
		in.visit(line, key)
	}
	return key
}

// read counts the steps of reading a text.
func (in *interp) read(line int, t Text) { in.spend(line, int64(len(t.S))/64) }

// readText is read for a value that is a text.
func (in *interp) readText(line int, v Value) {
	if t, ok := v.(Text); ok {
		in.read(line, t)
	}
}

// visit counts a step for each element of a value, also of the lists and objects in it. It fails if
// the texts in it have more bytes together than a rendering may make.
func (in *interp) visit(line int, v Value) { in.visitBelow(line, v, 0, 0) }

func (in *interp) visitBelow(line int, v Value, bytes int64, depth int) int64 {
	if depth > maxRepr { // Repr shows nothing more
		return bytes
	}
	switch v := v.(type) {
	case Text:
		if depth == 0 {
			return bytes // Repr is not called
		}
		if bytes += int64(len(v.S)); bytes > in.limits.Bytes {
			fail(line, "the template makes more than %d bytes of text", in.limits.Bytes)
		}
		in.read(line, v)
	case *List:
		in.spend(line, int64(len(v.Items)))
		for _, x := range v.Items {
			bytes = in.visitBelow(line, x, bytes, depth+1)
		}
	case *Dict:
		in.spend(line, int64(v.Len()))
		for i, k := range v.keys {
			bytes = in.visitBelow(line, k, bytes, depth+1)
			bytes = in.visitBelow(line, v.items[i], bytes, depth+1)
		}
	case *namespace:
		bytes = in.visitBelow(line, v.Dict, bytes, depth+1)
	}
	return bytes
}

// equal returns Python's a == b. It counts a step for each element that it compares: lists may have
// the same list in them several times, so that there are far more elements than memory holds.
func (in *interp) equal(line int, a, b Value) bool {
	if i, x, whole, ok := number(a); ok {
		j, y, whole2, ok := number(b)
		if whole && whole2 {
			return ok && i == j
		}
		return ok && x == y
	}
	switch a := a.(type) {
	case nil:
		return b == nil
	case undefined:
		_, ok := b.(undefined)
		return ok
	case Text:
		t, ok := b.(Text)
		if ok && len(a.S) == len(t.S) {
			in.read(line, a)
		}
		return ok && a.S == t.S
	case Number:
		return a == b
	case *List:
		l, ok := b.(*List)
		if !ok || len(a.Items) != len(l.Items) || a.tuple != l.tuple || (a.span == nil) != (l.span == nil) {
			return false
		}
		if a.unindexed != 0 || l.unindexed != 0 {
			return a == l || a.isSet() && l.isSet() && in.sameElements(line, a, l)
		}
		for i := range a.Items {
			if in.step(line); !in.equal(line, a.Items[i], l.Items[i]) {
				return false
			}
		}
		return true
	case *Dict:
		d, ok := b.(*Dict)
		if !ok || a.Len() != d.Len() {
			return false
		}
		for i, k := range a.keys {
			if v, ok := d.get(in.key(line, k)); !ok || !in.equal(line, a.items[i], v) {
				return false
			}
		}
		return true
	case *namespace, *function:
		return a == b
	}
	return false
}

// isSet reports whether the view has no order: the keys and the items of a dict.
func (l *List) isSet() bool { return l.unindexed == isKeys || l.unindexed == isItems }

// sameElements reports whether two views of the same length have equal elements in any order.
func (in *interp) sameElements(line int, a, b *List) bool {
	hash := func(l *List, i int) any {
		x := l.Items[i]
		if l.unindexed == isItems {
			x = x.(*List).Items[0]
		}
		h, _ := hashOf(in.key(line, x))
		return h
	}
	index := make(map[any]int, len(b.Items))
	for i := range b.Items {
		index[hash(b, i)] = i
	}
	for i, x := range a.Items {
		if j, ok := index[hash(a, i)]; !ok || !in.equal(line, x, b.Items[j]) {
			return false
		}
	}
	return true
}

// less returns Python's a < b; false if the two cannot be ordered. It counts steps as equal does.
func (in *interp) less(line int, a, b Value) (result, ok bool) {
	i, x, whole, isNumber := number(a)
	if j, y, whole2, ok := number(b); ok && isNumber {
		if whole && whole2 {
			return i < j, true
		}
		return x < y, true
	}
	switch a := a.(type) {
	case Text:
		if t, ok := b.(Text); ok {
			return a.S < t.S, true // the order of UTF-8 is the order of code points
		}
	case *List:
		l, ok := b.(*List)
		if !ok || a.tuple != l.tuple || !a.isPlain() || !l.isPlain() {
			return false, false
		}
		for i := range min(len(a.Items), len(l.Items)) {
			if in.step(line); !in.equal(line, a.Items[i], l.Items[i]) {
				return in.less(line, a.Items[i], l.Items[i])
			}
		}
		return len(a.Items) < len(l.Items), true
	}
	return false, false
}
