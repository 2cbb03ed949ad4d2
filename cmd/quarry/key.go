package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

type keyCmd struct {
	List   keyListCmd   `cmd:"" help:"List the keys that controllers sign tickets and commands with."`
	Rotate keyRotateCmd `cmd:"" help:"Make another signing key. It signs once all storage nodes have learned it; the one before verifies until the last of its sessions has ended."`

	Payload keyPayloadCmd `cmd:"" help:"Keep files of the keys that clients encrypt payloads with (--key-file)."`
}

type keyListCmd struct{}

func (*keyListCmd) Run(ctx context.Context, a *app) error {
	res, err := ask(ctx, a, &quarrypb.ListKeysRequest{}, quarrypbconnect.ControllerClient.ListKeys)
	if err != nil {
		return err
	}
	return a.printKeys(res)
}

type keyRotateCmd struct{}

func (*keyRotateCmd) Run(ctx context.Context, a *app) error {
	res, err := ask(ctx, a, &quarrypb.RotateKeyRequest{}, quarrypbconnect.ControllerClient.RotateKey)
	if err != nil {
		return err
	}
	return a.printKeys(res)
}

type keyView struct {
	ID       string `json:"id"`
	State    string `json:"state"`
	Sessions uint32 `json:"sessions"`
}

func (a *app) printKeys(r *quarrypb.KeysResponse) error {
	v := struct {
		Keys    []keyView `json:"keys"`
		Waiting []string  `json:"waiting"`
	}{[]keyView{}, append([]string{}, r.Waiting...)}
	for _, k := range r.Keys {
		v.Keys = append(v.Keys, keyView{fmt.Sprintf("%016x", k.Id), k.State, k.Sessions})
	}
	return a.print(v, func(w io.Writer) {
		fmt.Fprintln(w, "KEY\tSTATE\tSESSIONS")
		for _, k := range v.Keys {
			fmt.Fprintf(w, "%s\t%s\t%d\n", k.ID, k.State, k.Sessions)
		}
		if len(v.Waiting) > 0 {
			fmt.Fprintf(w, "\nwaiting for %s to learn the next key\n", strings.Join(v.Waiting, ", "))
		}
	})
}
