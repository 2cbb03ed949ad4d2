#!/bin/sh
# Runs each fuzz target of the repository for FUZZTIME (default 10s), and keeps the inputs that
# reach new code below FUZZ_CORPUS (default bin/fuzz), where the next run begins with them. An
# input that fails is written into the package's testdata/fuzz: commit it with the mend, go test runs
# it from then on.
set -eu
cd "$(dirname "$0")/../.."
corpus=${FUZZ_CORPUS:-$PWD/bin/fuzz}
grep -rl --include='*_test.go' '^func Fuzz' . | xargs -n1 dirname | sort -u | while read -r pkg; do
  mkdir -p "$corpus/$pkg"
  program=$corpus/$pkg/fuzz.test
  ${GO:-go} test -c -fuzz=. -vet=off -o "$program" "$pkg"
  for target in $(grep -h --include='*_test.go' -o '^func Fuzz[A-Za-z0-9_]*' "$pkg"/*_test.go | cut -c6-); do
    echo "$pkg $target"
    (cd "$pkg" && "$program" -test.run='^$' -test.fuzz="^$target\$" -test.fuzztime="${FUZZTIME:-10s}" -test.fuzzcachedir="$corpus/$pkg" </dev/null >"$corpus/log" 2>&1) || { cat "$corpus/log"; exit 1; }
  done
  rm -f "$program"
done
