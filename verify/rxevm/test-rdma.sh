#!/bin/sh
# Tests on real RDMA: on this host's device if it has one that is active, otherwise
# in a virtual machine with Soft-RoCE. As root, what is missing is installed, or this fails and
# says why; QUARRY_NO_INSTALL=1, or another user, skips in one line what the machine does not
# have (and succeeds).
#
#   test-rdma.sh            everything: fabric, slab protocol, litmus, a whole cluster, ratios
#   test-rdma.sh contract   the fabric's own tests alone
#   test-rdma.sh ratios     latencies beside perftest's alone
#   test-rdma.sh slots      slots of a worker with cgroups of version 2 alone: no RDMA, but the same machine
#   test-rdma.sh suited     the contract, and everything else, with few samples, where that was quick enough
#   test-rdma.sh cluster    a whole cluster alone; -test.run and the like go to its test binary
#   test-rdma.sh pmem       persistent memory alone: a DAX file system and a device, on emulated NVDIMMs
#   test-rdma.sh two        between two virtual machines joined by a wire
#   test-rdma.sh iwarp      the fabric's contract over Soft-iWARP, which siw.sh builds first (165 MB of packages)
#   RDMA_CORE=DIR test-rdma.sh contract   (or pmem) with the libraries of another rdma-core (45 has native FLUSH)
#                           and the C library beside them: Debian packages unpacked into DIR
#   test-rdma.sh -test.run Fence   arguments for the fabric's test binary
set -eu
cd "$(dirname "$0")/../.."
what=all
case "${1:-}" in
contract | ratios | suited | cluster | pmem | two | iwarp | slots) what=$1; shift ;;
-*) what=fabric ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The compiler and the linker collect garbage less often, as in verify/testrun.
GOGC=${GOGC:-400} go build -tags netgo,osusergo -o "$work/rxevm" ./verify/rxevm/cmd/rxevm
# Packages, headers among them: installed when run as root, after other installers have ended.
code=0
"$work/rxevm" --prepare || code=$?
if [ $code = 77 ]; then exit 0; fi
[ $code = 0 ] || exit $code
if ! command -v "${CC:-gcc}" >/dev/null || ! printf '#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n' | "${CC:-gcc}" -E - >/dev/null 2>&1; then
	why="the verbs provider cannot be built here: apt-get install gcc libc6-dev libibverbs-dev librdmacm-dev"
	if [ "$(id -u)" = 0 ] && [ -z "${QUARRY_NO_INSTALL:-}" ] && command -v apt-get >/dev/null; then
		echo "test-rdma: failed, $why"
		exit 1
	fi
	echo "test-rdma: skipped, $why"
	exit 0
fi
# netgo and osusergo choose the files of net and os/user that CGO_ENABLED=0 chooses: verify/testrun
# has compiled them and all that depends on them.
tags=netgo,osusergo,verbs
build() {
	if ! GOGC=${GOGC:-400} CGO_ENABLED=1 go "$@"; then
		echo "test-rdma: the verbs provider does not build"
		exit 1
	fi
}
# -vet=off, below, for packages without files of these tags: make test has run every analyzer on them.
build test -c -ldflags=-w -tags $tags,yardstick -o "$work/verbs.test" ./rdma/verbs
case $what in all | suited | cluster | ratios | iwarp) build test -c -ldflags=-w -tags $tags -o "$work/beside.test" ./verify/rxevm/beside ;; esac
if [ $what = all ] || [ $what = suited ]; then
	build test -c -vet=off -ldflags=-w -tags $tags -o "$work/alloc.test" ./alloc
	build test -c -vet=off -ldflags=-w -tags $tags -o "$work/slab.test" ./slab
fi
case $what in all | suited | slots) GOGC=${GOGC:-400} CGO_ENABLED=0 go test -c -vet=off -ldflags=-w -tags netgo,osusergo -o "$work/worker.test" ./coproc/worker ;; esac
case $what in all | suited | pmem)
	build test -c -vet=off -ldflags=-w -o "$work/pmem.test" ./rdma/host/pmem
	build test -c -vet=off -ldflags=-w -o "$work/host.test" ./rdma/host
	build test -c -vet=off -ldflags=-w -o "$work/shm.test" ./rdma/shm
	build test -c -vet=off -ldflags=-w -o "$work/storagenode.test" ./storagenode
	pmem="--pmem-mib 256"
	;;
