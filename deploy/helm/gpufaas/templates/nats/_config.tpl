{{- define "gpufaas.natsConfig" -}}
port: 4222
http_port: 8222
server_name: gpufaas
jetstream {
  store_dir: "/data"
  # A call is on the disk before it is accepted.
  sync_interval: always
}
authorization {
  user: gpufaas
  password: {{ b64dec (index (include "gpufaas.made" . | fromJson) "nats" "password") | quote }}
}
tls {
  cert_file: "/etc/nats/tls.crt"
  key_file: "/etc/nats/tls.key"
}
{{- end -}}
