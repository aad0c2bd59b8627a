{{- define "gpufaas.tracing" -}}
{{- $tracing := dict "endpoint" .Values.tracing.endpoint "ratio" .Values.tracing.ratio }}
{{- if .Values.tracing.headersSecret }}{{ $_ := set $tracing "headers_file" "/etc/gpufaas/tracing/headers" }}{{ end }}
{{- include "gpufaas.toml" $tracing }}
{{- end -}}

{{- define "gpufaas.gatewaySettings" -}}
log_format = {{ toJson .Values.logFormat }}

[scheduler]
secret_file = "/etc/gpufaas/cluster/secret"

[tracing]
{{- include "gpufaas.tracing" . }}

[gateway]
{{- $ours := dict "listen" "0.0.0.0:8080"
      "role" (ternary "provider" "gateway" (eq .Values.mode "provider"))
      "secrets_dir" "/etc/gpufaas/login"
      "state_dir" "/var/lib/gpufaas"
      "drain_s" .Values.gateway.drainSeconds
      "log_level" .Values.gateway.logLevel }}
{{- if include "gpufaas.runsFunctions" . }}
{{- $ours = merge $ours (include "gpufaas.functionSettings" . | fromJson) }}
{{- else }}
{{- $_ := set $ours "provider" "upstream" }}
{{- $_ := set $ours "upstream_url" (include "gpufaas.upstream" .) }}
{{- if .Values.openfaas.basicAuthSecret }}
{{- $_ := set $ours "upstream_user" .Values.openfaas.user }}
{{- $_ := set $ours "upstream_password_file" "/etc/gpufaas/login/basic-auth-password" }}
{{- end }}
{{- end }}
{{- $ours = merge $ours (include "gpufaas.queueSettings" . | fromJson) }}
{{- include "gpufaas.table" (dict "ours" $ours "further" .Values.gateway.settings "where" "gateway.settings") }}
{{- end -}}

{{/* How our gateway runs functions; those on GPUs go where a manager's socket is, if it is theirs. */}}
{{- define "gpufaas.functionSettings" -}}
{{- $functions := .Values.functions -}}
{{- $manager := .Values.gpuManager -}}
{{- $found := dict "provider" "kubernetes"
      "kubernetes_name" (include "gpufaas.fullname" .)
      "kubernetes_namespaces" (ternary list .Values.openfaas.functionNamespaces $functions.manageNamespaces)
      "kubernetes_pull" $functions.pullPolicy
      "kubernetes_pull_secrets" $functions.pullSecrets -}}
{{- if $manager.hostSocket.enabled -}}
{{- $pod := dict "nodeSelector" $manager.nodeSelector "tolerations" $manager.tolerations -}}
{{- $_ := set $found "kubernetes_gpu_pod" (toJson $pod) -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}
