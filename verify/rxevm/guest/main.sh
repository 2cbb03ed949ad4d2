#!/bin/sh
# Runs as process 1 on the host's files: sets up the link and the RDMA device,
# tells the host, runs the command, reports its exit code.
# The job (job/config, job/command) is written by the host for this boot.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
ln -sf /proc/self/fd /dev/fd
ln -sf /proc/self/fd/0 /dev/stdin
ln -sf /proc/self/fd/1 /dev/stdout
ln -sf /proc/self/fd/2 /dev/stderr

port() {
	for p in /sys/class/virtio-ports/*; do
		[ "$(cat "$p/name")" = "$1" ] && echo "/dev/${p##*/}" && return
	done
	echo "rxevm: no virtio port $1"
	off
}
off() {
	echo o >/proc/sysrq-trigger
	while :; do sleep 60; done
}
say() { echo "$*" >&9; }
fail() {
	say "fail $*"
	sleep 2
	off
}

# Regions are pinned whole: in pages of 2 MiB that is two faults and not a thousand.
for what in enabled shmem_enabled; do
	echo always >/sys/kernel/mm/transparent_hugepage/$what
done 2>/dev/null

exec 9<>"$(port ctl)"
. /run/rxevm/job/config

ip link set lo up
if [ "$link" = veth ]; then
	ip link add v0 type veth peer name v1
	netdev=v0
	ip link set v1 up
else
	netdev=eth0
fi
# IPv4 first, then up: so its GID comes before the link-local one.
ip addr add "$self/24" dev $netdev || fail "no network device $netdev"
ip link set $netdev up
ip addr add "$self6/64" dev $netdev nodad
err=$(rdma link add rxe0 type rxe netdev $netdev 2>&1) || fail "rdma link add: $err"

# The GID table fills from a work queue.
want=$(printf '0000:0000:0000:0000:0000:ffff:%02x%02x:%02x%02x' $(echo "$self" | tr . ' '))
i=0
while :; do
	RXE_GID_INDEX=$(cd /sys/class/infiniband/rxe0/ports/1/gids && grep -lx "$want" 0 1 2 3 4 5 6 7 2>/dev/null | head -n 1)
	case "$(cat /sys/class/infiniband/rxe0/ports/1/state)" in *ACTIVE*) [ -n "$RXE_GID_INDEX" ] && break ;; esac
	i=$((i + 1))
	[ $i -gt 200 ] && fail "rxe0 has no active port with the GID of $self"
	sleep 0.05
done

if [ -n "$out" ]; then
	mkdir -p "$out"
	mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,rw,cache=mmap out "$out" ||
		fail "cannot mount the results directory"
fi

# The first NVDIMM is a DAX file system, the second a device. Without a namespace of a mode they
# are raw, and have no DAX.
if [ -n "$pmem" ]; then
	if [ -z "$formatted" ]; then
		err=$(ndctl create-namespace -f -e namespace0.0 --mode=fsdax --map=mem --align=4k 2>&1) || fail "fsdax: $err"
		err=$(ndctl create-namespace -f -e namespace1.0 --mode=devdax --align=4k 2>&1) || fail "devdax: $err"
		err=$(mkfs.ext4 -q -b 4096 /dev/pmem0 2>&1) || fail "mkfs.ext4: $err"
	fi
	mkdir -p "$pmem"
	err=$(mount -o dax=always /dev/pmem0 "$pmem" 2>&1) || fail "mount: $err"
fi

# Both machines write the same description of the namespace. Its page structures are in each machine's own memory.
if [ -n "$shared" ]; then
	err=$(ndctl create-namespace -f -e namespace0.0 --mode=devdax --map=mem --align=4k 2>&1) || fail "shared devdax: $err"
fi

# Pipes, not the ports themselves: a port can be opened only once, so a command
# that writes to /dev/stderr would be refused.
mkfifo /run/rxevm/stdout /run/rxevm/stderr
cat /run/rxevm/stdout >"$(port out)" &
cat1=$!
cat /run/rxevm/stderr >"$(port err)" &
cat2=$!

say "ready $(uname -r)"
read -r go <&9

export RXE_GID_INDEX
sh /run/rxevm/job/command >/run/rxevm/stdout 2>/run/rxevm/stderr </dev/null 9>&-
code=$?

# A background process of the command may hold the pipes: drain what is there,
# then end everything.
i=0
while kill -0 $cat1 2>/dev/null || kill -0 $cat2 2>/dev/null; do
	i=$((i + 1))
	[ $i -gt 20 ] && break
	sleep 0.1
done
kill -KILL -1
sync
[ -n "$out" ] && umount "$out"
say "exit $code"
sleep 5
off
