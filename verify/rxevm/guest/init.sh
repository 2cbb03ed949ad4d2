#!/bin/busybox sh
# First process of the guest: loads modules, puts the host's root read-only
# under a tmpfs, and hands over to main.sh in it.
bb=/bin/busybox
die() { echo "rxevm: init: $*"; $bb sleep 0.2; $bb poweroff -f; }

$bb mount -t proc proc /proc
$bb mount -t sysfs sys /sys
$bb mount -t devtmpfs dev /dev
while read -r m; do
	$bb insmod "/mod/$m" || echo "rxevm: init: cannot load $m"
done </mod/order
case "$($bb cat /proc/cmdline)" in *rxevm.pmem*)
	while read -r m; do
		$bb insmod "/mod/$m" || echo "rxevm: init: cannot load $m"
	done </mod/pmem
	;;
esac

$bb mkdir -p /host /rw /new
p9="trans=virtio,version=9p2000.L,msize=262144"
$bb mount -t 9p -o "$p9,ro,cache=loose" root /host || die "cannot mount the host's root"
$bb mount -t tmpfs -o mode=755 rw /rw || die "cannot mount a tmpfs"
$bb mkdir /rw/upper /rw/work
$bb mount -t overlay -o lowerdir=/host,upperdir=/rw/upper,workdir=/rw/work overlay /new ||
	die "cannot mount the overlay"

for d in proc sys dev; do
	$bb mkdir -p /new/$d
	$bb mount -o move /$d /new/$d
done
$bb mkdir -p /new/run /new/dev/pts /new/dev/shm
$bb mount -t devpts devpts /new/dev/pts
$bb mount -t tmpfs -o mode=1777 shm /new/dev/shm
$bb mount -t tmpfs -o mode=755 run /new/run
$bb mkdir /new/run/rxevm /new/run/rxevm/job
$bb mount -t 9p -o "$p9,ro,cache=none" job /new/run/rxevm/job || die "cannot mount the job"
$bb cp /main.sh /new/run/rxevm/main.sh
exec $bb switch_root /new /bin/sh /run/rxevm/main.sh
die "cannot switch to the host's root"
