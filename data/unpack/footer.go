package unpack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/parquet-go/parquet-go/encoding/thrift"
	"github.com/parquet-go/parquet-go/format"
)

// maxNames limits the names in the paths of all columns of a Parquet file. 65536 columns, which is
// the limit of github.com/parquet-go, may have 256 names each.
const maxNames = 1 << 24

// checkFooter refuses a Parquet file with a small footer for which github.com/parquet-go (v0.32.0)
// would allocate memory without a limit, before it refuses the file: a name for each level of each
// column, and pointers to each column of each row group. A footer that cannot be decoded is left
// to the library.
func checkFooter(in io.ReaderAt, size int64) error {
	end := make([]byte, 8)
	if _, err := in.ReadAt(end, size-8); err != nil || string(end[4:]) != "PAR1" {
		return nil
	}
	n := int64(binary.LittleEndian.Uint32(end))
	if n > size-8 {
		return nil
	}
	footer := make([]byte, n)
	var m format.FileMetaData
	if _, err := in.ReadAt(footer, size-8-n); err != nil ||
		thrift.NewDecoder(new(thrift.CompactProtocol).NewReaderFromBytes(footer)).Decode(&m) != nil {
		return nil
	}
	leaves, names := 0, 0
	var open []int32 // children that are missing of the groups around the element
	for _, e := range m.Schema {
		if names += len(open) + 1; names > maxNames {
			return errors.New("the columns are nested too deeply")
		}
		if children := e.NumChildren; children.Valid && children.V > 0 {
			open = append(open, children.V)
			continue
		}
		if e.Type.Valid {
			leaves++
		}
		for len(open) > 0 {
			last := len(open) - 1
			if open[last]--; open[last] > 0 {
				break
			}
			open = open[:last]
		}
	}
	for i, g := range m.RowGroups {
		if len(g.Columns) != leaves {
			return fmt.Errorf("row group %d has %d columns, and the schema has %d", i, len(g.Columns), leaves)
		}
	}
	return nil
}