esac
case $what in all | suited | cluster | iwarp) build build -ldflags=-w -tags $tags -o "$work/quarry" ./cmd/quarry ;; esac
# The time limits are guards: an emulated processor on a starved host takes what it takes.
cat >"$work/inside" <<'EOF'
set -u
work=$1 what=$2
shift 2
failed=0
# The fabric's tests against the libraries of another rdma-core, with the C library they need.
tests=$work/verbs.test
if [ -n "${RDMA_CORE:-}" ]; then
	printf '#!/bin/sh\nexec %s --library-path %s --argv0 %s %s "$@"\n' "$(ls "$RDMA_CORE"/usr/lib*/ld-linux-x86-64.so.2)" \
		"$RDMA_CORE/usr/lib/x86_64-linux-gnu:$RDMA_CORE/usr/lib/x86_64-linux-gnu/libibverbs" "$work/verbs.test" "$work/verbs.test" >/tmp/verbs.test
	chmod +x /tmp/verbs.test
	tests=/tmp/verbs.test
	RXE_NATIVE_FLUSH=1
	RDMAV_DRIVERS=$RDMA_CORE/usr/lib/x86_64-linux-gnu/libibverbs/librxe
	export RXE_NATIVE_FLUSH RDMAV_DRIVERS
fi
# What a part printed without what passed. A skipped test is printed with its reason, for the end of
# make test repeats it; functions that other tests run in processes of their own are no tests.
summary() {
	awk -v part="$name" '
	/^=== / { test = $3; next }
	/^ *--- PASS|^PASS/ { next }
	/^ *--- SKIP/ {
		reason = last[$3] ? line[last[$3]] : "no reason given"
		sub(/^ *([^: ]*\.go:[0-9]+: )?/, "", reason)
		delete line[last[$3]]
		if (reason !~ /started by other tests/) line[++n] = "--- SKIP: " $3 " (" part "): " reason
		next
	}
	{ line[++n] = $0; last[test] = n }
	END { for (i = 1; i <= n; i++) if (i in line) print line[i] }' /tmp/part
}
part() {
	name=$1 dir=$2
	shift 2
	start=$(cut -d. -f1 /proc/uptime)
	if (cd "$dir" && exec "$@" -test.v) >/tmp/part 2>&1; then
		summary
		echo "test-rdma: $name: ok, $(($(cut -d. -f1 /proc/uptime) - start)) s"
	else
		cat /tmp/part
		echo "test-rdma: $name: FAILED"
		failed=1
	fi
}
ratios() {
	part "ratios to perftest" rdma/verbs "$work/verbs.test" -test.run Ratio -test.timeout 20m
	part "ratio of an update to its rounds" verify/rxevm/beside "$work/beside.test" -test.run Ratio -test.timeout 10m
}
# A process of its own: one that has used the device holds it. The machine's own may be
# taken away and given back; a host's may not.
removal() {
	[ -d /run/rxevm/job ] || return 0
	part "a device that is removed" rdma/verbs env RXE_REMOVABLE="$RXE_DEVICE" "$work/verbs.test" -test.run '^TestDeviceRemoved$' -test.timeout 10m
}
# Whatever executes the atomics, the rest of the contract is that of the adapter: what depends on it, and little of that is slow.
agents() {
	part "atomics by the node" rdma/verbs "$tests" -test.timeout 10m \
		-test.run '^TestContractWithAgentAtomics$/^(Verbs|OrderInChain|ManyChainsOnOneConn|TestSecurity03_GuessedKeys|TestSecurity08_RevokedWhileWriting|TestHazard37_ResetEndsOldVerbs|Rotation|RefusalStopsChain)$'
}
# Soft-iWARP in place of Soft-RoCE. siw answers short READs across pages wrongly, see docs/RDMA.md, and no chain is refused for certain.
iwarp() {
	xz -dc "$1"/kernel/lib/libcrc32c.ko.xz >/tmp/libcrc32c.ko && insmod /tmp/libcrc32c.ko && insmod "$2" &&
		rdma link delete rxe0 && rdma link add siw0 type siw netdev v0 || { echo "test-rdma: siw cannot be loaded"; exit 1; }
	RXE_DEVICE=siw0
	export RXE_DEVICE
	part "Soft-iWARP" rdma/verbs "$tests" -test.timeout 15m -test.run '^TestContractOverIWARP$|^TestLongVerbsBesideMessages$|^TestHazard1(60|73)|^TestHeldChains|^TestQueuePairsRunOut$'
	cluster -test.run '^TestClusterWithAgentAtomics$'
}
# What follows uses so many of the machine's processors, by a mask in hexadecimal digits: the tests and Soft-RoCE's work queues. A
# host's own device, and a machine without taskset, keep all.
processors() {
	[ -d /run/rxevm/job ] && [ $what = suited ] && command -v taskset >/dev/null || return 0
	taskset -p "$1" $$ >/dev/null && echo "$1" >/sys/devices/virtual/workqueue/cpumask
}
fabric() {
	part "the fabric" rdma/verbs "$tests" -test.timeout 12m -test.skip "$1"
	removal
}
above() {
	# The programs take turns at verbs, so what they do beside each other does not need two processors, which would wait for
	# each other in loops.
	processors 1
	# Tests of many cases that are alike, such as deaths behind each verb, try few of them here and all of them
	# over tcp: slabtest.Stride says why.
	# Those that lose answers break thousands of connections, each of which costs a queue pair here.
	part "the slab protocol" slab "$work/slab.test" -test.short -test.skip "LostAnswers|LoseAnswers$1" -test.timeout 15m
	# Tests of scrubs make dozens of regions at a time, one set for each order of two programs: more
	# pinned memory than the machine has.
	part "the allocator" alloc "$work/alloc.test" -test.short -test.skip 'ScrubAnd|ScrubsOf|ScrubThat' -test.timeout 15m
	processors 3
	echo "quarry litmus:"
	"$work/quarry" litmus --each 700ms || { echo "test-rdma: litmus: FAILED"; failed=1; }
	flushes
	cluster
}
# Slots of a worker with cgroups of version 2, which few hosts delegate: as another user, whose cgroup it is, as systemd has it. The cgroups
# of a host are left alone.
slots() {
	[ -d /run/rxevm/job ] || { echo "test-rdma: slots with cgroups: skipped, this host's device is used and its cgroups are left alone"; return; }
	cgroups=/sys/fs/cgroup own=/sys/fs/cgroup/worker
	mount -t cgroup2 none $cgroups && echo "+memory +pids +cpu" >$cgroups/cgroup.subtree_control && mkdir $own && chmod 755 "$work" &&
		chown nobody $own $own/cgroup.procs $own/cgroup.threads $own/cgroup.subtree_control || { echo "test-rdma: slots with cgroups: FAILED"; failed=1; return; }
	QUARRY_TEST_DELEGATED=1
	export QUARRY_TEST_DELEGATED
	part "slots in the root cgroup" /tmp "$work/worker.test" -test.run 'RootCgroup'
	part "slots with cgroups" /tmp sh -c 'echo $$ >'$own'/cgroup.procs && exec setpriv --reuid nobody --regid nogroup --clear-groups "$@"' sh \
		"$work/worker.test" -test.run '^TestCgroupsOfSlots$|^TestHazard290_TheKernelEndsAGreedySlotAlone$' -test.timeout 5m
	umount $cgroups
}
# What each flush method costs here, or why it cannot run.
flushes() {
	echo "quarry bench --flush:"
	"$work/quarry" bench --flush -D 500ms --flush-on "${PMEM_DEVDAX:-/tmp}" || { echo "test-rdma: bench --flush: FAILED"; failed=1; }
}
# Facts of the memory first: what follows rests on them.
pmem() {
	[ -n "${PMEM_DEVDAX:-}" ] || { echo "test-rdma: persistent memory: skipped, this host's device is used and no NVDIMM is emulated"; return; }
	part "persistent memory" rdma/host/pmem "$work/pmem.test" -test.run 'OnNVDIMM' -test.timeout 10m
	part "two NUMA nodes" rdma/host "$work/host.test" -test.run 'BoundToNUMA' -test.timeout 10m
	part "persistent memory behind an adapter" rdma/verbs "$tests" -test.run 'NVDIMM' -test.timeout 10m
	part "a node on device DAX" storagenode "$work/storagenode.test" -test.run 'OnNVDIMM' -test.timeout 10m
	part "shm on a DAX file system" rdma/shm env TMPDIR="$PMEM_FSDAX" "$work/shm.test" -test.short -test.run "$1" -test.timeout 20m
}
cluster() {
	# Regions are copied in long READs: packets of 4 KiB, not of 1.
	[ -e /sys/class/net/v0 ] && ip link set v0 mtu 4200 && ip link set v1 mtu 4200
	QUARRY_BINARY=$work/quarry
	export QUARRY_BINARY
	part "a whole cluster" verify/rxevm/beside "$work/beside.test" -test.skip Ratio -test.timeout 30m "$@"
}
# The contract takes a minute where processors are emulated, and some times that beside other tests;
# where it takes much longer the processors are starved, and the rest would take for ever.
quickEnough=400
case $what in
ratios) ratios ;;
fabric) cd rdma/verbs && exec "$tests" -test.v -test.timeout 280s "$@" ;;
pmem) pmem 'ContractFile' ;;
iwarp) iwarp "$@" ;;
slots) slots ;;
contract) fabric 'Ratio|ContractWithWindows' ;;
cluster)
	flushes
	cluster "$@"
	;;
