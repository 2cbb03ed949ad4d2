#!/bin/sh
# Builds librpmem.so.1 into a folder: the functions of librpmem, on pools of Quarry.
#
#   sh cmd/librpmem/build.sh DIR
#
# TAGS=verbs builds it with the provider for RDMA adapters; it then needs libibverbs and librdmacm.
set -eu
[ $# -ge 1 ] || { echo "usage: build.sh DIR" >&2; exit 2; }
mkdir -p "$1"
dir=$(cd "$1" && pwd)
cd "$(dirname "$0")"
if ! command -v "${CC:-gcc}" >/dev/null 2>&1; then
	echo "librpmem needs a C compiler: apt-get install gcc libc6-dev" >&2
	exit 1
fi
# The compiler and the linker end before they fill the memory: they collect garbage less often.
GOGC=${GOGC:-400} CGO_ENABLED=1 "${GO:-go}" build -trimpath -buildmode=c-shared -tags "netgo,osusergo${TAGS:+,$TAGS}" \
	-ldflags "-s -w -extldflags '-Wl,-soname,librpmem.so.1 -Wl,--version-script=$PWD/librpmem.map'" \
	-o "$dir/librpmem.so.1" .
rm -f "$dir/librpmem.so.h" "$dir/librpmem.h" # of cgo
