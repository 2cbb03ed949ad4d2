package worker

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/procs"
)

// The test program is the slots of a worker in these tests, and the worker itself where it is to end. deedEnv says what a slot does in its first life, or
// that the process is the worker.
const (
	deedEnv = "QUARRY_TEST_DEED"
	asOwner = "worker " // and what its slots do
)

func TestMain(m *testing.M) {
	deed := os.Getenv(deedEnv)
	switch {
	case os.Getenv(slotEnv) != "":
		os.Exit(beSlot(deed))
	case len(deed) > len(asOwner) && deed[:len(asOwner)] == asOwner:
		os.Setenv(deedEnv, deed[len(asOwner):])
		err := Slots{Name: "w", Count: 1, Memory: 16 << 20, Err: os.Stderr, Logger: slog.New(slog.DiscardHandler)}.Run(context.Background(), func([]string) error { return nil })
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// beSlot says that it has begun, and what it knows of those before it, and does its deed if it is the last slot; later lives wait for the end.
func beSlot(deed string) int {
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM)
	s, err := ThisSlot()
	if err == nil {
		before, _ := json.Marshal(s.Before)
		fmt.Fprintf(os.Stderr, "slot %d begun %d life %d before %s\n", s.Number, os.Getpid(), s.Life, before)
		err = s.Ready("")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		return 1
	}
	switch life := len(s.Before); {
	case deed == "greedy" && s.Number == 2 && life == 0:
		b, err := syscall.Mmap(-1, 0, 2<<30, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
		for i := 0; err == nil && i < len(b); i += 4096 {
			b[i] = 1
		}
		return 1
	case deed == "exits" && life < 2:
		return 7 + life
	case deed == "starts" && life == 0: // programs that hold its standard error
		for _, apart := range []bool{false, true} {
			cmd := exec.Command("sleep", "100000")
			cmd.Stderr, cmd.SysProcAttr = os.Stderr, &syscall.SysProcAttr{Setsid: apart}
			if err := cmd.Start(); err != nil {
				return 1
			}
			fmt.Fprintf(os.Stderr, "started %d\n", cmd.Process.Pid)
		}
		return 7
	}
	<-end
	return 0
}

// owner is a worker whose slots are this program; it is in this process, or in one of its own.
type owner struct {
	slotRig
	end context.CancelFunc
	run chan error
}

func newOwner(t *testing.T, deed string, count int) *owner {
	t.Setenv(deedEnv, deed)
	r, w := io.Pipe()
	ctx, cancel := context.WithCancel(context.Background())
	o := &owner{slotRig{T: t, lines: make(chan string, 1000)}, cancel, make(chan error, 1)}
	go func() {
		for s := bufio.NewScanner(r); s.Scan(); {
			t.Log(s.Text())
			o.lines <- s.Text()
		}
		close(o.lines)
	}()
	go func() {
		o.run <- Slots{Name: "w", Count: count, Memory: 16 << 20, Drain: time.Hour, Err: w, Logger: slog.New(slog.NewTextHandler(w, nil))}.Run(ctx, func([]string) error { return nil })
		w.Close()
	}()
	t.Cleanup(func() {
		cancel()
		for range o.lines { // the log ends with the slots
		}
	})
	return o
}

// Each process of a slot knows how those before it have ended, by their lives: two may end before the session of the first is fenced, and then the part of
// the first has not failed for the reason of the second. coproc/job's TestHazard290_PredecessorsPartsHaveFailed records them.
func TestHazard293_ReasonsAreOfTheirOwnProcess(t *testing.T) {
	o := newOwner(t, "exits", 1)
	first := o.says(`begun \d+ life (\d+) before null`)[1]
	second := o.says(`begun \d+ life (\d+)`)[1]
	third := o.says(`begun \d+ life (\d+) before (.*)`)
	var before map[string]string
	require.NoError(t, json.Unmarshal([]byte(third[2]), &before))
	require.Equal(t, map[string]string{first: "the slot's process has ended: exit status 7", second: "the slot's process has ended: exit status 8"}, before)
	o.end()
	require.NoError(t, <-o.run)
}

// A slot is started again, and the reason is known, while programs that its process has started hold its standard error. Those of its group end with it.
func TestHazard294_WhatASlotStartsDoesNotHoldIt(t *testing.T) {
	o := newOwner(t, "starts", 1)
	with, apart := o.says(`started (\d+)`)[1], o.says(`started (\d+)`)[1]
	pid, err := strconv.Atoi(apart)
	require.NoError(t, err)
	defer func() { _ = syscall.Kill(pid, syscall.SIGKILL) }()
	o.says(`begun .* before .*exit status 7`)
	o.gone(with)
}

// A slot ends with its worker also where the kernel has forgotten the signal that the worker has asked for, or the worker has ended before it was asked.
func TestHazard295_SlotsEndWithTheirWorker(t *testing.T) {
	slot := func(parent int) *exec.Cmd {
		text, err := json.Marshal(Slot{Number: 1, Name: "w/1", Life: 1, Parent: parent})
		require.NoError(t, err)
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), slotEnv+"="+string(text))
		null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
		require.NoError(t, err)
		t.Cleanup(func() { null.Close() })
		cmd.ExtraFiles = []*os.File{null, null}
		return cmd
	}
	said, err := slot(os.Getpid() + 1).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(said), fmt.Sprintf("its worker, process %d, has ended", os.Getpid()+1))

	// The thread that has made a process is its parent to the kernel.
	cmd := slot(os.Getpid())
	errs, err := cmd.StderrPipe()
	require.NoError(t, err)
	begun, end := make(chan error), make(chan bool)
	procs.OnOtherThread(func() {
		begun <- cmd.Start()
		<-end
	})
	require.NoError(t, <-begun)
	lines := bufio.NewScanner(errs)
	require.True(t, lines.Scan())
	require.Contains(t, lines.Text(), "slot 1 begun")
	close(end)
	for lines.Scan() { // until it has ended
	}
	require.ErrorContains(t, cmd.Wait(), "signal: killed")
}

// A slot is started again from the file that its worker runs, although another one has its name by now, or none.
func TestSlotsOfAReplacedProgram(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	program := filepath.Join(t.TempDir(), "program")
	if err := os.Link(self, program); err != nil {
		t.Skipf("no second name of %s can be made: %v", self, err)
	}
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), deedEnv+"="+asOwner+"waits")
	errs, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	defer func() {
		_ = cmd.Process.Kill()
		_, _ = io.Copy(io.Discard, errs) // its slot ends too
		_ = cmd.Wait()
	}()
	lines := bufio.NewScanner(errs)
	require.True(t, lines.Scan())
	var n, pid int
	_, err = fmt.Sscanf(lines.Text(), "slot %d begun %d", &n, &pid)
	require.NoError(t, err, lines.Text())
	require.NoError(t, os.Remove(program))
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	require.True(t, lines.Scan())
	require.Regexp(t, `slot 1 begun .*SIGKILL`, lines.Text())
}
