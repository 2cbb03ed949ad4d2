package main

import (
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/cmd/quarry/doctor"
	"github.com/quarrystore/quarry/internal/local"
)

func levels(list []doctor.Finding, check string) map[doctor.Level]int {
	n := map[doctor.Level]int{}
	for _, f := range list {
		if f.Check == check {
			n[f.Level]++
		}
	}
	return n
}

func TestDoctorOfAWellCluster(t *testing.T) {
	var list []doctor.Finding
	on(t, "doctor", "--json").decode(t, &list)
	for _, check := range []string{"memory", "kernel", "clocks", "controllers", "nodes", "ports", "regions", "versions"} {
		require.NotEmpty(t, levels(list, check), check)
		require.Zero(t, levels(list, check)[doctor.Error], "%s: %v", check, list)
	}
	for _, f := range list {
		if f.Level == doctor.Warning || f.Level == doctor.Error {
			require.NotEmpty(t, f.Remedy, "%+v", f)
		}
	}
	require.Contains(t, on(t, "doctor").ok(t), "is well and answers in")
}

func TestDoctorFindsWhatIsWrong(t *testing.T) {
	// Nobody there.
	r := quarry(t, nil, "", "doctor", "-C", "http://127.0.0.1:1", "--timeout", "5s")
	require.Equal(t, exitDamaged, r.code, r.err)
	require.Contains(t, r.out, "no controller leads")
	require.Contains(t, r.out, "-> start one")
	// More memory than there is, and a folder without room.
	quarry(t, nil, "", "doctor", "--host", "--capacity", "900000GiB").fails(t, exitDamaged, "no further region")
	quarry(t, nil, "", "doctor", "--host", "--capacity", "900000GiB", "--data", t.TempDir()+"/not/there/yet").fails(t, exitDamaged, "no further region")
	quarry(t, nil, "", "doctor", "--host", "--capacity", "900000GiB", "--hugepages", "2MiB").fails(t, exitDamaged, "pages of 2 MiB")
	// A port that somebody has.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	require.Contains(t, quarry(t, nil, "", "doctor", "--host", "--ports", l.Addr().String()).out, l.Addr().String()+" is in use")
}

// A node that has died is named, and so are the regions that miss it.
func TestDoctorNamesADeadNode(t *testing.T) {
	c, err := local.Start(t.Context(), local.Config{Binary: executable(t), Nodes: 2, RegionBytes: "16MiB", Lease: "500ms"})
	require.NoError(t, err)
	defer c.Stop()
	env := []string{"QUARRY_CONTROLLER=" + c.URL}
	quarry(t, env, "", "region", "create", "-r", "2").ok(t)
	require.NoError(t, c.Nodes[1].Stop())
	require.Eventually(t, func() bool {
		r := quarry(t, env, "", "doctor")
		return r.code == exitDamaged && strings.Contains(r.out, "n2 (/local/n2/n2) is ")
	}, waitLong, pollEvery)
}
