{{/* Names, labels and addresses. Part templates take (dict "root" $ "part" "scheduler"). */}}

{{- define "gpufaas.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "gpufaas.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "gpufaas.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "gpufaas.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "gpufaas.part" -}}
{{- printf "%s-%s" (include "gpufaas.fullname" .root) .part -}}
{{- end -}}

{{- define "gpufaas.selector" -}}
app.kubernetes.io/name: {{ include "gpufaas.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "gpufaas.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{ include "gpufaas.selector" . }}
app.kubernetes.io/part-of: gpufaas
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The name under which a service is reached from everywhere in the cluster. */}}
{{- define "gpufaas.host" -}}
{{- printf "%s.%s.svc.%s" (include "gpufaas.part" .) .root.Release.Namespace .root.Values.clusterDomain -}}
{{- end -}}

{{/* Every scheduler by its own name: a client with all of them finds the leader when one freezes. */}}
{{- define "gpufaas.schedulers" -}}
{{- $part := dict "root" . "part" "scheduler" -}}
{{- $urls := list -}}
{{- range $number := until (int .Values.scheduler.replicas) -}}
{{- $urls = append $urls (printf "http://%s-%d.%s:7700" (include "gpufaas.part" $part) $number (include "gpufaas.host" $part)) -}}
{{- end -}}
{{- join "," $urls -}}
{{- end -}}

{{- define "gpufaas.etcdHosts" -}}
{{- $part := dict "root" . "part" "etcd" -}}
{{- $hosts := list -}}
{{- range $number := until (int .Values.etcd.replicas) -}}
{{- $hosts = append $hosts (printf "%s-%d.%s" (include "gpufaas.part" $part) $number (include "gpufaas.host" $part)) -}}
{{- end -}}
{{- join "," $hosts -}}
{{- end -}}

{{- define "gpufaas.openfaasNamespace" -}}
{{- default .Release.Namespace .Values.openfaas.namespace -}}
{{- end -}}

{{/* Not empty where our gateway itself runs functions. */}}
{{- define "gpufaas.runsFunctions" -}}
{{- if eq .Values.functions.provider "kubernetes" }}true{{ end -}}
{{- end -}}

{{- define "gpufaas.upstream" -}}
{{- if .Values.openfaas.upstreamUrl -}}
{{- .Values.openfaas.upstreamUrl -}}
{{- else -}}
{{- printf "http://%s.%s.svc.%s:8081" (include "gpufaas.part" (dict "root" . "part" "upstream")) (include "gpufaas.openfaasNamespace" .) .Values.clusterDomain -}}
{{- end -}}
{{- end -}}

{{/* Where functions find a GPU manager; a certificate that was made here is named by fingerprint. */}}
{{- define "gpufaas.node" -}}
{{- $manager := .Values.gpuManager -}}
{{- $host := include "gpufaas.host" (dict "root" . "part" "gpu-manager") -}}
{{- if and $manager.hostSocket.enabled (or $manager.hostSocket.mounted (include "gpufaas.runsFunctions" .)) -}}
{{- printf "unix:%s/node.sock" $manager.hostSocket.path -}}
{{- else if not $manager.tls.enabled -}}
{{- printf "tcp:%s:%d" $host (int $manager.port) -}}
{{- else -}}
{{- $made := include "gpufaas.made" . | fromJson -}}
{{- $fingerprint := $manager.tls.fingerprint -}}
{{- if not $manager.tls.existingSecret -}}
{{- $fingerprint = include "gpufaas.fingerprint" (b64dec (index $made "node" "tls.crt")) -}}
{{- end -}}
{{- printf "tls:%s:%d%s" $host (int $manager.port) (ternary (printf "#%s" $fingerprint) "" (ne $fingerprint "")) -}}
{{- end -}}
{{- end -}}

{{/* SHA-256 of the first certificate in a PEM text, as DER. */}}
{{- define "gpufaas.fingerprint" -}}
{{- $body := regexReplaceAll "(?s).*?-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----.*" . "${1}" -}}
{{- $body | nospace | b64dec | sha256sum -}}
{{- end -}}

{{- define "gpufaas.clusterSecret" -}}
{{- default (include "gpufaas.part" (dict "root" . "part" "cluster")) .Values.clusterSecret.existingSecret -}}
{{- end -}}

{{- define "gpufaas.loginSecret" -}}
{{- default (include "gpufaas.part" (dict "root" . "part" "login")) .Values.openfaas.basicAuthSecret -}}
{{- end -}}

{{- define "gpufaas.nodeSecret" -}}
{{- default (include "gpufaas.part" (dict "root" . "part" "node")) .Values.gpuManager.tls.existingSecret -}}
{{- end -}}

{{- define "gpufaas.image" -}}
{{- $tag := default .root.Chart.AppVersion .image.tag -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository $tag -}}
{{- end -}}
{{- end -}}
