{{- define "quarry.fullname" -}}
{{- if .Values.fullnameOverride -}}{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-%s" .Release.Name (default .Chart.Name .Values.nameOverride) | trunc 40 | trimSuffix "-" }}{{- end -}}
{{- end -}}

{{- define "quarry.labels" -}}
app.kubernetes.io/name: quarry
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

{{- define "quarry.selector" -}}
app.kubernetes.io/name: quarry
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "quarry.image" -}}
{{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end -}}

{{- define "quarry.scheme" -}}
{{- if ne (empty .Values.tls.controllerSecret) (empty .Values.tls.storageSecret) }}{{ fail "tls.controllerSecret and tls.storageSecret: give both, each with a certificate of its own role, or none" }}{{ end -}}
{{- if and .Values.tls.controllerSecret (eq .Values.tls.controllerSecret .Values.tls.storageSecret) }}{{ fail "tls.controllerSecret and tls.storageSecret are one secret: a storage node would have a controller's key" }}{{ end -}}
{{- if and (ne .Values.tls.fabric "off") (empty .Values.tls.storageSecret) }}{{ fail "tls.fabric needs certificates: give tls.controllerSecret and tls.storageSecret" }}{{ end -}}
{{ if .Values.tls.controllerSecret }}https{{ else }}http{{ end }}
{{- end -}}

{{/* URLs of all controllers, comma separated. */}}
{{- define "quarry.controllers" -}}
{{- $name := printf "%s-controller" (include "quarry.fullname" .) -}}
{{- $urls := list -}}
{{- range $i := until (int .Values.controller.replicas) -}}
{{- $urls = append $urls (printf "%s://%s-%d.%s.%s.svc:7420" (include "quarry.scheme" $) $name $i $name $.Release.Namespace) -}}
{{- end -}}
{{ join "," $urls }}
{{- end -}}

{{/* Members of the embedded etcd, NAME=URL, comma separated. */}}
{{- define "quarry.members" -}}
{{- $name := printf "%s-controller" (include "quarry.fullname" .) -}}
{{- $members := list -}}
{{- range $i := until (int .Values.controller.replicas) -}}
{{- $members = append $members (printf "%s-%d=https://%s-%d.%s.%s.svc:7424" $name $i $name $i $name $.Release.Namespace) -}}
{{- end -}}
{{ join "," $members }}
{{- end -}}

{{- define "quarry.tokenSecret" -}}
{{- if .Values.token.existingSecret -}}{{ .Values.token.existingSecret }}
{{- else -}}{{ include "quarry.fullname" . }}-token{{- end -}}
{{- end -}}

{{/* Environment of every container: a dict of root and, for a token of one role, tokenSecret. */}}
{{- define "quarry.env" -}}
{{- $root := .root -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: QUARRY_LOG_LEVEL
  value: {{ $root.Values.logLevel }}
- name: QUARRY_TOKEN
  valueFrom: {secretKeyRef: {name: {{ default (include "quarry.tokenSecret" $root) .tokenSecret }}, key: token}}
{{- if $root.Values.tls.controllerSecret }}
- name: QUARRY_TLS_CA
  value: /tls/ca.crt
{{- end }}
{{- end -}}

{{/* Where a component's pods run. */}}
{{- define "quarry.scheduling" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* MiB of a size such as 2GiB or 512Mi. */}}
{{- define "quarry.mib" -}}
{{- $n := regexFind "^[0-9]+" . | int64 -}}
{{- if contains "Ti" . }}{{ mul $n 1048576 }}{{ else if contains "Gi" . }}{{ mul $n 1024 }}{{ else }}{{ $n }}{{ end -}}
{{- end -}}

{{/* Resources of a storage pod: memory is what regions and workers take, and 512Mi for the node. */}}
{{- define "quarry.storageResources" -}}
{{- $s := .Values.storage -}}
{{- $capacity := include "quarry.mib" $s.capacity | int64 -}}
{{- $workers := mul (int64 $s.workers) (include "quarry.mib" $s.workerMemory | int64) -}}
{{- $regions := ternary $capacity (int64 0) (and (eq $s.medium "memory") (empty $s.hugepages.size)) -}}
{{- if and (eq $s.medium "pvc") (lt (include "quarry.mib" $s.persistence.size | int64) (div (mul $capacity 11) 10)) -}}
{{- fail (printf "storage.persistence.size %s: want a tenth more than storage.capacity %s, for the file system" $s.persistence.size $s.capacity) -}}
{{- end -}}
{{- $r := deepCopy $s.resources -}}
{{- $limits := default dict $r.limits -}}
{{- $requests := default dict $r.requests -}}
{{- $need := add $regions $workers -}}
{{- range $which, $have := dict "limits" $limits.memory "requests" $requests.memory -}}
{{- if and $have (lt (include "quarry.mib" $have | int64) (add $need 128)) -}}
{{- fail (printf "storage.resources.%s.memory %s: regions of %dMi and %d workers of %s need at least %dMi; leave it out, and it follows from them" $which $have $regions (int $s.workers) $s.workerMemory (add $need 128)) -}}
{{- end -}}
{{- end -}}
{{- if not $requests.memory -}}{{- $requests = set $requests "memory" (default (printf "%dMi" (add $need 512)) $limits.memory) -}}{{- end -}}
{{- if not $limits.memory -}}
{{- /* The page cache of files counts as the pod's memory; the kernel takes it back when it is short of it. */ -}}
{{- $limits = set $limits "memory" (printf "%dMi" (max (include "quarry.mib" $requests.memory | int64) (add $need 512 (ternary $capacity (int64 0) (eq $s.medium "pvc"))))) -}}
{{- end -}}
{{- if gt (include "quarry.mib" $requests.memory | int64) (include "quarry.mib" $limits.memory | int64) -}}{{- fail (printf "storage.resources: requests.memory %s is above limits.memory %s" $requests.memory $limits.memory) -}}{{- end -}}
{{- if $s.rdma.enabled -}}{{- $limits = set $limits $s.rdma.resource (int $s.rdma.count) -}}{{- end -}}
{{- with $s.hugepages.size -}}
{{- if ne $s.medium "memory" -}}{{- fail "storage.hugepages are for regions in memory: storage.medium is pvc" -}}{{- end -}}
{{- $page := include "quarry.mib" . | int64 -}}
{{- $amount := default (printf "%dMi" $capacity) $s.hugepages.amount -}}
{{- $have := include "quarry.mib" $amount | int64 -}}
{{- if or (lt $have $capacity) (mod $capacity $page) (mod $have $page) -}}{{- fail (printf "storage.hugepages.amount %s: want at least storage.capacity %s, and both in whole pages of %s" $amount $s.capacity .) -}}{{- end -}}
{{- $limits = set $limits (printf "hugepages-%s" .) $amount -}}
{{- end -}}
{{- toYaml (dict "requests" $requests "limits" $limits) -}}
{{- end -}}
