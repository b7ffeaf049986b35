package tokenizer

import (
	"fmt"
	"unicode/utf8"

	"ulysses/internal/input"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// model is byte pair encoding as in the `tokenizers` package. A word is split into characters. Then
// two adjacent tokens are merged, by the first rule that matches any pair and at its leftmost pair,
// until no rule matches.
type model struct {
	vocab map[string]int32 // keys are text, or plain bytes if raw
	names map[int32]string
	ids   map[string]int32 // of all names
	rules pairTable        // (left, right) → (rank, result)
	// Words are plain bytes. The file has them as letters (byteLetters).
	raw            bool
	prefix, suffix string // before each character except the first; after the last
	unkName        string
	// id of unkName; unkNone = the file has no unk_token, unkMissing = it is not in the vocabulary
	unk     int32
	fuseUnk bool // adjacent unknown characters are one unk
	// an unknown character becomes its bytes, such as <0xE2>, if all are in the vocabulary
	byteFallback bool
	ignoreMerges bool           // a word in the vocabulary is one token
	bytes        [256]int32     // ids of <0x00> … <0xFF>, -1 = unknown
	basic        [1 << 16]int32 // ids of characters below U+10000, or of bytes if raw; -1 = unknown
	astral       map[rune]int32 // ids of the other characters
	mergeable    pairTable      // (left, right) characters between which some rule merges
}

const (
	unkNone    = -1
	unkMissing = -2
)

// newModel checks the model of a file and makes its tables.
func newModel(f *modelFile, raw bool) (*model, error) {
	if f.Type != "BPE" && !(f.Type == "" && f.Merges != nil) {
		return nil, status.Errorf(status.Unsupported, "model: the type %s is not supported; %s", input.Quote(f.Type),
			notbuilt.TokenizerModels.Instead)
	}
	if f.Dropout != 0 {
		return nil, status.Errorf(status.Unsupported,
			"model.dropout = %v is not supported, because the ids of a text would be random; %s", f.Dropout,
			notbuilt.MergeDropout.Instead)
	}
	for field, text := range map[string]string{"continuing_subword_prefix": f.Prefix, "end_of_word_suffix": f.Suffix} {
		if len(text) > maxContent {
			return nil, status.Errorf(status.Unsupported,
				"model.%s is %s, at most %d bytes are supported; tokenize with the `tokenizers` package beforehand",
				field, input.Quote(text), maxContent)
		}
	}
	m := &model{vocab: f.Vocab, ids: f.Vocab, names: make(map[int32]string, len(f.Vocab)), unk: unkNone,
		fuseUnk: f.FuseUnk, byteFallback: f.ByteFallback, ignoreMerges: f.IgnoreMerges, prefix: f.Prefix,
		suffix: f.Suffix, raw: raw, astral: map[rune]int32{}}
	for s, id := range f.Vocab {
		if id < 0 {
			return nil, status.Errorf(status.InvalidConfig, "model.vocab: %s has the id %d; use ids from 0 on",
				input.Quote(s), id)
		}
		if name, ok := m.names[id]; !ok || s < name { // whatever the order of the map
			m.names[id] = s
		}
	}
	if f.UnkToken != nil {
		m.unkName, m.unk = *f.UnkToken, unkMissing
		if id, ok := f.Vocab[m.unkName]; ok {
			m.unk = id
		}
	}
	for b := range m.bytes {
		m.bytes[b] = m.id(fmt.Sprintf("<0x%02X>", b))
	}
	if err := m.addRules(f); err != nil {
		return nil, err
	}
	if raw {
		m.vocab = rawVocab(f.Vocab)
	}
	m.addCharacters()
	return m, nil
}

// id returns the id of a token, -1 = unknown.
func (m *model) id(s string) int32 {
	if id, ok := m.vocab[s]; ok {
		return id
	}
	return -1
}

func (m *model) addRules(f *modelFile) error {
	m.rules = newPairTable(len(f.Merges))
	m.mergeable = newPairTable(len(f.Merges))
	for rank, pair := range f.Merges {
		a, b := m.id(pair[0]), m.id(pair[1])
		if a < 0 || b < 0 || len(pair[1]) < len(m.prefix) {
			return status.Errorf(status.InvalidConfig,
				"model.merges: merge %d joins %s and %s, which are not both in the vocabulary; add them to model.vocab",
				rank+1, input.Quote(pair[0]), input.Quote(pair[1]))
		}
		joined := pair[0] + pair[1][len(m.prefix):]
		id := m.id(joined)
		if id < 0 {
			return status.Errorf(status.InvalidConfig,
				"model.merges: merge %d makes %s, which is not in the vocabulary; add it to model.vocab", rank+1,
				input.Quote(joined))
		}
		m.rules.put(a, b, uint64(rank)<<32|uint64(uint32(id)))
		left, _ := utf8.DecodeLastRuneInString(pair[0])
		right, _ := utf8.DecodeRuneInString(pair[1])
		if m.raw {
			left, right = byteOf(left), byteOf(right)
		}
		m.mergeable.put(left, right, 1)
	}
	return nil
}

// rawVocab returns the vocabulary with bytes instead of the letters that stand for them. A token
// with other letters can be in no word and is left out.
func rawVocab(vocab map[string]int32) map[string]int32 {
	out := make(map[string]int32, len(vocab))
	for s, id := range vocab {
		if b, ok := fromByteLevel(nil, s); ok {
			out[string(b)] = id
		}
	}
	return out
}

func (m *model) addCharacters() {
	for i := range m.basic {
		m.basic[i] = -1
	}
	for s, id := range m.vocab {
		if m.raw {
			if len(s) == 1 {
				m.basic[s[0]] = id
			}
			continue
		}
		if r, n := utf8.DecodeRuneInString(s); n > 0 && n == len(s) && r < 1<<16 {
			m.basic[r] = id
		} else if n > 0 && n == len(s) {
			m.astral[r] = id
		}
	}
}

// character returns the id of a character, or of a byte if raw; -1 = unknown.
func (m *model) character(r rune) int32 {
	if r < 1<<16 {
		return m.basic[r]
	}
	if id, ok := m.astral[r]; ok {
		return id
	}
	return -1
}

// charAt returns the character at word[i:], or the byte if raw, and its size.
func (m *model) charAt(word []byte, i int) (rune, int) {
	if m.raw {
		return rune(word[i]), 1
	}
	return decodeRune(word, i)
}

// symbols appends the ids of the characters of a word, before any merge. The unk of an unknown
// character is pending until the next known character, because the next unknown character may be
// fused with it. Bytes of byte_fallback are appended before a pending unk, as in the `tokenizers`
// package.
func (m *model) symbols(dst []int32, word []byte) ([]int32, error) {
	pending := int32(unkNone)
	affixes := m.prefix != "" || m.suffix != ""
	for i := 0; i < len(word); {
		r, n := m.charAt(word, i)
		id := int32(-1)
		var letters string // the character as the file has it
		if affixes {
			letters = string(r)
			if i > 0 {
				letters = m.prefix + letters
			}
			if i+n == len(word) {
				letters += m.suffix
			}
			id = m.id(letters)
		} else {
			id = m.character(r)
		}
		i += n
		if id >= 0 {
			if pending >= 0 {
				dst, pending = append(dst, pending), unkNone
			}
			dst = append(dst, id)
			continue
		}
		if m.byteFallback {
			if letters == "" {
				letters = string(r)
				if m.raw {
					letters = string(byteLetters[byte(r)])
				}
			}
			if bytes, ok := m.asBytes(dst, letters); ok {
				dst = bytes
				continue
			}
		}
		if m.unk == unkMissing {
			return dst, status.Errorf(status.InvalidConfig,
				"tokenizer: %q needs the unk_token %s, which is not in the vocabulary; add it to model.vocab",
				string(r), input.Quote(m.unkName))
		}
		if pending >= 0 && !m.fuseUnk {
			dst = append(dst, pending)
		}
		pending = m.unk
	}
	if pending >= 0 {
		dst = append(dst, pending)
	}
	return dst, nil
}

// asBytes appends the ids of the bytes of letters; false if one is unknown.
func (m *model) asBytes(dst []int32, letters string) ([]int32, bool) {
	start := len(dst)
	for _, b := range []byte(letters) {
		if m.bytes[b] < 0 {
			return dst[:start], false
		}
		dst = append(dst, m.bytes[b])
	}
	return dst, true
}

// pairTable maps two ids to a number, by open addressing. It is at most half full.
type pairTable struct {
	keys   []uint64 // key + 1; 0 = no entry
	values []uint64
	shift  uint
}

func newPairTable(n int) pairTable {
	size, shift := 16, uint(60)
	for size < 2*n+2 {
		size, shift = size*2, shift-1
	}
	return pairTable{keys: make([]uint64, size), values: make([]uint64, size), shift: shift}
}

// slot returns the index of the entry for a pair, or of the free entry where it belongs, and its
// key.
func (t *pairTable) slot(a, b int32) (int, uint64) {
	key := uint64(uint32(a))<<32 | uint64(uint32(b))
	i := int(key * 0x9E3779B97F4A7C15 >> t.shift)
	for key++; t.keys[i] != 0 && t.keys[i] != key; {
		i = (i + 1) & (len(t.keys) - 1)
	}
	return i, key
}

// put sets the value of a pair. It replaces an earlier value.
func (t *pairTable) put(a, b int32, v uint64) {
	i, key := t.slot(a, b)
	t.keys[i], t.values[i] = key, v
}

func (t *pairTable) get(a, b int32) (uint64, bool) {
	i, key := t.slot(a, b)
	return t.values[i], t.keys[i] == key
}
