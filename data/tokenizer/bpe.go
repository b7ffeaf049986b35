package tokenizer

import (
	"fmt"
	"unicode/utf8"

	"ulysses/internal/input"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// model is byte pair encoding as the `tokenizers` package has it: a word is cut into characters,
// and neighbours are merged, the earliest rule first and of equals the leftmost, until no rule
// fits.
type model struct {
	vocab map[string]int32 // by what words are made of: text, or plain bytes where raw
	names map[int32]string
	rules pairTable // (left, right) → (rank, result)
	// raw: words arrive as plain bytes, not as the letters by which ByteLevel writes them in the
	// file.
	raw            bool
	prefix, suffix string // written before every character but the first, and behind the last
	unkName        string
	// id of unkName; noUnk where the file names none, and missingUnk where the name is not in the
	// vocabulary
	unk      int32
	fuse     bool // several unknown characters in a row are one unk
	fallback bool // an unknown character is its bytes, <0xE2>, where all of these are known
	whole    bool // a word that is in the vocabulary is taken as it is (ignore_merges)
	bytes    [256]int32
	basic    [1 << 16]int32 // ids of single characters, -1 for unknown; of bytes where raw
	astral   map[rune]int32
	meet     pairTable // neighbouring characters that some rule merges across
}

const (
	noUnk      = -1
	missingUnk = -2
)

// newModel checks the file's model and lays it out.
func newModel(f *modelFile, raw bool) (*model, error) {
	if f.Type != "BPE" && !(f.Type == "" && f.Merges != nil) {
		return nil, status.Errorf(status.Unsupported, "model %s is not built: %s", input.Quote(f.Type), notbuilt.TokenizerModels.Instead)
	}
	if f.Dropout != 0 {
		return nil, status.Errorf(status.Unsupported, "model.dropout = %v would cut the same text differently each time and is not built: %s", f.Dropout, notbuilt.MergeDropout.Instead)
	}
	for field, text := range map[string]string{"continuing_subword_prefix": f.Prefix, "end_of_word_suffix": f.Suffix} {
		if len(text) > mostContent {
			return nil, status.Errorf(status.Unsupported, "model.%s is %s, at most %d bytes are built: tokenize with the `tokenizers` package beforehand", field, input.Quote(text), mostContent)
		}
	}
	m := &model{vocab: f.Vocab, names: make(map[int32]string, len(f.Vocab)), unk: noUnk, fuse: f.FuseUnk, fallback: f.ByteFallback, whole: f.IgnoreMerges,
		prefix: f.Prefix, suffix: f.Suffix, raw: raw, astral: map[rune]int32{}}
	for s, id := range f.Vocab {
		if id < 0 {
			return nil, status.Errorf(status.InvalidConfig, "the vocabulary has %s with the id %d", input.Quote(s), id)
		}
		m.names[id] = s
	}
	if f.UnkToken != nil {
		m.unkName, m.unk = *f.UnkToken, missingUnk
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

func (m *model) id(s string) int32 {
	if id, ok := m.vocab[s]; ok {
		return id
	}
	return -1
}

func (m *model) addRules(f *modelFile) error {
	m.rules = newPairTable(len(f.Merges))
	m.meet = newPairTable(len(f.Merges))
	for rank, pair := range f.Merges {
		a, b := m.id(pair[0]), m.id(pair[1])
		if a < 0 || b < 0 || len(pair[1]) < len(m.prefix) {
			return status.Errorf(status.InvalidConfig, "merge %d joins %s and %s, which are not both in the vocabulary", rank+1, input.Quote(pair[0]), input.Quote(pair[1]))
		}
		joined := pair[0] + pair[1][len(m.prefix):]
		id := m.id(joined)
		if id < 0 {
			return status.Errorf(status.InvalidConfig, "merge %d makes %s, which is not in the vocabulary", rank+1, input.Quote(joined))
		}
		m.rules.put(a, b, uint64(rank)<<32|uint64(uint32(id)))
		left, _ := utf8.DecodeLastRuneInString(pair[0])
		right, _ := utf8.DecodeRuneInString(pair[1])
		if m.raw {
			left, right = byteOf(left), byteOf(right)
		}
		m.meet.put(left, right, 1)
	}
	return nil
}

// rawVocab is the vocabulary by the bytes that its letters stand for. What has other letters can be
// no word and is left out.
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

// character is the id of a character, or byte where raw, -1 for an unknown one.
func (m *model) character(r rune) int32 {
	if r < 1<<16 {
		return m.basic[r]
	}
	if id, ok := m.astral[r]; ok {
		return id
	}
	return -1
}

// at reads one character of a word.
func (m *model) at(word []byte, i int) (rune, int) {
	if m.raw {
		return rune(word[i]), 1
	}
	return decodeRune(word, i)
}

// symbols appends what a word starts from. An unknown character waits until it is known whether the
// next one joins it: bytes that it is written by overtake one that waits, as they do in the
// `tokenizers` package.
func (m *model) symbols(dst []int32, word []byte) ([]int32, error) {
	waiting := int32(noUnk)
	affixes := m.prefix != "" || m.suffix != ""
	for i := 0; i < len(word); {
		r, n := m.at(word, i)
		id := int32(-1)
		var letters string // what the file would call this character
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
			if waiting >= 0 {
				dst, waiting = append(dst, waiting), noUnk
			}
			dst = append(dst, id)
			continue
		}
		if m.fallback {
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
		if m.unk == missingUnk {
			return dst, status.Errorf(status.InvalidConfig, "tokenizer: %q needs the unknown token %s, which is not in the model's vocabulary", string(r), input.Quote(m.unkName))
		}
		if waiting >= 0 && !m.fuse {
			dst = append(dst, waiting)
		}
		waiting = m.unk
	}
	if waiting >= 0 {
		dst = append(dst, waiting)
	}
	return dst, nil
}

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

// pairTable maps two ids to a number: open addressing, never more than half full.
type pairTable struct {
	keys   []uint64 // 0 for none: a key is stored plus one
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

func (t *pairTable) slot(a, b int32) (int, uint64) {
	key := uint64(uint32(a))<<32 | uint64(uint32(b))
	i := int(key * 0x9E3779B97F4A7C15 >> t.shift)
	for key++; t.keys[i] != 0 && t.keys[i] != key; {
		i = (i + 1) & (len(t.keys) - 1)
	}
	return i, key
}

// put sets a value; of several for the same pair the last holds.
func (t *pairTable) put(a, b int32, v uint64) {
	i, key := t.slot(a, b)
	t.keys[i], t.values[i] = key, v
}

func (t *pairTable) get(a, b int32) (uint64, bool) {
	i, key := t.slot(a, b)
	return t.values[i], t.keys[i] == key
}
