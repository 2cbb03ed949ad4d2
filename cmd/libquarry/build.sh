#!/bin/sh
# Builds the C library into a folder: libquarry.so.1, libquarry.so, quarry.h, quarry.pc, quarry.3.
#
#   sh cmd/libquarry/build.sh DIR [VERSION]
#
# TAGS=verbs builds it with the provider for RDMA adapters; it then needs libibverbs and librdmacm.
# PREFIX is the folder that quarry.pc names, where it will be used: default DIR itself.
set -eu
[ $# -ge 1 ] || { echo "usage: build.sh DIR [VERSION]" >&2; exit 2; }
mkdir -p "$1"
dir=$(cd "$1" && pwd)
version=${2:-dev}
cd "$(dirname "$0")"
if ! command -v "${CC:-gcc}" >/dev/null 2>&1; then
	echo "libquarry needs a C compiler: apt-get install gcc libc6-dev" >&2
	exit 1
fi
# The compiler and the linker end before they fill the memory: they collect garbage less often.
GOGC=${GOGC:-400} CGO_ENABLED=1 "${GO:-go}" build -trimpath -buildmode=c-shared -tags "netgo,osusergo${TAGS:+,$TAGS}" \
	-ldflags "-s -w -X main.version=$version -extldflags '-Wl,-soname,libquarry.so.1 -Wl,--version-script=$PWD/quarry.map'" \
	-o "$dir/libquarry.so.1" .
rm -f "$dir/libquarry.so.h" "$dir/libquarry.h" # of cgo: quarry.h says the same, with const
ln -sf libquarry.so.1 "$dir/libquarry.so"
cp quarry.h quarry.3 "$dir/"
sed "s|@PREFIX@|${PREFIX:-$dir}|; s|@VERSION@|$(printf %s "$version" | sed 's/^v//')|" quarry.pc.in >"$dir/quarry.pc"
