package chat

import (
	"strings"

	"ulysses/data/chat/jinja"
)

// turn is a range of a rendering that comes from one message. Between its fields it may have text
// of the template, but not of other messages.
type turn struct {
	message int
	Range
}

// turnsOf returns the turns of a rendering in order. A turn ends where the template begins the turn
// of another role, even if that shows a text of the same message, such as the name of a called
// function; such texts have the message -1.
func turnsOf(text jinja.Text, t *template) (turns []turn) {
	before, ended, seen := -1, false, map[int]bool{}
	text.Runs(func(lo, hi int, mark jinja.Mark) {
		m := int(mark&^jinja.Generated) - 1
		if m < 0 {
			return
		}
		k := len(turns) - 1
		switch {
		case m == before && k >= 0:
			if ended = ended || t.beginsTurn(text.S[turns[k].Hi:lo]); !ended {
				turns[k].Hi = hi
				return
			}
		case seen[m]: // the header of the second result of a tool shows the call again
			before, ended = m, t.beginsTurn(text.S[turns[k].Hi:lo])
		default:
			before, ended, seen[m] = m, false, true
		}
		if ended {
			m = -1
		}
		turns = append(turns, turn{m, Range{lo, hi}})
	})
	return turns
}

// beginsTurn reports whether a text of the template begins a turn of another role than the
// assistant's: it has the lead of the generation prompt without the rest of it.
func (t *template) beginsTurn(text string) bool {
	if t.lead == "" {
		return false
	}
	for i := strings.Index(text, t.lead); i >= 0; {
		if !strings.HasPrefix(text[i:], t.headers[0]) {
			return true
		}
		n := strings.Index(text[i+1:], t.lead)
		if n < 0 {
			break
		}
		i += 1 + n
	}
	return false
}

// trained returns the trained bytes of a rendering.
func (r *Reader) trained(c *conversation, t *template, text jinja.Text) []Range {
	turns := turnsOf(text, t)
	wanted := func(message int) bool { return message >= 0 && c.trains[message] }
	if t.Tagged {
		return tagged(text, turns, wanted)
	}
	var out []Range
	for i, x := range turns {
		if !wanted(x.message) {
			continue
		}
		before, after := 0, len(text.S)
		if i > 0 {
			before = turns[i-1].Hi
		}
		if i+1 < len(turns) {
			after = turns[i+1].Lo
		}
		out = append(out, Range{r.turnStart(t, text.S, before, x.Lo), r.turnEnd(t, text.S, x.Hi, after)})
	}
	return out
}

// tagged returns the output of the tag generation, without the output of messages that are not
// wanted.
func tagged(text jinja.Text, turns []turn, wanted func(int) bool) (out []Range) {
	open := -1
	add := func(hi int) {
		of := -1
		for _, x := range turns {
			if x.Lo < hi && x.Hi > open {
				of = x.message
			}
		}
		if of < 0 || wanted(of) {
			out = append(out, Range{open, hi})
		}
		open = -1
	}
	text.Runs(func(lo, _ int, mark jinja.Mark) {
		switch generated := mark&jinja.Generated != 0; {
		case generated && open < 0:
			open = lo
		case !generated && open >= 0:
			add(lo)
		}
	})
	if open >= 0 {
		add(len(text.S))
	}
	return out
}

// turnStart returns the position where an assistant begins to write its turn: the end of the
// generation prompt in text[before:lo]. If the template has none, it is the end of the special
// tokens there, of as many as stand before a plain answer: what follows them, such as [TOOL_CALLS]
// behind Mistral's [/INST], is written by the assistant. Without special tokens it is lo, where the
// first field of the message begins.
func (r *Reader) turnStart(t *template, text string, before, lo int) int {
	for _, h := range t.headers {
		if i := strings.LastIndex(text[before:lo], h); i >= 0 {
			return before + i + len(h)
		}
	}
	ends := endsOf(text[before:lo], r.Special)
	switch {
	case len(t.headers) > 0 || len(ends) == 0:
		return lo
	case t.between > 0 && t.between < len(ends):
		return before + ends[t.between-1]
	}
	return before + ends[len(ends)-1]
}

// turnEnd returns the end of the turn's end token in text[hi:after]: a token that ends plain turns
// of the template, or otherwise the first special token that is not of the generation prompt.
// Without one it is hi. A tokenizer's end mark right behind that token is of the turn as well:
// Command A ends an answer with <|END_RESPONSE|>, and then the turn with <|END_OF_TURN_TOKEN|>.
func (r *Reader) turnEnd(t *template, text string, hi, after int) int {
	end := endOf(text, hi, after, t.ends)
	if end == hi {
		end = endOf(text, hi, after, r.endTokens(t))
	}
	if eos, ok := r.variables.Get("eos_token"); ok && end > hi &&
		strings.HasPrefix(text[end:after], eos.(jinja.Text).S) {
		end += len(eos.(jinja.Text).S)
	}
	return end
}

// endTokens returns the special tokens that may end a turn.
func (r *Reader) endTokens(t *template) (all []string) {
	for _, s := range r.Special {
		if len(t.headers) == 0 || !strings.Contains(t.headers[0], s) {
			all = append(all, s)
		}
	}
	return all
}

// endOf returns the end of the first of the tokens in text[hi:after], or hi.
func endOf(text string, hi, after int, tokens []string) int {
	first, end := after, hi
	for _, s := range tokens {
		if i := strings.Index(text[hi:after], s); i >= 0 && (hi+i < first || hi+i == first && hi+i+len(s) > end) {
			first, end = hi+i, hi+i+len(s)
		}
	}
	return end
}

// endsOf returns the ends of the tokens in a text, in order.
func endsOf(text string, tokens []string) (ends []int) {
	for at := 0; ; at = ends[len(ends)-1] {
		end := endOf(text, at, len(text), tokens)
		if end == at {
			return ends
		}
		ends = append(ends, end)
	}
}

// Mask appends, for each token, whether it is trained: whether all its bytes are. Token i has bytes
// [spans[i][0], spans[i][1]) of the text; spans ascend. A token without bytes, such as the ▁ that a
// tokenizer puts before a text, belongs to the byte behind it: an answer that follows a special
// token begins with it, also when a model writes the answer.
func (d *Document) Mask(dst []bool, spans [][2]int) []bool {
	k := 0
	for _, span := range spans {
		lo, hi := span[0], span[1]
		for k < len(d.Trained) && d.Trained[k].Hi < max(hi, lo+1) {
			k++
		}
		dst = append(dst, d.All || k < len(d.Trained) && d.Trained[k].Lo <= lo)
	}
	return dst
}

// Canonical brings the text into a normal form, and returns whether that is possible without a
// character that is composed of trained and other bytes. normalize returns false if it does more
// than that.
func (d *Document) Canonical(normalize func([]byte) ([]byte, bool)) bool {
	var text []byte
	var trained []Range
	at := 0
	add := func(hi int) bool {
		part, ok := normalize(d.Text[at:hi])
		text, at = append(text, part...), hi
		return ok
	}
	for _, r := range d.Trained {
		if !add(r.Lo) {
			return false
		}
		lo := len(text)
		if !add(r.Hi) {
			return false
		}
		trained = append(trained, Range{lo, len(text)})
	}
	if !add(len(d.Text)) {
		return false
	}
	whole, ok := normalize(d.Text)
	if ok = ok && string(whole) == string(text); ok {
		d.Text, d.Trained = text, trained
	}
	return ok
}
