#!/bin/sh
# Runs each fuzz target of the repository, one after the other, for FUZZTIME (default 10s; 1000x
# is a number of inputs) with FUZZWORKERS (default 2) processes, and keeps the inputs that reach new
# code below FUZZ_CORPUS (default bin/fuzz), where the next run begins with them. The targets are
# those that the sources have: none can be left out. An input that fails is written into the
# package's testdata/fuzz: commit it with the mend, go test runs it from then on.
set -eu
cd "$(dirname "$0")/../.."
corpus=${FUZZ_CORPUS:-$PWD/bin/fuzz}

# ran says whether the log is of a target that ran and found nothing. A target whose time is up while
# it starts a process ends with that as its error.
ran() {
  grep -q '^fuzz: elapsed' "$corpus/log" || return 1
  [ "$1" = 0 ] || { grep -q 'context deadline exceeded' "$corpus/log" && ! grep -q 'Failing input' "$corpus/log"; }
}

# Coverage guides the inputs through our packages. go test -fuzz would also compile the standard library
# and every dependency once more, to count what they cover.
counted="$(${GO:-go} list -m)/...=-d=libfuzzer"
packages=$(grep -rl --include='*_test.go' '^func Fuzz' . | xargs -n1 dirname | sort -u)
# One go command reads the module once. It names each program by the last element of the package's path, and fails where two share it.
rm -rf "$corpus/programs"
mkdir -p "$corpus/programs"
# shellcheck disable=SC2086
GOGC=${GOGC:-400} ${GO:-go} test -c -gcflags="$counted" -vet=off -ldflags=-w -o "$corpus/programs/" $packages
for pkg in $packages; do
  mkdir -p "$corpus/$pkg"
  program=$corpus/programs/$(basename "$pkg").test
  for target in $(grep -h --include='*_test.go' -o '^func Fuzz[A-Za-z0-9_]*' "$pkg"/*_test.go | cut -c6-); do
    code=0
    (cd "$pkg" && exec "$program" -test.run='^$' -test.fuzz="^$target\$" -test.fuzztime="${FUZZTIME:-10s}" -test.parallel="${FUZZWORKERS:-2}" \
      -test.fuzzminimizetime=100x \
      -test.fuzzcachedir="$corpus/$pkg" </dev/null >"$corpus/log" 2>&1) || code=$?
    ran $code || { echo "$pkg $target fails"; cat "$corpus/log"; exit 1; }
    echo "$pkg $target: $(grep '^fuzz: elapsed' "$corpus/log" | tail -1 | cut -d' ' -f4-)"
  done
  rm -f "$program"
done
