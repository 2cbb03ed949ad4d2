#!/bin/sh
# Tests the verbs provider beside a real kernel RDMA stack: on this host's device if it
# has one that is active, otherwise in a virtual machine with Soft-RoCE.
# Arguments are given to the test binary, such as -test.run Fence.
# Says in one line why if this machine cannot (and succeeds).
set -eu
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
go build -o "$work/rxevm" ./internal/rxevm/cmd/rxevm
# Packages, headers among them: installed when run as root.
code=0
"$work/rxevm" --prepare || code=$?
if [ $code = 77 ]; then exit 0; fi
[ $code = 0 ] || exit $code
if ! CGO_ENABLED=1 go test -c -tags verbs -o "$work/verbs.test" ./rdma/verbs; then
	echo "test-rdma: the verbs provider does not build: needs gcc, libibverbs-dev"
	exit 1
fi
"$work/rxevm" --native-ok --timeout 5m -- "$work/verbs.test" -test.v -test.timeout 280s "$@" || code=$?
if [ $code = 77 ]; then exit 0; fi
exit $code
