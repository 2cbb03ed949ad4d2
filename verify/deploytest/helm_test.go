package deploytest

import (
	"errors"
	"io"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// The chart carries rules and dashboards, for a chart can read only its own files.
func TestChartFilesAreCurrent(t *testing.T) {
	sources := append(files(t, "deploy/prometheus/rules"), files(t, "deploy/grafana/dashboards")...)
	for _, file := range sources {
		rel, err := filepath.Rel(root, file)
		require.NoError(t, err)
		require.Equal(t, read(t, rel), read(t, "deploy", "helm", "quarry", "files", filepath.Base(file)),
			"cp deploy/prometheus/rules/*.yml deploy/grafana/dashboards/*.json deploy/helm/quarry/files/")
	}
	require.Len(t, files(t, "deploy/helm/quarry/files"), len(sources))
}

type manifest struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string
	Metadata   struct {
		Name   string
		Labels map[string]string
	}
	Spec struct {
		Replicas    int
		ServiceName string `yaml:"serviceName"`
		Selector    any
		Ports       []struct {
			Name       string
			Port       int
			TargetPort string `yaml:"targetPort"`
		}
		Groups         []any
		MaxUnavailable int `yaml:"maxUnavailable"`
		Endpoints      []struct{ Port string }
		Template       podTemplate
		JobTemplate    struct {
			Spec struct{ Template podTemplate }
		} `yaml:"jobTemplate"`
		VolumeClaimTemplates []struct{ Metadata struct{ Name string } } `yaml:"volumeClaimTemplates"`
	}
	Data       map[string]string
	StringData map[string]string `yaml:"stringData"`
}

type podTemplate struct {
	Metadata struct{ Labels, Annotations map[string]string }
	Spec     struct {
		Containers []container
		Volumes    []struct {
			Name   string
			Secret struct {
				SecretName  string `yaml:"secretName"`
				DefaultMode int    `yaml:"defaultMode"`
			}
		}
		Automount                 bool             `yaml:"automountServiceAccountToken"`
		SecurityContext           map[string]any   `yaml:"securityContext"`
		TopologySpreadConstraints []map[string]any `yaml:"topologySpreadConstraints"`
	}
}

type container struct {
	Name, Image  string
	Args         []string
	Env          []struct{ Name string }
	Ports        []struct{ Name string }
	Resources    struct{ Limits, Requests map[string]any }
	VolumeMounts []struct{ Name string } `yaml:"volumeMounts"`
	Security     struct {
		Capabilities           struct{ Add, Drop []string }
		ReadOnlyRootFilesystem bool `yaml:"readOnlyRootFilesystem"`
	} `yaml:"securityContext"`
}

func (m manifest) container() container { return m.Spec.Template.Spec.Containers[0] }

// secret is that of a volume.
func (m manifest) secret(volume string) string {
	for _, v := range m.Spec.Template.Spec.Volumes {
		if v.Name == volume {
			return v.Secret.SecretName
		}
	}
	return ""
}

// render is the chart as helm makes it, by kind/name without the release's prefix.
func render(t *testing.T, args ...string) map[string]manifest {
	t.Helper()
	helm := tool(t, "helm", "go install helm.sh/helm/v3/cmd/helm@v3.22.0")
	run(t, filepath.Join(root, "deploy", "helm"), helm, append([]string{"lint", "--strict", "quarry"}, args...)...)
	out := run(t, filepath.Join(root, "deploy", "helm"), helm, append([]string{"template", "t", "quarry", "--namespace", "store", "--kube-version", "1.31.0"}, args...)...)
	all := map[string]manifest{}
	for d := yaml.NewDecoder(strings.NewReader(out)); ; {
		var m manifest
		err := d.Decode(&m)
		if errors.Is(err, io.EOF) {
			return all
		}
		require.NoError(t, err)
		if m.Kind == "" {
			continue
		}
		key := m.Kind + "/" + strings.TrimPrefix(strings.TrimPrefix(m.Metadata.Name, "t-quarry"), "-")
		require.NotContains(t, all, key)
		require.NotEmpty(t, m.APIVersion)
		all[key] = m
	}
}

var kubeVariable = regexp.MustCompile(`\$\((\w+)\)`)

