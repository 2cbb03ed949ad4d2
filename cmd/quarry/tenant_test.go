package main

import (
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/local"
)

// devCluster is a cluster in one process of its own, and how to run the command against it.
func devCluster(t *testing.T, args ...string) func(args ...string) result {
	p, err := local.Spawn(t.Context(), executable(t), append([]string{"dev", "--listen", "127.0.0.1:0", "--region-bytes", "16MiB"}, args...)...)
	require.NoError(t, err)
	t.Cleanup(func() { p.Signal(syscall.SIGINT); p.Wait() })
	env := []string{"QUARRY_CONTROLLER=" + p.Ready["url"]}
	return func(args ...string) result {
		t.Helper()
		return quarry(t, env, "", args...)
	}
}

func TestTenantCommands(t *testing.T) {
	on := devCluster(t, "--nodes", "2", "--replicas", "2")
	on("tenant", "create", "Shop").fails(t, exitUsage, `tenant "Shop": want 1 to 63 of a-z, 0-9, - and _`)
	require.Contains(t, on("tenant", "create", "shop", "--quota-bytes", "40MiB", "--sessions", "2", "--lanes", "300").ok(t), "shop    0        0 B of 40.0 MiB  0 of 2    0 of 300")
	on("tenant", "create", "shop").fails(t, exitConflict, "tenant shop exists")
	on("slab", "alloc", "--data", "x", "--tenant", "ship").fails(t, exitNotFound, `no tenant "ship"`)
	on("slab", "alloc", "--data", "theirs").ok(t)
	on("slab", "alloc", "--tenant", "shop", "--data", "ours").ok(t)

	var list []tenantView
	on("tenant", "list", "--json").decode(t, &list)
	require.Len(t, list, 2)
	require.Equal(t, "default", list[0].Name)
	require.EqualValues(t, 1, list[0].Regions)
	require.Equal(t, "shop", list[1].Name)
	require.Equal(t, tenantAmount{32 << 20, 40 << 20}, list[1].Bytes)
	require.EqualValues(t, 2, list[1].Sessions.Quota)

	// Durable objects lie in regions of their own, for which there is no room.
	on("region", "create", "--tenant", "shop", "--size", "16MiB").fails(t, exitNoSpace, "tenant shop: quota of bytes: 32 MiB of 40 MiB are used", "quarry tenant set shop")
	on("tenant", "set", "shop").fails(t, exitUsage, "--quota-bytes")
	on("tenant", "set", "shop", "--quota-bytes", "0", "--lanes", "1").ok(t)
	on("region", "create", "--tenant", "shop", "--size", "16MiB").ok(t)
	on("slab", "alloc", "--tenant", "shop", "--data", "more").fails(t, exitNoSpace, "tenant shop: quota of lanes: 0 of 1 are used", "--lanes")

	on("tenant", "delete", "shop").fails(t, exitConflict, "tenant shop holds regions: 2, 3")
	on("tenant", "delete", "default").fails(t, exitUsage, "always there")
	on("tenant", "create", "empty").ok(t)
	require.Equal(t, "default\nempty\nshop\n", sorted(on("complete-values", "tenant delete").ok(t)))
	require.Equal(t, "tenant empty is deleted\n", on("tenant", "delete", "empty").ok(t))
	on("tenant", "delete", "empty").fails(t, exitNotFound, `tenant "empty": no such tenant`)

	on("tenant", "set", "shop", "--lanes", "0").ok(t)
	on("slab", "alloc", "--name", "fruit", "--data", "default's").ok(t)
	on("slab", "alloc", "--tenant", "shop", "--name", "fruit", "--data", "apples").ok(t)
	on("tenant", "delete", "shop").fails(t, exitConflict, "tenant shop holds 1 names, among them fruit", "--with-data")
	require.Equal(t, "tenant shop is deleted\n", on("tenant", "delete", "shop", "--with-data").ok(t))
	on("tenant", "list", "--json").decode(t, &list)
	require.Len(t, list, 1)
	require.Equal(t, "default's", on("slab", "read", "@fruit").ok(t))
	on("tenant", "create", "shop").ok(t)
	on("slab", "read", "@fruit", "--tenant", "shop").fails(t, exitNotFound, "fruit")
}

// TestTenantsAreShown: status, doctor, metrics and the console agree on what a tenant uses, and show
// it to operators and viewers alone.
func TestTenantsAreShown(t *testing.T) {
	p, err := local.Spawn(t.Context(), executable(t), "dev", "--listen", "127.0.0.1:0", "--nodes", "2", "--replicas", "2", "--region-bytes", "16MiB", "--metrics-listen", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { p.Signal(syscall.SIGINT); p.Wait() })
	env := []string{"QUARRY_CONTROLLER=" + p.Ready["url"]}
	on := func(args ...string) result { t.Helper(); return quarry(t, env, "", args...) }

	require.NotContains(t, on("status").ok(t), "TENANT", "there is only the default one")
	on("tenant", "create", "shop", "--quota-bytes", "32MiB", "--sessions", "5").ok(t)
	on("slab", "alloc", "--tenant", "shop", "--data", "ours").ok(t)
	used := tenantAmount{32 << 20, 32 << 20}

	var v statusView
	on("status", "--json").decode(t, &v)
	require.Len(t, v.Tenants, 2)
	require.Equal(t, "shop", v.Tenants[1].Name)
	require.Equal(t, used, v.Tenants[1].Bytes)
	i := slices.IndexFunc(v.Regions, func(r regionView) bool { return r.Tenant == "shop" })
	require.GreaterOrEqual(t, i, 0, "%+v", v.Regions)
	require.Contains(t, on("status").ok(t), "32.0 MiB of 32.0 MiB")
	require.Contains(t, on("doctor").out, "tenant shop uses 33554432 of 33554432 bytes")

	token := strings.TrimSpace(on("token", "create", "--role", "client").ok(t))
	v = statusView{}
	quarry(t, append(env, "QUARRY_TOKEN="+token), "", "status", "--json").decode(t, &v)
	require.Empty(t, v.Tenants)

	fetch := func(url string) string {
		res, err := http.Get(url)
		require.NoError(t, err)
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		return string(b)
	}
	metrics := fetch(p.Ready["metrics"])
	require.Contains(t, metrics, `quarry_tenant_used{resource="bytes",tenant="shop"} 3.3554432e+07`)
	require.Contains(t, metrics, `quarry_tenant_quota{resource="sessions",tenant="shop"} 5`)
	require.NotContains(t, metrics, `quarry_tenant_quota{resource="lanes"`, "no quota, no series")
	b, err := os.ReadFile(p.Ready["token_file"])
	require.NoError(t, err)
	page := strings.Replace(p.Ready["url"], "://", "://any:"+strings.TrimSpace(string(b))+"@", 1)
	require.Eventually(t, func() bool {
		return strings.Contains(fetch(page+"/console/state"), `{"name":"shop","regions":1,"bytes":33554432,"quota_bytes":33554432`)
	}, 3*time.Minute, 20*time.Millisecond)
}

func sorted(lines string) string {
	l := strings.SplitAfter(lines, "\n")
	slices.Sort(l)
	return strings.Join(l, "")
}
