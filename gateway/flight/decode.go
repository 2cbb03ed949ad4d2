package flight

import (
	"bytes"

	arrowflight "github.com/apache/arrow-go/v18/arrow/flight"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	grpcproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

const (
	// clientWindow is what a server may send before a client reads it: some batches.
	clientWindow = 4 << 20
	// readOnce is how much of its connection a client reads in one call.
	readOnce = 128 << 10
	// bodyAlignment is that of the buffers of a batch, in their body and so in memory.
	bodyAlignment = 8
)

// DialOptions are options for clients in Go that read large ranges (NewClientWithMiddleware of Arrow's package flight): a window for some batches, messages of
// the size that the largest entry takes, and a codec that copies a batch once, where that of gRPC does so three times.
func DialOptions() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithInitialWindowSize(clientWindow), grpc.WithInitialConnWindowSize(clientWindow), grpc.WithReadBufferSize(readOnce),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MinMemory), grpc.ForceCodecV2(decoder{encoding.GetCodecV2(grpcproto.Name)})),
	}
}

// decoder is the codec of gRPC, which decodes batches with one copy.
type decoder struct{ encoding.CodecV2 }

// Unmarshal implements encoding.CodecV2.
func (c decoder) Unmarshal(data mem.BufferSlice, v any) error {
	if d, ok := v.(*arrowflight.FlightData); ok && decode(data, d) {
		return nil
	}
	return c.CodecV2.Unmarshal(data, v)
}

// decode decodes a message of a header, metadata and a body into slices of one copy of it. It leaves all others to package proto, and those that are
// damaged, of which it says what is wrong.
func decode(data mem.BufferSlice, d *arrowflight.FlightData) bool {
	if len(data) == 0 {
		return false
	}
	whole := make([][]byte, 1, 1+len(data))
	for _, piece := range data {
		whole = append(whole, piece.ReadOnlyData())
	}
	var space [bodyAlignment]byte
	skip := -bodyAt(whole[1]) & (bodyAlignment - 1)
	whole[0] = space[:skip]
	b := bytes.Join(whole, nil)[skip:]
	var header, meta, body []byte
	for len(b) > 0 {
		field, kind, n := protowire.ConsumeTag(b)
		if n < 0 || kind != protowire.BytesType {
			return false
		}
		value, m := protowire.ConsumeBytes(b[n:])
		if m < 0 {
			return false
		}
		b = b[n+m:]
		into := &header
		switch field {
		case headerField:
		case metaField:
			into = &meta
		case bodyField:
			into = &body
		default:
			return false
		}
		if *into != nil { // twice
			return false
		}
		*into = value[:len(value):len(value)]
	}
	d.Reset()
	d.DataHeader, d.AppMetadata, d.DataBody = header, meta, body
	return true
}

// bodyAt is where the body begins, in bytes that have it and what stands before; else any number.
func bodyAt(b []byte) int {
	at := 0
	for at < len(b) {
		field, kind, n := protowire.ConsumeTag(b[at:])
		if n < 0 {
			return 0
		}
		at += n
		if field == bodyField && kind == protowire.BytesType {
			_, n := protowire.ConsumeVarint(b[at:])
			return at + max(n, 0)
		}
		if n = protowire.ConsumeFieldValue(field, kind, b[at:]); n < 0 {
			return 0
		}
		at += n
	}
	return 0
}
