package main

import (
	"fmt"
	"io"
	"slices"

	"github.com/quarrystore/quarry/internal/payloadkey"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// keyPayloadCmd keeps the files of --key-file. It asks no controller.
type keyPayloadCmd struct {
	Create keyPayloadCreateCmd `cmd:"" help:"Add a key for the tenant to a file: the first encrypts, later ones decrypt until quarry key payload use."`
	Use    keyPayloadUseCmd    `cmd:"" help:"Have a key of a file encrypt from now on. Every client must have read the key before."`
	List   keyPayloadListCmd   `cmd:"" help:"List the keys of a file."`
}

type keyPayloadCreateCmd struct {
	File string `arg:"" help:"Key file; made if it is not there."`
}

func (k *keyPayloadCreateCmd) Run(a *app) error {
	e := payloadkey.Entry{Tenant: a.keyTenant(), Key: payloadkey.NewKey()}
	err := payloadkey.ChangeFile(k.File, func(list []payloadkey.Entry) ([]payloadkey.Entry, error) { return append(list, e), nil })
	if err != nil {
		return err
	}
	return a.printPayloadKeys(k.File)
}

type keyPayloadUseCmd struct {
	File string `arg:"" help:"Key file."`
	ID   string `arg:"" name:"key" help:"Id of the key."`
}

func (k *keyPayloadUseCmd) Run(a *app) error {
	err := payloadkey.ChangeFile(k.File, func(list []payloadkey.Entry) ([]payloadkey.Entry, error) {
		i := slices.IndexFunc(list, func(e payloadkey.Entry) bool {
			return e.Tenant == a.keyTenant() && payloadkey.IDText(e.Key.ID()) == k.ID
		})
		if i < 0 {
			return nil, usagef("key file %s has no key %q of tenant %q: quarry key payload list shows them", k.File, k.ID, a.keyTenant())
		}
		e := list[i]
		return slices.Insert(slices.Delete(list, i, i+1), 0, e), nil
	})
	if err != nil {
		return err
	}
	return a.printPayloadKeys(k.File)
}

type keyPayloadListCmd struct {
	File string `arg:"" help:"Key file."`
}

func (k *keyPayloadListCmd) Run(a *app) error { return a.printPayloadKeys(k.File) }

// keyTenant is the tenant whose keys a command is about.
func (a *app) keyTenant() string {
	if a.cli.Tenant == "" {
		return quarrypb.DefaultTenant
	}
	return a.cli.Tenant
}

type payloadKeyView struct {
	Tenant   string `json:"tenant"`
	ID       string `json:"id"`
	Encrypts bool   `json:"encrypts"`
}

func (a *app) printPayloadKeys(name string) error {
	list, err := payloadkey.ReadFile(name)
	if err != nil {
		return err
	}
	v := []payloadKeyView{}
	for _, e := range list {
		first := !slices.ContainsFunc(v, func(p payloadKeyView) bool { return p.Tenant == e.Tenant })
		v = append(v, payloadKeyView{e.Tenant, payloadkey.IDText(e.Key.ID()), first})
	}
	return a.print(v, func(w io.Writer) {
		fmt.Fprintln(w, "TENANT\tKEY\tUSE")
		for _, k := range v {
			fmt.Fprintf(w, "%s\t%s\t%s\n", k.Tenant, k.ID, map[bool]string{true: "encrypts and decrypts", false: "decrypts"}[k.Encrypts])
		}
	})
}
