package storagenode

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestSpeed: what people are told follows a program that becomes slower, stands still
// between two questions, and is nothing before anything has been done.
func TestSpeed(t *testing.T) {
	const second = int64(time.Second)
	var s speed
	s.began(1)
	require.Zero(t, s.lately(1), "no time has passed")
	s.passed.Add(100)
	require.Equal(t, uint64(200), s.lately(1+second/2), "since the beginning")
	require.Equal(t, uint64(100), s.lately(1+second))
	s.passed.Add(50)
	require.Equal(t, uint64(100), s.lately(1+second+second/4), "too early for another")
	require.Equal(t, uint64(25), s.lately(1+3*second), "of the last two seconds")
	require.Zero(t, s.lately(1+5*second), "it stands still")
}
