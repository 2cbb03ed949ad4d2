# Runs a test binary and prints behind its output the processor time, user and system, of this shell
# and then of the test binary and the processes it has waited for. go test runs it with -exec, which
# keeps results in the cache. A pipe behind times would begin a shell whose own times are 0.
#
# go test ends a test that hangs by SIGQUIT to this shell: the test binary gets it, and prints its
# goroutines. It runs in the background, since a shell takes a signal at once only while it waits for
# such a command. The shell has those ignore SIGINT, and gives them its input only by another number.
trap 'again=1; kill -QUIT $pid' QUIT
trap 'again=1; kill -TERM $pid' TERM INT HUP
exec 3<&0
"$@" <&3 3<&- &
pid=$!
# A signal ends wait, with a code of its own. It may also come when wait has just told the end of the
# test binary: another wait says 127 then.
code=127
again=1
while [ "$again" ]; do
	again=
	wait $pid
	told=$?
	[ $told = 127 ] || code=$told
done
times
exit $code
