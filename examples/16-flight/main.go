// A tree by Arrow Flight: entries are put in a batch, and each range of the tree is read at the server that is beside it.
//
//	quarry kv create -t prices
//	quarry gateway flight &
//	go run ./examples/16-flight 127.0.0.1:8815 prices
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/url"
	"os"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	quarry "github.com/quarrystore/quarry/gateway/flight"
)

var schema = arrow.NewSchema([]arrow.Field{{Name: "key", Type: arrow.BinaryTypes.Binary}, {Name: "value", Type: arrow.BinaryTypes.Binary}}, nil)

func main() {
	if len(os.Args) != 3 {
		log.Fatal("want HOST:PORT of a server and the name of a tree")
	}
	ctx := context.Background()
	if token := os.Getenv("QUARRY_TOKEN"); token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	if err := run(ctx, os.Args[1], os.Args[2]); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, address, tree string) error {
	c, err := dial(address)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := put(ctx, c, tree); err != nil {
		return err
	}
	info, err := c.GetFlightInfo(ctx, &flight.FlightDescriptor{Type: flight.DescriptorCMD, Cmd: fmt.Appendf(nil, `{"tree":%q,"prefix":"item "}`, tree)})
	if err != nil {
		return err
	}
	rows, bytes := 0, 0
	for _, e := range info.Endpoint { // programs on many hosts read them side by side
		at := c
		if len(e.Location) > 0 {
			u, err := url.Parse(e.Location[0].Uri)
			if err != nil {
				return err
			}
			if at, err = dial(u.Host); err != nil {
				return err
			}
			defer at.Close()
		}
		r, n, err := read(ctx, at, e.Ticket)
		if err != nil {
			return err
		}
		rows, bytes = rows+r, bytes+n
	}
	fmt.Printf("%d rows, %d bytes of values\n", rows, bytes)
	return nil
}

func dial(address string) (flight.Client, error) {
	return flight.NewClientWithMiddleware(address, nil, nil, append(quarry.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
}

// put puts one batch and waits until it is acknowledged.
func put(ctx context.Context, c flight.Client, tree string) error {
	b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	defer b.Release()
	for i := range 2000 {
		b.Field(0).(*array.BinaryBuilder).AppendString(fmt.Sprintf("item %04d", i))
		b.Field(1).(*array.BinaryBuilder).AppendString(fmt.Sprintf("price %04d", i*7%10000))
	}
	stream, err := c.DoPut(ctx)
	if err != nil {
		return err
	}
	w := flight.NewRecordWriter(stream, ipc.WithSchema(schema))
	w.SetFlightDescriptor(&flight.FlightDescriptor{Type: flight.DescriptorPATH, Path: []string{tree}})
	if err := w.Write(b.NewRecordBatch()); err != nil && !errors.Is(err, io.EOF) {
		return err // io.EOF: the server has ended the stream, and Recv says why
	}
	ack, err := stream.Recv()
	if err != nil {
		return err
	}
	fmt.Printf("%s\n", ack.AppMetadata)
	return errors.Join(w.Close(), stream.CloseSend())
}

// read reads the stream of a ticket.
func read(ctx context.Context, c flight.Client, t *flight.Ticket) (rows, bytes int, err error) {
	stream, err := c.DoGet(ctx, t)
	if err != nil {
		return 0, 0, err
	}
	r, err := flight.NewRecordReader(stream)
	if err != nil {
		return 0, 0, err
	}
	defer r.Release()
	for r.Next() {
		rows += int(r.RecordBatch().NumRows())
		bytes += len(r.RecordBatch().Column(1).(*array.Binary).ValueBytes())
	}
	return rows, bytes, r.Err()
}
