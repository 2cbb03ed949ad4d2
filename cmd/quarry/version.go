package main

import (
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/quarrystore/quarry/proto"
)

type versionCmd struct{}

func (*versionCmd) Run(a *app) error {
	v := map[string]any{"version": version, "go": runtime.Version(), "os": runtime.GOOS, "arch": runtime.GOARCH, "layout": proto.LayoutVersion}
	if bi, ok := debug.ReadBuildInfo(); ok {
		for _, s := range bi.Settings {
			if s.Key == "vcs.revision" {
				v["commit"] = s.Value
			}
		}
	}
	return a.print(v, func(w io.Writer) {
		fmt.Fprintf(w, "quarry %s, layout %d, %s %s/%s\n", version, proto.LayoutVersion, runtime.Version(), runtime.GOOS, runtime.GOARCH)
	})
}
