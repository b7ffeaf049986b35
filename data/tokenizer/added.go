package tokenizer

import (
	"unicode/utf8"

	"ulysses/internal/input"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// addedToken is a token beside the model: it is found in the text before anything is cut, as it
// stands (normalized: false) or in the normalized text. The file's id is not asked: as in the
// `tokenizers` package a token has the id of the model's vocabulary, or the next one behind it.
type addedToken struct {
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

// added is all of them, as two finders.
type added struct {
	ids        map[string]int32
	tokens     map[int32]addedToken
	shown      map[int32]string // how a decoder sees a token that was normalized
	plain      trie
	normalized trie
}

func newAdded(list []addedToken, vocab map[string]int32, normalize func(string) (string, error)) (*added, error) {
	a := &added{ids: map[string]int32{}, tokens: map[int32]addedToken{}, shown: map[int32]string{}}
	next, bytes := int32(len(vocab)), 0
	for _, t := range list {
		if t.Content == "" {
			continue
		}
		if bytes += len(t.Content); bytes > mostAdded {
			return nil, status.Errorf(status.Unsupported, "added_tokens have more than %d bytes, up to %s: this is not built: %s", mostAdded, input.Quote(t.Content), notbuilt.ManyAddedTokens.Instead)
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
				a.shown[id] = text
			}
		}
		if text == "" {
			return nil, status.Errorf(status.Unsupported, "the added token %s is nothing once it is normalized, and is found nowhere: remove it, or set its normalized to false", input.Quote(t.Content))
		}
		if !to.add(text, id) {
			return nil, status.Errorf(status.InvalidConfig, "two added tokens are both %s", input.Quote(text))
		}
	}
	return a, nil
}

// trie finds the longest of its texts at a place.
type trie struct {
	nodes []trieNode // 0 is the root
}

type trieNode struct {
	next map[byte]int32
	id   int32 // -1 for none
}

// add returns false where the text is there already.
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

// starts is the bytes that some text begins with.
func (t *trie) starts() (b [256]bool) {
	if len(t.nodes) > 0 {
		for c := range t.nodes[0].next {
			b[c] = true
		}
	}
	return b
}

// longest returns the id of the longest text at a place and where it ends; -1 for none.
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

// split calls text for what is between the tokens and token for each of these. A token that strips
// may reach over the place from which the next one is looked for, and the next over it again: the
// `tokenizers` package goes on where the token itself ended, and so does this.
func (a *added) split(t *trie, starts *[256]bool, p piece, text func(piece) error, token func(id int32)) error {
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
		for tok.RStrip && isClass(p.text[stop:], false, spaceBits) {
			_, n := utf8.DecodeRune(p.text[stop:])
			stop += n
		}
		if done < start {
			if err := text(p.cut(done, start)); err != nil {
				return err
			}
		}
		token(id)
		done = stop
	}
	if done != len(p.text) {
		return text(p.cut(done, len(p.text)))
	}
	return nil
}
