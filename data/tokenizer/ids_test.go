package tokenizer

import "testing"

// If two tokens have one id, the text of the id does not depend on the order of a map, and both
// tokens have the id.
func TestSharedIDs(t *testing.T) {
	f := small()
	f["model"].(map[string]any)["vocab"] = map[string]any{"a": 0, "b": 1, "ab": 2, "c": 3, "z": 3, "y": 3, "x": 3}
	path := write(t, t.TempDir(), "tokenizer.json", f)
	for range 20 {
		tok := open(t, path)
		if s := tok.Decode([]int32{3}); s != "c" {
			t.Fatalf("id 3 is %q", s)
		}
		for _, token := range []string{"c", "x", "y", "z"} {
			if id, ok := tok.lookup(token); id != 3 || !ok {
				t.Fatalf("%s has the id %d, %v", token, id, ok)
			}
		}
	}
}
