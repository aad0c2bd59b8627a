{{- define "gpufaas.schedulerSettings" -}}
log_format = {{ toJson .Values.logFormat }}
policy = {{ toJson .Values.policy.name }}
eviction = {{ toJson .Values.policy.eviction }}

[parameters]
{{- include "gpufaas.toml" .Values.policy.parameters }}

[scheduler]
{{- $ours := dict "listen" "0.0.0.0:7700" "secret_file" "/etc/gpufaas/cluster/secret" "log_level" .Values.scheduler.logLevel }}
{{- include "gpufaas.table" (dict "ours" $ours "further" .Values.scheduler.settings "where" "scheduler.settings") }}

[tracing]
{{- include "gpufaas.tracing" . }}

[etcd]
{{- include "gpufaas.toml" (include "gpufaas.etcdSettings" . | fromJson) }}
{{- end -}}

{{- define "gpufaas.etcdSettings" -}}
{{- if .Values.etcd.enabled -}}
{{- $urls := list -}}
{{- range splitList "," (include "gpufaas.etcdHosts" .) }}{{ $urls = append $urls (printf "https://%s:2379" .) }}{{ end -}}
{{- toJson (dict "endpoints" $urls
      "ca" "/etc/gpufaas/etcd/ca.crt" "cert" "/etc/gpufaas/etcd/client.crt" "key" "/etc/gpufaas/etcd/client.key") -}}
{{- else -}}
{{- $there := .Values.externalEtcd -}}
{{- if not $there.endpoints }}{{ fail "etcd.enabled is false: name externalEtcd.endpoints" }}{{ end -}}
{{- $found := dict "endpoints" $there.endpoints "prefix" $there.prefix -}}
{{- if $there.tlsSecret }}{{ $_ := set $found "ca" "/etc/gpufaas/etcd/ca.crt" }}{{ end -}}
{{- if $there.clientCertificate -}}
{{- if not $there.tlsSecret }}{{ fail "externalEtcd.clientCertificate: name externalEtcd.tlsSecret" }}{{ end -}}
{{- $_ := set $found "cert" "/etc/gpufaas/etcd/tls.crt" -}}
{{- $_ := set $found "key" "/etc/gpufaas/etcd/tls.key" -}}
{{- end -}}
{{- if $there.user -}}
{{- if not $there.passwordSecret }}{{ fail "externalEtcd.user: name externalEtcd.passwordSecret" }}{{ end -}}
{{- $_ := set $found "user" $there.user -}}
{{- $_ := set $found "password_file" "/etc/gpufaas/etcd-password/password" -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}
{{- end -}}