// confined checks that the command takes a pod's command lines, that the pod has what they name, and no right more than it needs.
func confined(t *testing.T, key string, m manifest, pod podTemplate) {
	t.Helper()
	volumes := map[string]bool{}
	for _, v := range pod.Spec.Volumes {
		volumes[v.Name] = true
	}
	for _, v := range m.Spec.VolumeClaimTemplates {
		volumes[v.Metadata.Name] = true
	}
	require.Equal(t, true, pod.Spec.SecurityContext["runAsNonRoot"], key)
	require.NotEqual(t, 0, pod.Spec.SecurityContext["runAsUser"], key)
	require.False(t, pod.Spec.Automount, key)
	require.NotEmpty(t, pod.Spec.Containers, key)
	mounted := map[string]bool{}
	for _, c := range pod.Spec.Containers {
		env := map[string]bool{}
		for _, e := range c.Env {
			env[e.Name] = true
		}
		var args []string
		for _, a := range c.Args {
			for _, v := range kubeVariable.FindAllStringSubmatch(a, -1) {
				require.True(t, env[v[1]], "%s: %s is not in the environment", key, v[0])
			}
			args = append(args, kubeVariable.ReplaceAllString(a, "x-0"))
		}
		understood(t, key, args...)
		for _, v := range c.VolumeMounts {
			require.True(t, volumes[v.Name], "%s mounts %s", key, v.Name)
			require.False(t, mounted[v.Name], "%s: two containers have %s", key, v.Name)
			mounted[v.Name] = true
		}
		require.Contains(t, c.Security.Capabilities.Drop, "ALL", key)
		require.True(t, c.Security.ReadOnlyRootFilesystem, key)
		require.True(t, env["QUARRY_TOKEN"], "%s has no token", key)
		require.NotEmpty(t, c.Resources.Requests["memory"], key)
	}
	require.Len(t, volumes, len(mounted), "%s: a volume that nobody mounts", key)
}

// sound checks what must hold whatever the values are.
func sound(t *testing.T, all map[string]manifest) {
	t.Helper()
	for key, m := range all {
		pod := m.Spec.Template
		switch m.Kind {
		case "StatefulSet", "Deployment":
			require.NotEmpty(t, pod.Spec.TopologySpreadConstraints, key)
		case "CronJob":
			pod = m.Spec.JobTemplate.Spec.Template
		default:
			continue
		}
		confined(t, key, m, pod)
		if m.Kind == "CronJob" {
			continue
		}
		c := m.container()
		service := all["Service/"+strings.TrimPrefix(m.Metadata.Name, "t-quarry-")]
		ports := map[string]bool{}
		for _, p := range c.Ports {
			ports[p.Name] = true
		}
		for _, p := range service.Spec.Ports {
			require.True(t, ports[p.TargetPort], "%s has no port %s", key, p.TargetPort)
		}
		require.Len(t, service.Spec.Ports, len(ports), key)
	}
}

func TestChartForALaptop(t *testing.T) {
	all := render(t)
	sound(t, all)
	require.Len(t, all, 7, "two sets, two services, two disruption budgets, a token: nothing that a bare cluster does not know")
	require.Len(t, all["Secret/token"].StringData["token"], 32, "no values: a random token")
	require.NotEqual(t, all["Secret/token"].StringData, render(t)["Secret/token"].StringData)
	storage := all["StatefulSet/storage"].container()
	require.Contains(t, storage.Args, "--fabric=tcp")
	require.Contains(t, storage.Args, "--domain=/dc1/rack1/$(NODE_NAME)")
	require.Empty(t, storage.Security.Capabilities.Add)
	require.Equal(t, true, all["StatefulSet/storage"].Spec.Template.Spec.SecurityContext["runAsNonRoot"])
	require.Equal(t, 1, all["PodDisruptionBudget/controller"].Spec.MaxUnavailable)
	controller := all["StatefulSet/controller"].container()
	require.Equal(t, 3, strings.Count(strings.Join(controller.Args, " "), "=https://t-quarry-controller-"), "members, whose certificates come from the token")
}

