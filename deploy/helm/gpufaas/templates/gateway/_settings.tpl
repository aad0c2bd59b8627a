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
      "provider" "upstream"
      "upstream_url" (include "gpufaas.upstream" .)
      "secrets_dir" "/etc/gpufaas/login"
      "state_dir" "/var/lib/gpufaas"
      "drain_s" .Values.gateway.drainSeconds
      "log_level" .Values.gateway.logLevel }}
{{- if .Values.openfaas.basicAuthSecret }}
{{- $_ := set $ours "upstream_user" .Values.openfaas.user }}
{{- $_ := set $ours "upstream_password_file" "/etc/gpufaas/login/basic-auth-password" }}
{{- end }}
{{- $ours = merge $ours (include "gpufaas.queueSettings" . | fromJson) }}
{{- include "gpufaas.table" (dict "ours" $ours "further" .Values.gateway.settings "where" "gateway.settings") }}
{{- end -}}