suited)
	slots
	began=$(cut -d. -f1 /proc/uptime)
	pmem 'ContractFile/Verbs'
	fabric 'Ratio|ContractWithWindows|ContractWithAgentAtomics'
	agents
	took=$(($(cut -d. -f1 /proc/uptime) - began))
	if [ $took -le $quickEnough ]; then
		# Not what is about words and images that dead sessions and damage leave in memory: tests of the same
		# programs over tcp are in make test, and here takeovers, scrubs, reconciles and copies run in other tests.
		above '|Joiner|DeadWriters|Damaged|InvalidV|TakerKeeps|WriterDiesWithAStagingSlab|MarkerDies|LostObjectIsMarked|NotLostIsNotMarked'
		# Enough to see that the yardstick works: the figures of a busy host are noise.
		RATIO_SAMPLES=10
		export RATIO_SAMPLES
		ratios
	else
		echo "test-rdma: the rest is left to make test-rdma: the contract alone took $took s here, and $quickEnough are quick enough"
	fi
	;;
all)
	slots
	pmem 'ContractFile'
	ratios
	fabric Ratio
	above ''
	;;
esac
exit $failed
EOF
if [ $what = iwarp ]; then
	kernel=$(ls -d "${XDG_CACHE_HOME:-$HOME/.cache}"/quarry-rxe/*/lib/modules/*/ 2>/dev/null | sort -V | tail -n 1)
	[ -n "$kernel" ] || { echo "test-rdma: iwarp skipped, there is no kernel in the cache"; exit 0; }
	version=$(basename "$kernel")
	ko=$(sh verify/rxevm/siw.sh "$version") || code=$?
	if [ $code = 77 ]; then exit 0; fi
	[ $code = 0 ] || exit $code
	"$work/rxevm" --kernel "$version" --cpus 3 --memory-mib 3072 --timeout 30m -v -- sh "$work/inside" "$work" iwarp "${kernel%/}" "$ko" || code=$?
	if [ $code = 77 ]; then exit 0; fi
	exit $code
fi
if [ $what = two ]; then
	"$work/rxevm" --two --timeout 5m -v -- "$work/verbs.test" -test.run '^TestTwoMachines$' -test.v -test.timeout 200s || code=$?
	if [ $code = 77 ]; then exit 0; fi
	exit $code
fi
# Emulated processors that share a core of the host wait for each other in loops: make test has two. A third
# gives lower latencies beside perftest's.
cpus=3
[ $what = suited ] && cpus=2
"$work/rxevm" --native-ok --cpus $cpus --memory-mib 3072 ${pmem:-} --timeout 90m -v -- sh "$work/inside" "$work" $what "$@" || code=$?
if [ $code = 77 ]; then exit 0; fi
exit $code
