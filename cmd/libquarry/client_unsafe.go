package main

/*
#include <stdlib.h>
#include "types.h"
*/
import "C"

import (
	"cmp"
	"context"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/quarrystore/quarry/client"
)

// clients are the open handles of clients.
var clients = table[*client.Client]{kind: 1}

var versionText = sync.OnceValue(func() *C.char { return C.CString(version) })

//export quarry_abi
func quarry_abi(major, minor *C.uint32_t) {
	if major != nil {
		*major = C.QUARRY_ABI_MAJOR
	}
	if minor != nil {
		*minor = C.QUARRY_ABI_MINOR
	}
}

//export quarry_version
func quarry_version() *C.quarry_text { return (*C.quarry_text)(unsafe.Pointer(versionText())) }

//export quarry_connect
func quarry_connect(o *C.quarry_connect_options, out *C.quarry_client, e *C.quarry_error) C.int {
	return answer(e, open((*C.quarry_options)(unsafe.Pointer(o)), out))
}

func open(o *C.quarry_options, out *C.quarry_client) error {
	if out == nil {
		return argument("client is NULL")
	}
	*out = 0
	cfg, err := config(o)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), cmp.Or(cfg.Timeout, client.DefaultTimeout))
	defer cancel()
	c, err := client.Connect(ctx, cfg)
	if err != nil {
		return err
	}
	number, err := clients.add(c)
	if err != nil {
		_ = c.Close()
		return err
	}
	*out = C.quarry_client(number)
	return nil
}

// config is that of the environment with the options that are set.
func config(o *C.quarry_options) (client.Config, error) {
	cfg, err := client.ConfigFromEnvironment()
	if err != nil || o == nil {
		return cfg, err
	}
	if o.bytes != C.sizeof_quarry_options {
		return cfg, argument("quarry_options.bytes is %d, and this library takes %d", o.bytes, C.sizeof_quarry_options)
	}
	if o.reserved != 0 || o.read_only > 1 {
		return cfg, argument("read_only is %d (0 or 1), reserved is %d (0)", o.read_only, o.reserved)
	}
	if o.durability > C.QUARRY_DURABLE {
		return cfg, argument("durability is %d", o.durability)
	}
	for _, s := range []struct {
		from *C.char
		to   *string
	}{{o.name, &cfg.Name}, {o.transport, &cfg.Transport}, {o.token, &cfg.Token}, {o.tenant, &cfg.Tenant}} {
		if s.from != nil {
			*s.to = C.GoString(s.from)
		}
	}
	if o.controllers != nil {
		cfg.Controllers = strings.Split(C.GoString(o.controllers), ",")
	}
	cfg.Timeout = time.Duration(o.timeout_ms) * time.Millisecond
	cfg.Lanes, cfg.Replicas = int(o.lanes), int(o.replicas)
	cfg.Durability, cfg.ReadOnly = client.Durability(o.durability), o.read_only == 1
	return cfg, nil
}

//export quarry_close
func quarry_close(number C.quarry_client, e *C.quarry_error) C.int {
	c, err := clients.remove(uint64(number))
	if err == nil {
		trees.removeIf(func(t tree) bool { return t.of == uint64(number) })
		spaces.removeIf(func(s spaceHandle) bool { return s.of == uint64(number) })
		err = c.Close()
	}
	return answer(e, err)
}
