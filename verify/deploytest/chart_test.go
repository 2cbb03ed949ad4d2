package deploytest

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/verify/testbinary"
)

var update = flag.Bool("update", false, "write the golden files of the chart")

// chartSets are the values that the chart is rendered with, by the name of the golden file.
var chartSets = map[string][]string{
	"laptop":   {"--set", "token.value=secret"},
	"rack":     {"-f", "quarry/ci/rdma-values.yaml"},
	"external": {"-f", "quarry/ci/external-values.yaml"},
}

// rendered is what helm makes of the chart.
func rendered(t *testing.T, args ...string) string {
	t.Helper()
	helm := tool(t, "helm", "go install helm.sh/helm/v3/cmd/helm@v3.22.0")
	return run(t, filepath.Join(root, "deploy", "helm"), helm, append([]string{"template", "t", "quarry", "--namespace", "store", "--kube-version", "1.31.0"}, args...)...)
}

// copied are documents that are compared with their sources elsewhere.
var copied = regexp.MustCompile(`(?m)^kind: (ConfigMap|PrometheusRule)$`)

// Whatever a change of a template changes is seen in the golden files.
func TestChartIsGolden(t *testing.T) {
	for name, args := range chartSets {
		var docs []string
		for _, doc := range strings.Split(rendered(t, args...), "\n---\n") {
			if !copied.MatchString(doc) {
				docs = append(docs, strings.TrimSpace(doc))
			}
		}
		got := strings.Join(docs, "\n---\n") + "\n"
		file := filepath.Join("testdata", "chart", name+".yaml")
		if *update {
			require.NoError(t, os.WriteFile(file, []byte(got), 0o644))
		}
		want, err := os.ReadFile(file)
		require.NoError(t, err)
		require.Equal(t, string(want), got, "%s: go test ./verify/deploytest -run TestChartIsGolden -args -update", file)
	}
}

// kube builds the decoder of Kubernetes' own types.
func kube(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "kube")
	cmd := exec.CommandContext(t.Context(), tool(t, "go", "it builds the decoder"), "build", "-C", "kube", "-ldflags=-s -w", "-o", bin, ".")
	cmd.Env = testbinary.ToolEnv()
	out, err := cmd.CombinedOutput()
	if err != nil && os.Getenv("QUARRY_NO_INSTALL") != "" {
		t.Skipf("the decoder's modules are not here: %s", out)
	}
	require.NoError(t, err, "%s", out)
	return bin
}

func decodeKube(t *testing.T, bin, docs string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), bin)
	cmd.Stdin = strings.NewReader(docs)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// Kubernetes' own types take every object of the chart, with no field that they do not have.
func TestChartIsKubernetes(t *testing.T) {
	bin := kube(t)
	counts := map[string]string{"laptop": "decoded 7 foreign 0", "rack": "foreign 5", "external": "foreign 0"}
	for name, args := range chartSets {
		docs := rendered(t, args...)
		out, err := decodeKube(t, bin, docs)
		require.NoError(t, err, "%s: %s", name, out)
		require.Contains(t, out, counts[name], name)
	}
	for _, wrong := range [][2]string{
		{"podManagementPolicy:", "podManagmentPolicy:"},
		{"replicas: 3", "replicas: three"},
		{"cpu: 250m", "cpu: 250miles"},
	} {
		_, err := decodeKube(t, bin, strings.Replace(rendered(t), wrong[0], wrong[1], 1))
		require.Error(t, err, wrong[1])
	}
}

// The example's Job is one that Kubernetes takes, and tells its programs how many they are.
func TestExampleJobIsKubernetes(t *testing.T) {
	docs, err := os.ReadFile("../../examples/10-splits/job.yaml")
	require.NoError(t, err)
	completions := regexp.MustCompile(`completions: (\d+)`).FindSubmatch(docs)
	require.NotNil(t, completions)
	require.Contains(t, string(docs), fmt.Sprintf("{name: PARTS, value: %q}", completions[1]))
	require.Contains(t, string(docs), "completionMode: Indexed")
	bin := kube(t)
	out, err := decodeKube(t, bin, string(docs))
	require.NoError(t, err, out)
	require.Contains(t, out, "decoded 1 foreign 0")
	_, err = decodeKube(t, bin, strings.Replace(string(docs), "backoffLimitPerIndex: 3", "backoffLimitPerIndices: 3", 1))
	require.Error(t, err)
}

// storageMemory is the memory that a storage pod asks for, and its limit.
func storageMemory(t *testing.T, set string) (request, limit any) {
	t.Helper()
	r := render(t, "--set", set)["StatefulSet/storage"].container().Resources
	return r.Requests["memory"], r.Limits["memory"]
}

