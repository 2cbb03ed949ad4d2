#!/bin/sh
# Builds the Soft-iWARP module (siw) for a kernel of rxevm's cache, which Debian's kernels are built without, from the
# kernel's own source package, and prints its path. Nothing is installed: the packages (165 MB) are downloaded by apt-get, unpacked beside
# the kernel and removed; the module stays. Exit code 77 and one line on standard error: this machine cannot do it.
#
#   siw.sh VERSION      such as 6.12.117+deb12-amd64
set -eu
version=$1
cache=${XDG_CACHE_HOME:-$HOME/.cache}/quarry-rxe
ko=$cache/siw-$version.ko
if [ -s "$ko" ]; then echo "$ko"; exit 0; fi
skip() { echo "siw: skipped, $*" >&2; exit 77; }
[ -z "${QUARRY_NO_INSTALL:-}" ] || skip "QUARRY_NO_INSTALL is set, and siw has not been built"
for tool in apt-get apt-cache dpkg-deb make gcc-12 xz; do command -v $tool >/dev/null || skip "$tool is missing"; done
base=${version%-amd64}
[ "$base" != "$version" ] || skip "kernel $version: only those of amd64 can be built"
release=$(apt-cache policy "linux-headers-$version" | awk '/Candidate:/ { print $2 }')
[ -n "$release" ] && [ "$release" != "(none)" ] || skip "there are no headers of kernel $version"
work=$(mktemp -d "$cache/siw.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
series=$(echo "$base" | cut -d. -f1,2)
apt-get -qq download "linux-headers-$version=$release" "linux-headers-$base-common=$release" "linux-kbuild-$base=$release" "linux-source-$series=$release" >&2 ||
	skip "the packages of kernel $version cannot be downloaded"
for deb in linux-headers-* linux-kbuild-*; do dpkg-deb -x "$deb" tree; done
dpkg-deb --fsys-tarfile linux-source-* | tar -xO "./usr/src/linux-source-$series.tar.xz" | xz -dc | tar -x --wildcards "linux-source-$series/drivers/infiniband/sw/siw/*"
headers=$work/tree/usr/src/linux-headers-$version
sed -i "s|/usr/src/|$work/tree/usr/src/|" "$headers/Makefile"
make -s -C "$headers" M="$work/linux-source-$series/drivers/infiniband/sw/siw" CONFIG_RDMA_SIW=m CONFIG_DEBUG_INFO_BTF_MODULES= modules >&2
strip -g "$work/linux-source-$series/drivers/infiniband/sw/siw/siw.ko"
mv "$work/linux-source-$series/drivers/infiniband/sw/siw/siw.ko" "$ko"
echo "$ko"
