package sim

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// An operator creates regions and gives nodes up, while nodes go away, some of them for good.
func TestOperator(t *testing.T) {
	t.Parallel()
	rep := mustPass(t, Options{Seed: 1, Schedules: schedules(t, 600), AnyScheduler: true, Faults: AllFaults &^ Power, Operator: true, Porcupine: 8})
	require.NotZero(t, rep.Coverage.Epochs)
}
