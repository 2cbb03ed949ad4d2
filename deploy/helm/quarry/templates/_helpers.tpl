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

{{- define "quarry.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: QUARRY_LOG_LEVEL
  value: {{ .Values.logLevel }}
- name: QUARRY_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "quarry.tokenSecret" . }}, key: token}}
{{- if .Values.tls.controllerSecret }}
- name: QUARRY_TLS_CA
  value: /tls/ca.crt
{{- end }}
{{- end -}}
