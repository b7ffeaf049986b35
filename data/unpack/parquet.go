package unpack

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/format"

	"ulysses/internal/status"
)

// parquetLines writes the rows of a Parquet file as lines of JSON. Fields of objects that are null
// are left out, because a column has the fields of all rows. github.com/parquet-go panics for some
// files that are not valid.
func parquetLines(w io.Writer, in io.ReaderAt, size int64, fields []string) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("parquet: the file is not valid: %v", r)
		}
	}()
	if err := checkFooter(in, size); err != nil {
		return fmt.Errorf("parquet: %w", err)
	}
	f, err := parquet.OpenFile(in, size, parquet.SkipBloomFilters(true), parquet.SkipPageIndex(true))
	if err != nil {
		return fmt.Errorf("parquet: %w", err)
	}
	var roots []*node
	for _, c := range f.Root().Columns() {
		if slices.Contains(fields, c.Name()) {
			roots = append(roots, newNode(c))
		}
	}
	if len(roots) == 0 {
		var names []string
		for _, c := range f.Root().Columns() {
			names = append(names, strconv.Quote(c.Name()))
		}
		return status.Errorf(status.InvalidConfig,
			"there is none of the columns %s among %s; set data.text_field to a column with text",
			strings.Join(fields, ", "), strings.Join(names[:min(len(names), 12)], ", "))
	}
	out := bufio.NewWriterSize(w, 1<<20)
	for i, group := range f.RowGroups() {
		if err := refuse(f.Metadata().RowGroups[i].Columns, roots); err != nil {
			return err
		}
		if err := writeGroup(out, group, roots); err != nil {
			return err
		}
	}
	return out.Flush()
}

// node is a column, or a group of columns.
type node struct {
	name               string
	optional, repeated bool
	def, rep           int // maximal levels of definition and repetition
	children           []*node
	leaf               int // index of the column, or -1
	unsigned           bool
}

func newNode(c *parquet.Column) *node {
	n := &node{name: c.Name(), optional: c.Optional(), repeated: c.Repeated(), def: c.MaxDefinitionLevel(),
		rep: c.MaxRepetitionLevel(), leaf: -1}
	for _, child := range c.Columns() {
		n.children = append(n.children, newNode(child))
	}
	if c.Leaf() {
		n.leaf = c.Index()
		if t := c.Type().LogicalType(); t != nil {
			integer, ok := t.Value.(*format.IntType)
			n.unsigned = ok && !integer.IsSigned
		}
	}
	return n
}

// leaves appends the leaves of a node.
func (n *node) leaves(all []*node) []*node {
	if n.leaf >= 0 {
		return append(all, n)
	}
	for _, c := range n.children {
		all = c.leaves(all)
	}
	return all
}

// refuse refuses columns that github.com/parquet-go (v0.32.0) decodes wrongly without an error.
func refuse(chunks []format.ColumnChunk, roots []*node) error {
	for _, root := range roots {
		for _, leaf := range root.leaves(nil) {
			m := &chunks[leaf.leaf].MetaData
			name := strings.Join(m.PathInSchema, ".")
			switch {
			case m.Codec == format.Lz4Raw, m.Codec == format.Lz4: // text is lost unless a page shrinks to a third
				return status.Errorf(status.Unsupported,
					"column %s: the compression LZ4 is not supported; write the file with zstd or snappy", name)
			case m.Type == format.Boolean && inRuns(m):
				return status.Errorf(status.Unsupported,
					"column %s: booleans in the encoding RLE are not supported; write the file with data pages of version 1.0",
					name)
			}
		}
	}
	return nil
}

// inRuns reports whether values are in runs (the encoding RLE), as booleans often are in pages of
// version 2. Of booleans, a run of true is decoded as one true and seven false.
func inRuns(m *format.ColumnMetaData) bool {
	if pages := m.EncodingStats; len(pages) > 0 {
		return slices.ContainsFunc(pages, func(p format.PageEncodingStats) bool { return p.Encoding == format.RLE })
	}
	// the encodings of values and of levels, which are in runs
	return slices.Contains(m.Encoding, format.RLE) && !slices.Contains(m.Encoding, format.Plain)
}

// cursor reads the values of a column chunk, row by row.
type cursor struct {
	pages  parquet.Pages
	values parquet.ValueReader
	page   parquet.Page
	buf    []parquet.Value
	n, at  int
	row    []parquet.Value
}

// peek returns the next value; io.EOF at the end of the chunk.
func (c *cursor) peek() (*parquet.Value, error) {
	for c.at == c.n {
		if c.values == nil {
			page, err := c.pages.ReadPage()
			if err != nil {
				return nil, err
			}
			c.page, c.values = page, page.Values()
		}
		n, err := c.values.ReadValues(c.buf)
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		for i := range c.buf[:n] {
			c.buf[i] = c.buf[i].Clone()
		}
		if c.n, c.at = n, 0; err != nil || n == 0 {
			parquet.Release(c.page)
			c.values = nil
		}
	}
	return &c.buf[c.at], nil
}

// next reads the values of a row into c.row.
func (c *cursor) next() error {
	c.row = c.row[:0]
	for {
		v, err := c.peek()
		if errors.Is(err, io.EOF) && len(c.row) > 0 {
			return nil
		} else if err != nil {
			return err
		}
		if len(c.row) > 0 && v.RepetitionLevel() == 0 {
			return nil
		}
		c.row = append(c.row, *v)
		c.at++
	}
}