// Memory follows from what regions and workers take.
func TestChartDerivesMemory(t *testing.T) {
	for _, c := range []struct{ set, request, limit string }{
		{"storage.capacity=2GiB", "2560Mi", "2560Mi"},
		{"storage.capacity=8GiB,storage.workers=2,storage.workerMemory=512MiB", "9728Mi", "9728Mi"},
		{"storage.medium=pvc,storage.capacity=2GiB,storage.workers=1", "2560Mi", "4608Mi"},
		{"storage.hugepages.size=2Mi,storage.capacity=4GiB", "512Mi", "512Mi"},
		{"storage.capacity=2GiB,storage.resources.limits.memory=4Gi", "4Gi", "4Gi"},
		{"storage.capacity=2GiB,storage.resources.requests.memory=3Gi", "3Gi", "3072Mi"},
	} {
		request, limit := storageMemory(t, c.set)
		require.Equal(t, [2]any{c.request, c.limit}, [2]any{request, limit}, c.set)
	}
	huge := render(t, "--set", "storage.hugepages.size=2Mi,storage.capacity=4GiB")["StatefulSet/storage"].container()
	require.Equal(t, "4096Mi", huge.Resources.Limits["hugepages-2Mi"])
	require.Contains(t, render(t, "--set", "storage.workers=1")["StatefulSet/storage"].container().Env, struct{ Name string }{"QUARRY_WORKER_MEMORY"})
	cmd := exec.CommandContext(t.Context(), binary(t), "worker")
	cmd.Env = []string{"QUARRY_WORKER_MEMORY=3miles"}
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "3miles", "the variable is that of the flag")
}

// Values that ask for what cannot be are refused, with the value and the remedy in the message.
func TestChartRefusesWhatCannotBe(t *testing.T) {
	helm := tool(t, "helm", "go install helm.sh/helm/v3/cmd/helm@v3.22.0")
	for set, want := range map[string]string{
		"storage.capacity=8GiB,storage.resources.limits.memory=3Gi":                                                    "need at least 8320Mi",
		"storage.workers=2,storage.resources.limits.memory=3Gi":                                                        "2 workers of 2GiB need at least 6272Mi",
		"storage.resources.requests.memory=1Gi":                                                                        "storage.resources.requests.memory 1Gi",
		"storage.resources.requests.memory=4Gi,storage.resources.limits.memory=3Gi":                                    "is above limits.memory",
		"storage.resources.limits.memory=3G":                                                                           "does not match pattern",
		"storage.medium=pvc,storage.capacity=4GiB":                                                                     "storage.persistence.size 4Gi",
		"storage.medium=pvc,storage.hugepages.size=2Mi":                                                                "storage.medium is pvc",
		"storage.hugepages.size=1Gi,storage.capacity=1536MiB":                                                          "whole pages of 1Gi",
		"storage.hugepages.size=2Mi,storage.hugepages.amount=1Gi":                                                      "want at least storage.capacity 2GiB",
		"gateway.enabled=true":                                                                                         "gateway.passwordSecret",
		"gateway.enabled=true,gateway.passwordSecret=p,gateway.grants=true":                                            "gateway.aclSecret",
		"gateway.enabled=true,gateway.passwordSecret=p,gateway.tls.clientCA=true":                                      "gateway.tls.secret",
		"gateway.enabled=true,gateway.passwordSecret=p,gateway.create=false,gateway.durable=true":                      "gateway.create is false",
		"gateway.enabled=true,gateway.passwordSecret=p,tls.gatewaySecret=g":                                            "tls.controllerSecret",
		"gateway.enabled=true,gateway.passwordSecret=p,tls.controllerSecret=a,tls.storageSecret=b,tls.fabric=required": "tls.gatewaySecret",
		"flight.enabled=true,tls.controllerSecret=a,tls.storageSecret=b,tls.gatewaySecret=g":                           "flight.tlsSecret",
		"flight.enabled=true,flight.tlsSecret=f,tls.controllerSecret=a,tls.storageSecret=b,tls.fabric=required":        "tls.gatewaySecret",
		"flight.enabled=true,flight.memory=1MiB":                                                                       "flight.memory 1MiB",
		"flight.enabled=true,flight.memory=1GiB":                                                                       "want at least 2048Mi",
		"flight.enabled=true,flight.resources.limits.memory=1G":                                                        "does not match pattern",
		"backup.trees[0]=x,tls.controllerSecret=a,tls.storageSecret=b,tls.fabric=required":                             "backup.tlsSecret",
		"backup.trees[0]=a/b":      "does not match pattern",
		"backup.schedules.Daily=x": "Daily",
	} {
		cmd := exec.CommandContext(t.Context(), helm, "template", "t", "quarry", "--kube-version", "1.31.0", "--set", set)
		cmd.Dir = filepath.Join(root, "deploy", "helm")
		out, err := cmd.CombinedOutput()
		require.Error(t, err, set)
		require.Contains(t, string(out), want, set)
	}
}

