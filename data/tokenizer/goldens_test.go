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

// goldens is the folder that testdata/goldens/vocabularies.py wrote: ours, or one of
// ULYSSES_TOKENIZER_GOLDENS with more texts.
func goldens() string {
	if dir := os.Getenv("ULYSSES_TOKENIZER_GOLDENS"); dir != "" {
		return dir
	}
	return "../../testdata/goldens/tokenizers"
}

// texts is what the goldens were made of.
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

// answer is what the tokenizers package said of one text: ids and the text they decode to, or a
// count and hashes where they are many. No text means that it is the text encoded.
type answer struct {
	IDs        []int32 `json:"ids"`
	Text       *string `json:"text"`
	Count      int     `json:"count"`
	IDsSHA256  string  `json:"ids_sha256"`
	TextSHA256 string  `json:"text_sha256"`
}

func (a answer) check(ids []int32, text, original string) error {
	want := original
	if a.Text != nil {
		want = *a.Text
	}
	if a.IDsSHA256 == "" && !slices.Equal(ids, a.IDs) {
		return fmt.Errorf("ids\n%v, not\n%v", ids, a.IDs)
	}
	buf, _ := binary.Append(nil, binary.LittleEndian, ids)
	if a.IDsSHA256 != "" && (len(ids) != a.Count || hash(buf) != a.IDsSHA256) {
		return fmt.Errorf("%d ids, not %d, or other ones: %v…", len(ids), a.Count, ids[:min(20, len(ids))])
	}
	if a.TextSHA256 == "" && text != want {
		return fmt.Errorf("decoded to %.300q, not %.300q", text, want)
	}
	if a.TextSHA256 != "" && hash([]byte(text)) != a.TextSHA256 {
		return fmt.Errorf("decoded to another text: %.300q", text)
	}
	return nil
}

func hash(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])[:16]
}

// Every id of every text is that of the tokenizers package, and so is the way back.
func TestGoldens(t *testing.T) {
	files, _ := filepath.Glob(filepath.Join(goldens(), "*", "tokenizer.json"))
	if len(files) < 8 {
		t.Fatalf("%d tokenizers in %s", len(files), goldens())
	}
	all := texts(t)
	for _, file := range files {
		t.Run(filepath.Base(filepath.Dir(file)), func(t *testing.T) {
			if _, err := Open(file); os.Getenv("ULYSSES_TOKENIZER_GOLDENS") != "" && status.Of(err) == status.Unsupported {
				t.Skip(err)
			}
			tok := open(t, filepath.Dir(file))
			var want []answer
			readJSON(t, filepath.Join(filepath.Dir(file), "expected.json"), &want)
			if len(want) != len(all) {
				t.Fatalf("%d answers for %d texts", len(want), len(all))
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
