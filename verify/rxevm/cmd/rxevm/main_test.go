package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestParse(t *testing.T) {
	p, err := parse([]string{"--two", "--out", "/tmp/o", "--timeout", "90s", "--env", "A=b=c", "--env", "B=", "--no-install", "--", "cmd", "--two", "-x"})
	require.NoError(t, err)
	require.True(t, p.job.Two)
	require.False(t, p.job.NativeOK)
	require.False(t, p.setup.Install)
	require.Equal(t, "/tmp/o", p.job.OutDir)
	require.Equal(t, 90*time.Second, p.timeout)
	require.Equal(t, []string{"cmd", "--two", "-x"}, p.job.Command, "flags after -- are the command's")
	require.Equal(t, []string{"A=b=c", "B="}, p.job.Env[len(p.job.Env)-2:])

	p, err = parse([]string{"--prepare"})
	require.NoError(t, err)
	require.True(t, p.prepare)
	require.True(t, p.setup.Install)
}

func TestParseRefuses(t *testing.T) {
	for _, args := range [][]string{
		{},
		{"--two"},
		{"--prepare", "--", "cmd"},
		{"--timeout", "0s", "--", "cmd"},
		{"--timeout", "-1s", "--", "cmd"},
		{"--env", "novalue", "--", "cmd"},
		{"--env", "=x", "--", "cmd"},
		{"--cpus", "many", "--", "cmd"},
		{"--nosuchflag", "--", "cmd"},
	} {
		_, err := parse(args)
		require.Error(t, err, "%q", args)
	}
}
