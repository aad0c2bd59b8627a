{{/* `gpufaas gpu-manager` as this node runs it. */}}
{{- define "gpufaas.managerArguments" -}}
{{- $manager := .Values.gpuManager -}}
{{- $scheme := ternary "tls" "tcp" $manager.tls.enabled -}}
- gpu-manager
- --node=$(NODE_NAME)
- --scheduler={{ include "gpufaas.schedulers" . }}
- --secret-file=/etc/gpufaas/cluster/secret
- --listen=unix:/run/gpufaas/node.sock
- --listen={{ $scheme }}:0.0.0.0:{{ $manager.port }}
{{- if $manager.hostSocket.enabled }}
- --advertise=unix:{{ $manager.hostSocket.path }}/node.sock
{{- end }}
- --advertise={{ $scheme }}:{{ ternary "$(HOST_IP)" "$(POD_IP)" $manager.hostPort }}:{{ $manager.port }}
{{- if $manager.tls.enabled }}
- --certificate=/etc/gpufaas/node/tls.crt
- --key=/etc/gpufaas/node/tls.key
{{- end }}
- --metrics=0.0.0.0:7701
- --devices={{ $manager.devices }}
{{- with $manager.gpuMemory }}
- --gpu-memory={{ . }}B
{{- end }}
- --store-memory={{ $manager.storeMemory }}B
- --host-eviction={{ $manager.hostEviction }}
- --gpu-overlap={{ $manager.gpuOverlap }}
- --runtime={{ $manager.runtime }}
{{- if $manager.spill.enabled }}
- --spill=/var/lib/gpufaas/spill
- --spill-size={{ $manager.spill.size }}B
{{- end }}
- --log-level={{ $manager.logLevel }}
- --log-format={{ .Values.logFormat }}
{{- range $manager.extraArgs }}
- {{ . }}
{{- end }}
{{- end -}}
