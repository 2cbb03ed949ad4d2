{{/* The Flight server of a storage pod. It has neither the node's key nor its memory. */}}
{{- define "quarry.flight" -}}
{{- $f := .Values.flight -}}
{{- if and .Values.tls.gatewaySecret (not .Values.tls.controllerSecret) }}{{ fail "tls.gatewaySecret: give tls.controllerSecret and tls.storageSecret, too" }}{{ end -}}
{{- if and .Values.tls.gatewaySecret (not $f.tlsSecret) }}{{ fail "flight.tlsSecret: give a certificate with the names of the pods, which tls.gatewaySecret has not" }}{{ end -}}
{{- if and (eq .Values.tls.fabric "required") (not .Values.tls.gatewaySecret) }}{{ fail "tls.fabric=required refuses Flight servers without a certificate: give tls.gatewaySecret" }}{{ end -}}
{{- $memory := include "quarry.mib" $f.memory | int64 -}}
{{- if lt $memory (int64 129) }}{{ fail (printf "flight.memory %s: want at least 129MiB, for the largest entry" $f.memory) }}{{ end -}}
{{- range $which, $have := dict "limits" (default dict $f.resources.limits).memory "requests" (default dict $f.resources.requests).memory }}
{{- if and $have (lt (include "quarry.mib" $have | int64) (mul $memory 2)) }}{{ fail (printf "flight.resources.%s.memory %s: want at least %dMi, twice flight.memory" $which $have (mul $memory 2)) }}{{ end -}}
{{- end -}}
- name: flight
  image: {{ include "quarry.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args:
    - gateway
    - flight
    - --controller={{ include "quarry.controllers" . }}
    - --fabric=tcp
    - --listen=0.0.0.0:8815
    - --spread
    - --memory={{ $f.memory }}
    - --stop-timeout={{ max 1 (min 60 (sub (int .Values.storage.stopSeconds) 10)) }}s
    {{- if $f.tlsSecret }}
    - --listen-cert=/flight-tls/tls.crt
    - --listen-key=/flight-tls/tls.key
    {{- end }}
    {{- if .Values.metrics.enabled }}
    - --metrics-listen=0.0.0.0:9423
    {{- end }}
    {{- if .Values.tls.gatewaySecret }}
    - --tls-cert=/tls/tls.crt
    - --tls-key=/tls/tls.key
    - --fabric-tls={{ .Values.tls.fabric }}
    {{- end }}
    {{- range $f.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  env:
    {{- include "quarry.env" (dict "root" . "tokenSecret" $f.tokenSecret) | nindent 4 }}
  ports:
    - {name: flight, containerPort: 8815}
    {{- if .Values.metrics.enabled }}
    - {name: flight-metrics, containerPort: 9423}
    {{- end }}
  # It says nothing about the node's readiness.
  livenessProbe:
    tcpSocket: {port: flight}
    initialDelaySeconds: 60
    periodSeconds: 10
    failureThreshold: 6
  resources: {{- toYaml $f.resources | nindent 4 }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
  volumeMounts:
    - {name: flight-tmp, mountPath: /tmp}
    {{- if .Values.tls.controllerSecret }}
    - {name: flight-authority, mountPath: /tls, readOnly: true}
    {{- end }}
    {{- if $f.tlsSecret }}
    - {name: flight-tls, mountPath: /flight-tls, readOnly: true}
    {{- end }}
{{- end -}}

{{- define "quarry.flightVolumes" -}}
- name: flight-tmp
  emptyDir: {}
{{- if .Values.tls.gatewaySecret }}
- name: flight-authority
  secret: {secretName: {{ .Values.tls.gatewaySecret }}}
{{- else if .Values.tls.controllerSecret }}
# The authority alone: a server without a certificate of its own shows its token.
- name: flight-authority
  secret: {secretName: {{ .Values.tls.controllerSecret }}, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- with .Values.flight.tlsSecret }}
- name: flight-tls
  secret: {secretName: {{ . }}}
{{- end }}
{{- end -}}
