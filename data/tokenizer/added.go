package tokenizer

import (
	"unicode/utf8"

	"ulysses/internal/input"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// added is all added tokens. They are found in the text before it is split: the tokens of plain in
// the text as it is, the tokens of normalized in the normalized text.
type added struct {
	ids    map[string]int32
	tokens map[int32]addedToken
	// text of the tokens that are found in the normalized text, for decoders
	decoded    map[int32]string
	plain      trie
	normalized trie
}

func newAdded(list []addedToken, vocab map[string]int32, normalize func(string) (string, error)) (*added, error) {
	a := &added{ids: map[string]int32{}, tokens: map[int32]addedToken{}, decoded: map[int32]string{}}
	next, bytes := int32(len(vocab)), 0
	for _, t := range list {
		if t.Content == "" {
			continue
		}
		if len(t.Content) > maxContent { // the search takes as many steps at each byte of a text
			return nil, status.Errorf(status.Unsupported,
				"added_tokens: a token is %s, at most %d bytes are supported; %s", input.Quote(t.Content), maxContent,
				notbuilt.ManyAddedTokens.Instead)
		}
		if bytes += len(t.Content); bytes > maxAdded {
			return nil, status.Errorf(status.Unsupported,
				"added_tokens: %s and the tokens before it have more than %d bytes, which is not supported; %s",
				input.Quote(t.Content), maxAdded, notbuilt.ManyAddedTokens.Instead)
		}
		id, ok := a.ids[t.Content]
		if !ok {
			if id, ok = vocab[t.Content]; !ok {
				id, next = next, next+1
			}
		}
		a.ids[t.Content], a.tokens[id] = id, t
	}
	for id, t := range a.tokens {
		to, text := &a.plain, t.Content
		if t.Normalized {
			var err error
			if text, err = normalize(text); err != nil {
				return nil, err
			}
			if to = &a.normalized; text != t.Content {
				a.decoded[id] = text
			}
		}
		if text == "" {
			return nil, status.Errorf(status.Unsupported,
				"added_tokens: %s is empty after normalization, so no text contains it; set its normalized to false",
				input.Quote(t.Content))
		}
		if !to.add(text, id) {
			return nil, status.Errorf(status.InvalidConfig, "added_tokens: two tokens are both %s; remove one",
				input.Quote(text))
		}
	}
	return a, nil
}

// trie finds the longest token at a position.
type trie struct {
	nodes []trieNode // nodes[0] is the root
}

type trieNode struct {
	next map[byte]int32
	id   int32 // of the token that ends here; -1 = none
}

// add adds a token. It returns false if the token is in the trie already.
func (t *trie) add(text string, id int32) bool {
	if len(t.nodes) == 0 {
		t.nodes = []trieNode{{next: map[byte]int32{}, id: -1}}
	}
	at := int32(0)
	for _, b := range []byte(text) {
		to, ok := t.nodes[at].next[b]
		if !ok {
			to = int32(len(t.nodes))
			t.nodes = append(t.nodes, trieNode{next: map[byte]int32{}, id: -1})
			t.nodes[at].next[b] = to
		}
		at = to
	}
	if t.nodes[at].id >= 0 {
		return false
	}
	t.nodes[at].id = id
	return true
}

// starts returns the first bytes of the tokens.
func (t *trie) starts() (b [256]bool) {
	if len(t.nodes) > 0 {
		for c := range t.nodes[0].next {
			b[c] = true
		}
	}
	return b
}

// longest returns the id of the longest token at text[at:], -1 for none, and the position of its
// end.
func (t *trie) longest(text []byte, at int) (id int32, end int) {
	id = -1
	node := int32(0)
	for ; at < len(text); at++ {
		to, ok := t.nodes[node].next[text[at]]
		if !ok {
			break
		}
		node = to
		if n := t.nodes[node].id; n >= 0 {
			id, end = n, at+1
		}
	}
	return id, end
}

// split calls token for each token of t in a segment, and text for each range between them. A token
// with rstrip also takes the whitespace after it. The search for the next token continues where the
// token itself ended, as in the `tokenizers` package, so the next token may contain this whitespace
// again. A token with lstrip never does: if nothing else is left of it, it is left out. starts is
// t.starts().
func (a *added) split(t *trie, starts *[256]bool, p segment, text func(segment) error, token func(id int32)) error {
	done := 0
	for at := 0; len(t.nodes) > 0 && at < len(p.text); {
		if !starts[p.text[at]] {
			at++
			continue
		}
		id, end := t.longest(p.text, at)
		if id < 0 {
			at++
			continue
		}
		start, stop := at, end
		at = end
		tok := a.tokens[id]
		if tok.SingleWord && (isClass(p.text[:start], true, wordBits) || isClass(p.text[stop:], false, wordBits)) {
			continue
		}
		for tok.LStrip && start > done && isClass(p.text[:start], true, spaceBits) {
			_, n := utf8.DecodeLastRune(p.text[:start])
			start -= n
		}
		if tok.LStrip {
			start = max(start, done)
		}
		if tok.RStrip { // from end to done there is whitespace that the token before this one has taken
			stop = max(stop, done)
		}
		for tok.RStrip && isClass(p.text[stop:], false, spaceBits) {
			_, n := utf8.DecodeRune(p.text[stop:])
			stop += n
		}
		if start >= stop {
			continue
		}
		if done < start {
			if err := text(p.sub(done, start)); err != nil {
				return err
			}
		}
		token(id)
		done = stop
	}
	if done != len(p.text) {
		return text(p.sub(done, len(p.text)))
	}
	return nil
}
