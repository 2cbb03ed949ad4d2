# Runs a test binary and prints behind its output the processor time, user and system, of this shell
# and then of the test binary and the processes it has waited for. go test runs it with -exec, which
# keeps results in the cache. A pipe behind times would begin a shell whose own times are 0.
#
# go test ends a test that hangs by SIGQUIT to this shell: the test binary gets it, and prints its
# goroutines. It runs in the background, since a shell takes a signal at once only while it waits for
# such a command. The shell has those ignore SIGINT, and gives them its input only by another number.
trap 'kill -QUIT $pid' QUIT
trap 'kill -TERM $pid' TERM INT HUP
exec 3<&0
"$@" <&3 3<&- &
pid=$!
# A signal ends wait before the test binary has ended.
while
	wait $pid
	code=$?
	kill -0 $pid 2>/dev/null
do :; done
times
exit $code
