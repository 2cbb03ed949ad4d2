//go:build wasip1

// A module that misbehaves as its argument says.
package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/guest"
)

type odd struct{ hold [][]byte }

func (o *odd) Map(env coproc.Env, key, value []byte, emit coproc.Emit) error {
	switch env.Arg("do", "") {
	case "panic":
		panic("oh no")
	case "loop":
		for n := 0; ; n++ {
			if n < 0 {
				return errors.New("the end of all numbers")
			}
		}
	case "sleep":
		time.Sleep(time.Hour)
	case "allocate":
		for {
			o.hold = append(o.hold, make([]byte, 1<<20))
		}
	case "take 40 MiB":
		o.hold = append(o.hold, make([]byte, 40<<20))
	case "rubbish":
		_, _ = os.Stdout.WriteString(strings.Repeat("rubbish ", 1<<12))
	case "leave":
		os.Exit(0)
	case "write elsewhere":
		t, err := env.Tree("other")
		if err != nil {
			return err
		}
		return t.Put(key, value)
	case "look around":
		_, readErr := os.ReadFile("/etc/passwd")
		_, dirErr := os.ReadDir("/")
		_, dialErr := net.Dial("tcp", "127.0.0.1:1")
		return emit(key, fmt.Appendf(nil, "%v %v %v %d", readErr != nil, dirErr != nil, dialErr != nil, len(os.Environ())))
	}
	return emit(key, value)
}

func main() { guest.Main("odd", "misbehaves", func() coproc.Plugin { return &odd{} }) }
