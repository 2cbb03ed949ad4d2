package flight

import (
	"context"
	"errors"

	"connectrpc.com/connect"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

// asStatus gives an error the code by which clients of gRPC tell what to do. Its text stays.
func asStatus(err error) error {
	if _, ok := status.FromError(err); ok {
		return err
	}
	return status.Error(codeOf(err), err.Error())
}

func codeOf(err error) codes.Code {
	var of *connect.Error
	switch {
	case errors.Is(err, client.ErrUnknown):
		return codes.Unknown
	case errors.Is(err, context.Canceled):
		return codes.Canceled
	case errors.Is(err, context.DeadlineExceeded):
		return codes.DeadlineExceeded
	case errors.Is(err, client.ErrNoName):
		return codes.NotFound
	case errors.Is(err, kv.ErrNotTree), errors.Is(err, client.ErrArgument), errors.Is(err, btree.ErrBadKey), errors.Is(err, btree.ErrTooLarge):
		return codes.InvalidArgument
	case errors.Is(err, client.ErrReadOnly), errors.Is(err, client.ErrTenant):
		return codes.PermissionDenied
	case errors.Is(err, btree.ErrNoTree), errors.Is(err, client.ErrKey), errors.Is(err, client.ErrNotEncrypted):
		return codes.FailedPrecondition
	case errors.Is(err, client.ErrNoSpace):
		return codes.ResourceExhausted
	case errors.Is(err, client.ErrCorrupt), errors.Is(err, client.ErrNotAuthentic):
		return codes.DataLoss
	case errors.Is(err, client.ErrUnreachable), errors.Is(err, client.ErrLease), errors.Is(err, client.ErrFenced), errors.Is(err, client.ErrBusy), errors.Is(err, client.ErrClosed):
		return codes.Unavailable
	case errors.As(err, &of):
		return codes.Code(of.Code()) // the codes of connect are those of gRPC
	}
	return codes.Internal
}
