{{/* What pods have in common, and settings as TOML. */}}

{{/* (dict "root" $ "part" name "values" .Values.part) */}}
{{- define "gpufaas.podMetadata" -}}
# Nothing of the chart's version: another one alone restarts no pod.
labels:
  {{- include "gpufaas.selector" . | nindent 2 }}
  {{- with .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/*
No part talks to Kubernetes' API but a gateway that runs functions (`token`), and none wants variables
about the namespace's services.
*/}}
{{- define "gpufaas.podSpec" -}}
serviceAccountName: {{ include "gpufaas.part" . }}
automountServiceAccountToken: {{ default false .token }}
enableServiceLinks: false
{{- with default .root.Values.priorityClassName .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Replicas on different nodes where that can be. */}}
{{- define "gpufaas.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "gpufaas.selector" . | nindent 8 }}
{{- end -}}

{{- define "gpufaas.nobody" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10000
  runAsGroup: 10000
  fsGroup: 10000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "gpufaas.closed" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{/* (dict "path" "/readyz" "port" "http") */}}
{{- define "gpufaas.probes" -}}
startupProbe:
  httpGet: {path: "{{ .alive }}", port: {{ .port }}}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: "{{ .alive }}", port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: "{{ .ready }}", port: {{ .port }}}
  periodSeconds: 3
  timeoutSeconds: 2
  failureThreshold: 2
{{- end -}}

{{- define "gpufaas.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "gpufaas.part" . }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "gpufaas.labels" . | nindent 4 }}
automountServiceAccountToken: false
{{- end -}}

{{/* A drained node takes one of them at a time. */}}
{{- define "gpufaas.disruption" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "gpufaas.part" . }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "gpufaas.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "gpufaas.selector" . | nindent 6 }}
{{- end -}}

{{/* (dict "name" "data" "values" .persistence) */}}
{{- define "gpufaas.claim" -}}
- metadata:
    name: data
    {{- with .persistence.annotations }}
    annotations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .persistence.storageClass }}
    storageClassName: {{ . }}
    {{- end }}
    resources:
      requests:
        storage: {{ .persistence.size }}
{{- end -}}

{{/* Ours and a person's further keys, as one table: (dict "ours" ... "further" ... "where" ...) */}}
{{- define "gpufaas.table" -}}
{{- range $key, $_ := .further }}
{{- if hasKey $.ours $key }}{{ fail (printf "%s.%s: the chart sets this itself" $.where $key) }}{{ end }}
{{- end }}
{{- include "gpufaas.toml" (merge (dict) .ours .further) }}
{{- end -}}

{{/* One table. YAML's numbers come as floats: whole ones are written as such. */}}
{{- define "gpufaas.toml" -}}
{{- range $key, $value := . }}
{{ $key }} = {{ include "gpufaas.tomlValue" $value }}
{{- end }}
{{- end -}}

{{- define "gpufaas.tomlValue" -}}
{{- if kindIs "slice" . -}}
[{{- range $number, $each := . }}{{ if $number }}, {{ end }}{{ include "gpufaas.tomlValue" $each }}{{ end -}}]
{{- else if kindIs "float64" . -}}
{{- if eq (floor .) . }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end -}}
