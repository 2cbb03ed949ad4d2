#!/bin/sh
# Generates quarry.pb.go and quarrypbconnect/ into the folder given, default here.
# Needs protoc (Debian: protobuf-compiler); the plugins are built from the module
# versions that go.mod pins.
set -eu
cd "$(dirname "$0")"
out=${1:-.}
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
version() { go list -m -f '{{.Version}}' "$1"; }
GOBIN=$bin go install "google.golang.org/protobuf/cmd/protoc-gen-go@$(version google.golang.org/protobuf)"
GOBIN=$bin go install "connectrpc.com/connect/cmd/protoc-gen-connect-go@$(version connectrpc.com/connect)"
PATH=$bin:$PATH protoc --proto_path=. \
  --go_out="$out" --go_opt=paths=source_relative \
  --connect-go_out="$out" --connect-go_opt=paths=source_relative \
  quarry.proto
