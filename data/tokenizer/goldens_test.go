package tokenizer

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"ulysses/internal/status"
)

// goldens returns the folder with the goldens that testdata/goldens/vocabularies.py wrote:
// ULYSSES_TOKENIZER_GOLDENS, which may have more texts, or the one in testdata.
func goldens() string {
	if dir := os.Getenv("ULYSSES_TOKENIZER_GOLDENS"); dir != "" {
		return dir
	}
	return "../../testdata/goldens/tokenizers"
}

// texts returns the texts of the goldens.
func texts(t testing.TB) [][]byte {
	t.Helper()
	var list []struct {
		Bytes []byte
		Times int
	}
	readJSON(t, filepath.Join(goldens(), "texts.json"), &list)
	var all [][]byte
	for _, x := range list {
		all = append(all, bytes.Repeat(x.Bytes, max(x.Times, 1)))
	}
	return all
}

func readJSON(t testing.TB, path string, to any) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, to); err != nil {
		t.Fatal(path, err)
	}
}

func open(t testing.TB, path string) *Tokenizer {
	t.Helper()
	tok, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// expected is the result of the `tokenizers` package for one text: the ids and the text to which
// they are decoded, or a count and hashes if there are many ids. A nil Text is the encoded text.
type expected struct {
	IDs        []int32 `json:"ids"`
	Text       *string `json:"text"`
	Count      int     `json:"count"`
	IDsSHA256  string  `json:"ids_sha256"`
	TextSHA256 string  `json:"text_sha256"`
}

func (a expected) check(ids []int32, text, original string) error {
	want := original
	if a.Text != nil {
		want = *a.Text
	}
	if a.IDsSHA256 == "" && !slices.Equal(ids, a.IDs) {
		return fmt.Errorf("ids\n%v, not\n%v", ids, a.IDs)
	}
	buf, _ := binary.Append(nil, binary.LittleEndian, ids)
	if a.IDsSHA256 != "" && (len(ids) != a.Count || hash(buf) != a.IDsSHA256) {
		return fmt.Errorf("%d ids, want %d, or the ids differ: %v…", len(ids), a.Count, ids[:min(20, len(ids))])
	}
	if a.TextSHA256 == "" && text != want {
		return fmt.Errorf("decoded to %.300q, not %.300q", text, want)
	}
	if a.TextSHA256 != "" && hash([]byte(text)) != a.TextSHA256 {
		return fmt.Errorf("decoded to a different text: %.300q", text)
	}
	return nil
}

func hash(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])[:16]
}

// The ids of every text, and the text to which they are decoded, equal the result of the
// `tokenizers` package.
func TestGoldens(t *testing.T) {
	files, _ := filepath.Glob(filepath.Join(goldens(), "*", "tokenizer.json"))
	if len(files) < 8 {
		t.Fatalf("%d tokenizers in %s", len(files), goldens())
	}
	all := texts(t)
	for _, file := range files {
		t.Run(filepath.Base(filepath.Dir(file)), func(t *testing.T) {
			if _, err := Open(file); os.Getenv("ULYSSES_TOKENIZER_GOLDENS") != "" &&
				status.Of(err) == status.Unsupported {
				t.Skip(err)
			}
			tok := open(t, filepath.Dir(file))
			var want []expected
			readJSON(t, filepath.Join(filepath.Dir(file), "expected.json"), &want)
			if len(want) != len(all) {
				t.Fatalf("%d results for %d texts", len(want), len(all))
			}
			bad := 0
			for i, text := range all {
				ids, err := tok.Encode(nil, text)
				if err == nil {
					err = want[i].check(ids, tok.Decode(ids), string(validUTF8(text)))
				}
				if err != nil {
					if bad++; bad <= 5 {
						t.Errorf("text %d %.300q: %v", i, text, err)
					}
				}
				for _, id := range ids {
					if id < 0 || int64(id) >= tok.Size() {
						t.Fatalf("text %d: id %d, and Size is %d", i, id, tok.Size())
					}
				}
			}
			if bad > 0 {
				t.Errorf("%d of %d texts differ", bad, len(all))
			}
		})
	}
}