func TestChartForARack(t *testing.T) {
	all := render(t, "-f", "quarry/ci/rdma-values.yaml")
	sound(t, all)
	storage := all["StatefulSet/storage"].container()
	require.Contains(t, storage.Args, "--require-rdma")
	require.Contains(t, storage.Args, "--hugepages=1GiB")
	require.Contains(t, storage.Args, "--domain=/$(ZONE)/$(RACK)/$(NODE_NAME)")
	require.Equal(t, []string{"IPC_LOCK"}, storage.Security.Capabilities.Add)
	require.Equal(t, "quarry-storage-tls", all["StatefulSet/storage"].secret("tls"))
	require.Equal(t, "quarry-controller-tls", all["StatefulSet/controller"].secret("tls"), "no pod has the key of another role")
	require.Contains(t, strings.Join(all["StatefulSet/controller"].container().Args, " "), "--etcd-peer=https://")
	require.Contains(t, storage.Args, "--tls-cert=/tls/tls.crt")
	require.Contains(t, storage.Args, "--fabric-tls=off")
	encrypted := render(t, "-f", "quarry/ci/rdma-values.yaml", "--set", "tls.fabric=required")["StatefulSet/storage"].container()
	require.Contains(t, encrypted.Args, "--tls-cert=/tls/$(POD_NAME).crt", "each node shows its own name")
	require.Contains(t, encrypted.Args, "--tls-key=/tls/$(POD_NAME).key")
	require.Contains(t, encrypted.Args, "--fabric-tls=required")
	require.Equal(t, 1, storage.Resources.Limits["rdma/hca_shared_devices_a"])
	require.Equal(t, "64Gi", storage.Resources.Limits["hugepages-1Gi"])
	require.Equal(t, "rdma-net", all["StatefulSet/storage"].Spec.Template.Metadata.Annotations["k8s.v1.cni.cncf.io/networks"])
	require.NotContains(t, all, "Secret/token", "it exists already")
	require.Equal(t, "metrics", all["ServiceMonitor/storage"].Spec.Endpoints[0].Port)
	require.Contains(t, storage.Ports, struct{ Name string }{"worker-1"})
	require.Equal(t, "worker-1", all["ServiceMonitor/storage"].Spec.Endpoints[2].Port)
	require.Len(t, all["PrometheusRule/"].Spec.Groups, 2)
	require.Contains(t, all, "NetworkPolicy/")
	for _, file := range files(t, "deploy/grafana/dashboards") {
		name := filepath.Base(file)
		m := all["ConfigMap/"+strings.TrimSuffix(strings.TrimPrefix(name, "quarry-"), ".json")]
		require.Equal(t, strings.TrimSpace(read(t, "deploy", "grafana", "dashboards", name)), strings.TrimSpace(m.Data[name]))
	}
}

func TestChartWithItsOwnEtcd(t *testing.T) {
	all := render(t, "-f", "quarry/ci/external-values.yaml")
	sound(t, all)
	controller := all["StatefulSet/controller"]
	require.Contains(t, controller.container().Args, "--etcd=https://etcd-0:2379,https://etcd-1:2379")
	require.Empty(t, controller.Spec.VolumeClaimTemplates)
	require.Equal(t, "secret", all["Secret/token"].StringData["token"])
	storage := all["StatefulSet/storage"]
	require.Contains(t, storage.container().Args, "--data=/regions/data")
	require.Len(t, storage.Spec.VolumeClaimTemplates, 1)
	// Workers beside the node, over shm, with metrics.
	require.Contains(t, storage.container().Args, "--workers=2")
	require.Contains(t, storage.container().Args, "--socket=/tmp/$(POD_NAME).sock")
	require.NotContains(t, storage.container().Args, "--fabric=tcp")
	require.NotContains(t, all, "PodDisruptionBudget/storage")
	// They encrypt payloads. The file is root's, and no other user of the pod reads it.
	require.Contains(t, storage.container().Args, "--key-file=/keys/payload.keys")
	require.Contains(t, storage.container().Args, "--allow-clear")
	require.Equal(t, "payload-keys", storage.secret("payload-keys"))
	for _, v := range storage.Spec.Template.Spec.Volumes {
		if v.Name == "payload-keys" {
			require.Equal(t, 0o440, v.Secret.DefaultMode)
		}
	}
	require.Empty(t, all["StatefulSet/controller"].secret("payload-keys"), "controllers encrypt nothing")
	require.NotContains(t, strings.Join(render(t)["StatefulSet/storage"].container().Args, " "), "--key-file")
}

// Values that cannot work are refused before anything is made.
func TestChartRefusesBadValues(t *testing.T) {
	helm := tool(t, "helm", "go install helm.sh/helm/v3/cmd/helm@v3.22.0")
	for _, set := range []string{"controller.replicas=2", "storage.medium=floppy", "storage.capacity=lots", "storage.rack=a/b", "storge.replicas=3", "controller.etcd[0]=localhost",
		"storage.payloadKeys.existingSecret=keys", "storage.payloadKeys.secret=keys", "storage.workers=1,storage.payloadKeys.allowClear=true", "tls.controllerSecret=one", "tls.fabric=on", "tls.fabric=sometimes,tls.controllerSecret=one,tls.storageSecret=two", "tls.controllerSecret=one,tls.storageSecret=one"} {
		cmd := exec.CommandContext(t.Context(), helm, "template", "t", "quarry", "--kube-version", "1.31.0", "--set", set)
		cmd.Dir = filepath.Join(root, "deploy", "helm")
		out, err := cmd.CombinedOutput()
		require.Error(t, err, "%s: %s", set, out)
	}
}
