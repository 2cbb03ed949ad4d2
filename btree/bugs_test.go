//go:build simbug

package btree

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"
)

var bugNames = map[bugID]string{bugParentFirst: "parent first", bugLeftFirst: "left first", bugAbsorbUnchecked: "absorb unchecked", bugNoFreeze: "no freeze",
	bugFrozenRead: "frozen read", bugThawUnchecked: "thaw unchecked", bugFencesUnchecked: "fences unchecked", bugSplitUnchecked: "split unchecked", bugScanFollowsLinks: "scan follows links",
	bugLayerUnmarked: "layer unmarked", bugDeadWritten: "dead written", bugVersionsAgain: "versions again"}

// failed collects a test's failure in place of reporting it.
type failed struct {
	testing.TB
	msg string
}

func (f *failed) Helper()                   {}
func (f *failed) Errorf(s string, a ...any) { f.msg = fmt.Sprintf(s, a...) }
func (f *failed) Fatalf(s string, a ...any) { f.Errorf(s, a...); f.FailNow() }
func (f *failed) FailNow() {
	runtime.Goexit()
}

// TestEveryDeliberateBugIsFound is the mutation gate of the tree.
func TestEveryDeliberateBugIsFound(t *testing.T) {
	defer func() { bugOn = 0 }()
	for b := bugID(1); b < bugCount; b++ {
		t.Run(bugNames[b], func(t *testing.T) {
			const budget = 1000
			for seed := range budget {
				f := &failed{TB: t}
				done := make(chan string)
				go func() {
					msg := "ended early"
					defer func() {
						if msg == "ended early" && f.msg == "" {
							buf := make([]byte, 2000)
							t.Logf("%s", buf[:runtime.Stack(buf, false)])
						}
						if r := recover(); r != nil {
							msg = fmt.Sprint(r)
						}
						if f.msg != "" {
							msg = f.msg
						}
						done <- msg
					}()
					sc := scenario{seed: uint64(seed), clients: 2 + seed%4, ops: 60, keys: 60, nodeSize: 1 << 10, layers: b >= bugLayerUnmarked}
					if seed%2 == 1 {
						sc.killOne, sc.clients = 600, 5
					}
					bugOn = b
					if b == bugFrozenRead && seed == 0 {
						// Rare by chance: between the commit of L and the freeing of R.
						mergeMatrix(f)
					}
					if b == bugVersionsAgain {
						versionsRise(f)
					}
					o := play(f, sc)
					require.Equal(f, porcupine.Ok, porcupine.CheckOperationsTimeout(register, o.history, 20*time.Second))
					o.settleAll(f, sc)
					msg = ""
				}()
				if msg := <-done; msg != "" {
					t.Logf("found by seed %d: %.120s", seed, msg)
					return
				}
			}
			t.Fatalf("not found in %d runs", budget)
		})
	}
}
