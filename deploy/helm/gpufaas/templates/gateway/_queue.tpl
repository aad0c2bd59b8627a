{{/* Where calls through /async-function are kept, and how the gateway is let in there. */}}

{{- define "gpufaas.queueSettings" -}}
{{- $there := .Values.queue.external -}}
{{- $found := dict -}}
{{- if eq .Values.queue.kind "nats" -}}
{{- $_ := set $found "queue" (printf "tls://%s:4222" (include "gpufaas.host" (dict "root" . "part" "nats"))) -}}
{{- $_ := set $found "queue_user" "gpufaas" -}}
{{- else if eq .Values.queue.kind "external" -}}
{{- if not $there.url }}{{ fail "queue.kind is external: name queue.external.url" }}{{ end -}}
{{- $_ := set $found "queue" $there.url -}}
{{- $_ := set $found "queue_user" $there.user -}}
{{- $_ := set $found "queue_replicas" $there.replicas -}}
{{- end -}}
{{- if include "gpufaas.queueSecret" . }}{{ $_ := set $found "queue_password_file" "/etc/gpufaas/queue/password" }}{{ end -}}
{{- if include "gpufaas.queueAuthority" . }}{{ $_ := set $found "queue_ca_file" "/etc/gpufaas/queue-ca/ca.crt" }}{{ end -}}
{{- toJson $found -}}
{{- end -}}

{{- define "gpufaas.queueSecret" -}}
{{- if eq .Values.queue.kind "nats" -}}
{{- include "gpufaas.part" (dict "root" . "part" "nats") -}}
{{- else if eq .Values.queue.kind "external" -}}
{{- .Values.queue.external.existingSecret -}}
{{- end -}}
{{- end -}}

{{- define "gpufaas.queueAuthority" -}}
{{- if eq .Values.queue.kind "nats" -}}
{{- include "gpufaas.part" (dict "root" . "part" "nats") -}}
{{- else if eq .Values.queue.kind "external" -}}
{{- .Values.queue.external.caSecret -}}
{{- end -}}
{{- end -}}

{{- define "gpufaas.queueMounts" -}}
{{- if include "gpufaas.queueSecret" . }}
- {name: queue, mountPath: /etc/gpufaas/queue, readOnly: true}
{{- end }}
{{- if include "gpufaas.queueAuthority" . }}
- {name: queue-ca, mountPath: /etc/gpufaas/queue-ca, readOnly: true}
{{- end }}
{{- end -}}

{{- define "gpufaas.queueVolumes" -}}
{{- with include "gpufaas.queueSecret" . }}
- name: queue
  secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: password, path: password}]}
{{- end }}
{{- with include "gpufaas.queueAuthority" . }}
- name: queue-ca
  secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- end -}}