// A Flight server runs in each storage pod, with neither the node's key nor its memory, and names the pods by the names that nodes have.
func TestChartServesFlight(t *testing.T) {
	all := render(t, "-f", "quarry/ci/rdma-values.yaml")
	sound(t, all)
	storage := all["StatefulSet/storage"]
	require.Len(t, storage.Spec.Template.Spec.Containers, 2)
	f := storage.Spec.Template.Spec.Containers[1]
	require.Contains(t, f.Args, "--spread")
	require.Contains(t, f.Args, "--listen-cert=/flight-tls/tls.crt")
	require.Contains(t, f.Args, "--tls-cert=/tls/tls.crt")
	require.Equal(t, "quarry-gateway-tls", storage.secret("flight-authority"))
	require.Equal(t, "flight-tls", storage.secret("flight-tls"))
	require.Empty(t, f.Security.Capabilities.Add)
	require.Contains(t, all, "ServiceMonitor/flight")
	ports := map[string]bool{}
	for _, p := range f.Ports {
		ports[p.Name] = true
	}
	for _, p := range all["Service/flight"].Spec.Ports {
		require.True(t, ports[p.TargetPort], p.TargetPort)
	}
	plain := render(t, "--set", "flight.enabled=true")
	sound(t, plain)
	f = plain["StatefulSet/storage"].Spec.Template.Spec.Containers[1]
	require.NotContains(t, strings.Join(f.Args, " "), "-cert=")
	require.Equal(t, len(render(t))+1, len(plain))
	open := rendered(t, "--set", "flight.enabled=true,tls.controllerSecret=a,tls.storageSecret=b")
	require.Contains(t, open, "secret: {secretName: a, items: [{key: ca.crt, path: ca.crt}]}")
}

// Gateways and backups are what their values say, with a token and certificate of their own.
func TestChartServesRedisAndBacksUp(t *testing.T) {
	all := render(t, "-f", "quarry/ci/rdma-values.yaml")
	g := all["Deployment/gateway"]
	require.Contains(t, g.container().Args, "--tls-listen=0.0.0.0:6380")
	require.Contains(t, g.container().Args, "--client-ca=/redis-tls/client-ca.crt")
	require.Contains(t, g.container().Args, "--grants")
	require.Equal(t, "quarry-gateway-tls", g.secret("tls"))
	require.Equal(t, "redis-users", g.secret("acl"))
	require.Equal(t, "cache", g.Spec.Template.Metadata.Labels["team"])
	require.Contains(t, all, "PodDisruptionBudget/gateway")
	require.Contains(t, all, "ServiceMonitor/gateway")
	require.Contains(t, rendered(t, "-f", "quarry/ci/rdma-values.yaml"), "{secretKeyRef: {name: gateway-token, key: token}}")
	require.Contains(t, all["StatefulSet/storage"].container().Args, "--domain=/$(ZONE)/$(RACK)/$(NODE_NAME)")
	for _, when := range []string{"daily", "weekly"} {
		dump := all["CronJob/"+when].Spec.JobTemplate.Spec.Template.Spec
		require.Len(t, dump.Containers, 1)
		require.Contains(t, dump.Containers[0].Args, "--tree=redis")
		require.Contains(t, dump.Containers[0].Args, "/backup/"+when+"-redis.jsonl")
		require.False(t, dump.Automount)
	}
	plain := render(t, "-f", "quarry/ci/external-values.yaml")["Deployment/gateway"]
	require.Contains(t, plain.container().Args, "--password-file=/password/password")
	require.Contains(t, plain.container().Args, "--durable")
	require.Contains(t, plain.container().Env, struct{ Name string }{"QUARRY_KEY_FILE"})
	// Without a certificate of its own it has the authority's certificate and no key.
	open := rendered(t, "--set", "gateway.enabled=true,gateway.passwordSecret=p,tls.controllerSecret=a,tls.storageSecret=b")
	require.Contains(t, open, "secret: {secretName: a, items: [{key: ca.crt, path: ca.crt}]}")
}