func writeGroup(out *bufio.Writer, group parquet.RowGroup, roots []*node) error {
	chunks := group.ColumnChunks()
	var cursors [][]*cursor // of the leaves of each root
	for _, root := range roots {
		var of []*cursor
		for _, leaf := range root.leaves(nil) {
			c := &cursor{pages: chunks[leaf.leaf].Pages(), buf: make([]parquet.Value, 256)}
			defer c.pages.Close()
			of = append(of, c)
		}
		cursors = append(cursors, of)
	}
	var line []byte
	for range group.NumRows() {
		line = append(line[:0], '{')
		for i, root := range roots {
			values := make([][]parquet.Value, len(cursors[i]))
			for k, c := range cursors[i] {
				if err := c.next(); err != nil {
					return fmt.Errorf("parquet: column %s: %w", root.name, err)
				}
				values[k] = c.row
			}
			if i > 0 {
				line = append(line, ',')
			}
			line = append(appendString(line, root.name), ':')
			line = root.append(line, values)
		}
		if _, err := out.Write(append(line, '}', '\n')); err != nil {
			return err
		}
	}
	return nil
}

// append appends a value as JSON. values has, for each leaf of the node, the values of this one.
func (n *node) append(b []byte, values [][]parquet.Value) []byte {
	switch {
	case n.repeated:
		return n.appendList(b, values, func(b []byte, v [][]parquet.Value) []byte { return n.appendOne(b, v) })
	case n.optional && values[0][0].DefinitionLevel() < n.def:
		return append(b, "null"...)
	}
	return n.appendOne(b, values)
}

// appendOne appends a value that is not null.
func (n *node) appendOne(b []byte, values [][]parquet.Value) []byte {
	if n.leaf >= 0 {
		return n.appendValue(b, values[0][0])
	}
	if len(n.children) == 1 && n.children[0].repeated {
		list := n.children[0]
		switch {
		case len(list.children) == 2 && list.children[0].name == "key":
			return list.appendMap(b, values)
		case len(list.children) == 1: // the list of three levels that the format prescribes
			return list.appendList(b, values, list.children[0].append)
		}
		return list.append(b, values)
	}
	b = append(b, '{')
	first, at := true, 0
	for _, c := range n.children {
		of := values[at : at+len(c.leaves(nil))]
		at += len(of)
		if c.optional && of[0][0].DefinitionLevel() < c.def {
			continue
		}
		if !first {
			b = append(b, ',')
		}
		first = false
		b = append(appendString(b, c.name), ':')
		b = c.append(b, of)
	}
	return append(b, '}')
}

// elements calls f with the values of each element of a repeated node.
func (n *node) elements(values [][]parquet.Value, f func([][]parquet.Value)) {
	if values[0][0].DefinitionLevel() < n.def {
		return // an empty list
	}
	at := make([]int, len(values))
	for at[0] < len(values[0]) {
		element := make([][]parquet.Value, len(values))
		for k, v := range values {
			end := at[k] + 1
			for end < len(v) && v[end].RepetitionLevel() > n.rep {
				end++
			}
			element[k], at[k] = v[at[k]:end], end
		}
		f(element)
	}
}

func (n *node) appendList(b []byte, values [][]parquet.Value, one func([]byte, [][]parquet.Value) []byte) []byte {
	b = append(b, '[')
	n.elements(values, func(v [][]parquet.Value) {
		if b[len(b)-1] != '[' {
			b = append(b, ',')
		}
		b = one(b, v)
	})
	return append(b, ']')
}

func (n *node) appendMap(b []byte, values [][]parquet.Value) []byte {
	b = append(b, '{')
	keys := len(n.children[0].leaves(nil))
	n.elements(values, func(v [][]parquet.Value) {
		if b[len(b)-1] != '{' {
			b = append(b, ',')
		}
		b = appendString(b, v[0][0].String())
		b = append(b, ':')
		b = n.children[1].append(b, v[keys:])
	})
	return append(b, '}')
}

func (n *node) appendValue(b []byte, v parquet.Value) []byte {
	switch v.Kind() {
	case parquet.Boolean:
		return strconv.AppendBool(b, v.Boolean())
	case parquet.Int32:
		if n.unsigned {
			return strconv.AppendUint(b, uint64(v.Uint32()), 10)
		}
		return strconv.AppendInt(b, int64(v.Int32()), 10)
	case parquet.Int64:
		if n.unsigned {
			return strconv.AppendUint(b, v.Uint64(), 10)
		}
		return strconv.AppendInt(b, v.Int64(), 10)
	case parquet.Float:
		return appendFloat(b, float64(v.Float()), 32)
	case parquet.Double:
		return appendFloat(b, v.Double(), 64)
	case parquet.ByteArray, parquet.FixedLenByteArray:
		return appendString(b, string(v.ByteArray()))
	}
	return appendString(b, v.String())
}

func appendFloat(b []byte, x float64, bits int) []byte {
	if math.IsNaN(x) || math.IsInf(x, 0) {
		return append(b, "null"...)
	}
	at := len(b)
	b = strconv.AppendFloat(b, x, 'g', -1, bits)
	if !strings.ContainsAny(string(b[at:]), ".e") {
		b = append(b, ".0"...)
	}
	return b
}

// appendString appends a string in JSON. Bytes that are not UTF-8 stay, so that the reader of the
// line refuses them.
func appendString(b []byte, s string) []byte {
	b = append(b, '"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c == '\n':
			b = append(b, '\\', 'n')
		case c < 0x20:
			b = fmt.Appendf(b, "\\u%04x", c)
		default:
			b = append(b, c)
		}
	}
	return append(b, '"')
}
