package flight

import (
	"fmt"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// Names of columns.
const (
	KeyColumn     = "key"
	ValueColumn   = "value"
	VersionColumn = "version" // of the value; it rises with each write of the key
)

// fieldOf are the columns that a tree has.
var fieldOf = map[string]arrow.Field{
	KeyColumn:     {Name: KeyColumn, Type: arrow.BinaryTypes.Binary},
	ValueColumn:   {Name: ValueColumn, Type: arrow.BinaryTypes.Binary},
	VersionColumn: {Name: VersionColumn, Type: arrow.PrimitiveTypes.Uint64},
}

// standardColumns are those of a request that names none.
var standardColumns = []string{KeyColumn, ValueColumn}

// checkColumns refuses a projection that no stream can have.
func checkColumns(columns []string) error {
	for i, c := range columns {
		if _, ok := fieldOf[c]; !ok {
			return fmt.Errorf("column %q: want %s, %s or %s", c, KeyColumn, ValueColumn, VersionColumn)
		}
		if slices.Contains(columns[:i], c) {
			return fmt.Errorf("column %q is named twice", c)
		}
	}
	return nil
}

// schemaOf is the schema of a projection.
func schemaOf(columns []string) *arrow.Schema {
	var fields []arrow.Field
	for _, c := range columns {
		fields = append(fields, fieldOf[c])
	}
	return arrow.NewSchema(fields, nil)
}

// builder makes the batches of a projection.
type builder struct {
	schema  *arrow.Schema
	columns []array.Builder
	keys    *array.BinaryBuilder // nil: not in the projection, as the others
	values  *array.BinaryBuilder
	version *array.Uint64Builder
	rows    int
	bytes   int // of keys and values that are in the projection
}

func newBuilder(columns []string) *builder {
	b := &builder{schema: schemaOf(columns)}
	for _, c := range columns {
		var column array.Builder
		switch c {
		case KeyColumn:
			b.keys = array.NewBinaryBuilder(memory.DefaultAllocator, arrow.BinaryTypes.Binary)
			column = b.keys
		case ValueColumn:
			b.values = array.NewBinaryBuilder(memory.DefaultAllocator, arrow.BinaryTypes.Binary)
			column = b.values
		default:
			b.version = array.NewUint64Builder(memory.DefaultAllocator)
			column = b.version
		}
		b.columns = append(b.columns, column)
	}
	return b
}

// size is what an entry adds to bytes.
func (b *builder) size(key, value []byte) (n int) {
	if b.keys != nil {
		n += len(key)
	}
	if b.values != nil {
		n += len(value)
	}
	return n
}

// add copies an entry into the batch.
func (b *builder) add(key, value []byte, version uint64) {
	b.bytes += b.size(key, value)
	b.rows++
	if b.keys != nil {
		b.keys.Append(key)
	}
	if b.values != nil {
		b.values.Append(value)
	}
	if b.version != nil {
		b.version.Append(version)
	}
}

// batch is what was added since the last batch. The caller releases it.
func (b *builder) batch() arrow.RecordBatch {
	var columns []arrow.Array
	for _, c := range b.columns {
		a := c.NewArray()
		defer a.Release()
		columns = append(columns, a)
	}
	r := array.NewRecordBatch(b.schema, columns, int64(b.rows))
	b.rows, b.bytes = 0, 0
	return r
}

func (b *builder) release() {
	for _, c := range b.columns {
		c.Release()
	}
}
