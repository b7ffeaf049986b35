package tfevents

import (
	"bytes"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// golden is what TensorBoard 2.21 writes (RecordWriter) for the same events.
const golden = `
1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c
0f000000000000006d532b0909000000000000f83f10073a020801774771c7260000000000000073
4fe30009000000000000f83f10ac022a180a0b0a046c6f737315000020400a090a026c72156f1283
ba0f955118
`

// TensorBoard's own writer writes the same bytes.
func TestBytes(t *testing.T) {
	dir, now := filepath.Join(t.TempDir(), "new"), time.Unix(1, 500_000_000)
	f, err := Create(dir, now, 7)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Scalars(now, 300, map[string]float64{"lr": -1e-3, "loss": 2.5}); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	paths, _ := filepath.Glob(filepath.Join(dir, Pattern))
	if len(paths) != 1 {
		t.Fatal(paths)
	}
	got, err := os.ReadFile(paths[0])
	if err != nil {
		t.Fatal(err)
	}
	want, err := hex.DecodeString(strings.Join(strings.Fields(golden), ""))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("% x, want % x", got, want)
	}
	if _, err := Create(dir, now, 0); err != nil {
		t.Error(err)
	}
	if paths, _ = filepath.Glob(filepath.Join(dir, Pattern)); len(paths) != 2 {
		t.Errorf("a second file in the same second: %v", paths)
	}
}
