package unpack

import (
	"encoding/binary"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/encoding"
	"github.com/parquet-go/parquet-go/encoding/thrift"
	"github.com/parquet-go/parquet-go/format"

	"ulysses/internal/status"
)

// Columns in LZ4 are refused, because the decoder of a page may leave out its result. Other columns
// of the file are read.
func TestLZ4(t *testing.T) {
	path := filepath.Join(t.TempDir(), "rows.parquet")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	schema := parquet.NewSchema("rows",
		parquet.Group{"text": parquet.Compressed(parquet.String(), &parquet.Lz4Raw),
			"other": parquet.Compressed(parquet.String(), &parquet.Snappy)})
	w := parquet.NewGenericWriter[map[string]any](f, schema)
	if _, err := w.Write([]map[string]any{{"text": "a", "other": "b"}}); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	f.Close()
	want := "column text: the compression LZ4 is not supported; write the file with zstd or snappy"
	if _, err := Open(path, []string{"text"}); status.Of(err) != status.Unsupported ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("%v; want %s", err, want)
	}
	out, err := Open(path, []string{"other"})
	if err != nil {
		t.Fatal(err)
	}
	out.Close()
}

// Booleans are read in the encoding of bits. In runs they are refused, because their decoder is
// wrong.
func TestBooleans(t *testing.T) {
	type row struct {
		Text  string `parquet:"text"`
		Train bool   `parquet:"train"`
	}
	for _, x := range []struct {
		encoding encoding.Encoding
		want     string
	}{{&parquet.Plain, `{"text":"a","train":true}`},
		{&parquet.RLE, "column train: booleans in the encoding RLE are not supported"}} {
		path := filepath.Join(t.TempDir(), "rows.parquet")
		f, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		schema := parquet.NewSchema("rows",
			parquet.Group{"text": parquet.String(),
				"train": parquet.Encoded(parquet.Leaf(parquet.BooleanType), x.encoding)})
		w := parquet.NewGenericWriter[row](f, schema)
		if _, err := w.Write([]row{{"a", true}, {"b", true}, {"c", false}}); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		f.Close()
		for _, column := range []string{"train", "text"} {
			out, err := Open(path, []string{"text", column})
			if column == "train" && x.encoding != &parquet.Plain {
				if status.Of(err) != status.Unsupported || !strings.Contains(err.Error(), x.want) {
					t.Errorf("%v; want %s", err, x.want)
				}
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			if _, err := out.Seek(0, io.SeekStart); err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(out)
			if err != nil || column == "train" && !strings.HasPrefix(string(text), x.want) {
				t.Errorf("%s, %v; want %s", text, err, x.want)
			}
			out.Close()
		}
	}
}

// A footer that describes far more than it has is refused before memory is allocated for it: deeply
// nested columns, and columns that the row groups do not have.
func TestFooters(t *testing.T) {
	element := func(children int32) (e format.SchemaElement) {
		e.Name = "text"
		e.RepetitionType.V, e.RepetitionType.Valid = format.Optional, true
		if children > 0 {
			e.NumChildren.V, e.NumChildren.Valid = children, true
		} else {
			e.Type.V, e.Type.Valid = format.ByteArray, true
		}
		return e
	}
	deep, wide := format.FileMetaData{Version: 1}, format.FileMetaData{Version: 1}
	for range 6000 {
		deep.Schema = append(deep.Schema, element(1))
	}
	deep.Schema = append(deep.Schema, element(0))
	wide.Schema = append(wide.Schema, element(100))
	for range 100 {
		wide.Schema = append(wide.Schema, element(0))
		wide.RowGroups = append(wide.RowGroups, format.RowGroup{})
	}
	for want, m := range map[string]format.FileMetaData{
		"parquet: the columns are nested too deeply; write it again":                 deep,
		"parquet: row group 0 has 0 columns, and the schema has 100; write it again": wide,
	} {
		footer, err := thrift.Marshal(new(thrift.CompactProtocol), &m)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "rows.parquet")
		all := binary.LittleEndian.AppendUint32(append([]byte("PAR1"), footer...), uint32(len(footer)))
		if err := os.WriteFile(path, append(all, "PAR1"...), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(path, []string{"text"}); status.Of(err) != status.IO ||
			!strings.HasSuffix(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
