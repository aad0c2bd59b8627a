{{/*
What is made once and kept over upgrades: random secrets and certificates, as base64.

It is looked up in the cluster first. Within one rendering all templates see the same values, for
they are kept in .Values. `helm template` cannot look anything up and makes new ones every time:
name existing secrets where charts are rendered without a cluster.
*/}}

{{- define "gpufaas.made" -}}
{{- if not (hasKey .Values "made") -}}
{{- $made := dict -}}
{{- $_ := set $made "cluster" (include "gpufaas.kept" (dict "root" . "part" "cluster" "new" (dict "secret" (randAlphaNum 48 | b64enc))) | fromJson) -}}
{{- $login := dict "basic-auth-user" ("admin" | b64enc) "basic-auth-password" (randAlphaNum 24 | b64enc) -}}
{{- $_ := set $made "login" (include "gpufaas.kept" (dict "root" . "part" "login" "new" $login) | fromJson) -}}
{{- if eq .Values.queue.kind "nats" -}}
{{- $_ := set $made "nats" (include "gpufaas.keptOr" (dict "root" . "part" "nats" "make" "gpufaas.newNats") | fromJson) -}}
{{- end -}}
{{- if and .Values.gpuManager.tls.enabled (not .Values.gpuManager.tls.existingSecret) -}}
{{- $_ := set $made "node" (include "gpufaas.keptOr" (dict "root" . "part" "node" "make" "gpufaas.newNode") | fromJson) -}}
{{- end -}}
{{- if .Values.etcd.enabled -}}
{{- $_ := set $made "etcd" (include "gpufaas.keptOr" (dict "root" . "part" "etcd" "make" "gpufaas.newEtcd") | fromJson) -}}
{{- end -}}
{{- $_ := set .Values "made" $made -}}
{{- end -}}
{{- toJson .Values.made -}}
{{- end -}}

{{/* The data of a part's secret as it is in the cluster, else `new`. */}}
{{- define "gpufaas.kept" -}}
{{- $there := lookup "v1" "Secret" .root.Release.Namespace (include "gpufaas.part" .) -}}
{{- toJson (ternary (get (default dict $there) "data") .new (not (empty $there))) -}}
{{- end -}}

{{/* The same, where making a new one takes long. */}}
{{- define "gpufaas.keptOr" -}}
{{- $there := lookup "v1" "Secret" .root.Release.Namespace (include "gpufaas.part" .) -}}
{{- if $there -}}
{{- toJson $there.data -}}
{{- else -}}
{{- include .make .root -}}
{{- end -}}
{{- end -}}

{{/* One certificate for all GPU managers: functions know it by its fingerprint. */}}
{{- define "gpufaas.newNode" -}}
{{- $host := include "gpufaas.host" (dict "root" . "part" "gpu-manager") -}}
{{- $pair := genSelfSignedCert $host nil (list $host) (int .Values.certificates.days) -}}
{{- toJson (dict "tls.crt" (b64enc $pair.Cert) "tls.key" (b64enc $pair.Key)) -}}
{{- end -}}

{{/* A password for the gateway, and a certificate by which it knows the server. */}}
{{- define "gpufaas.newNats" -}}
{{- $host := include "gpufaas.host" (dict "root" . "part" "nats") -}}
{{- $days := int .Values.certificates.days -}}
{{- $authority := genCA (include "gpufaas.part" (dict "root" . "part" "nats")) $days -}}
{{- $server := genSignedCert $host (list "127.0.0.1") (list $host "localhost") $days $authority -}}
{{- toJson (dict
      "password" (randAlphaNum 32 | b64enc) "ca.crt" (b64enc $authority.Cert)
      "tls.crt" (b64enc $server.Cert) "tls.key" (b64enc $server.Key)) -}}
{{- end -}}

{{/*
An authority that nobody keeps the key of, one certificate for the members, one for schedulers.
The members' one names each of them: etcd compares that with who comes. The other names nobody.
*/}}
{{- define "gpufaas.newEtcd" -}}
{{- $service := include "gpufaas.host" (dict "root" . "part" "etcd") -}}
{{- $days := int .Values.certificates.days -}}
{{- $authority := genCA (include "gpufaas.part" (dict "root" . "part" "etcd")) $days -}}
{{- $names := concat (splitList "," (include "gpufaas.etcdHosts" .)) (list $service "localhost") -}}
{{- $member := genSignedCert $service (list "127.0.0.1") $names $days $authority -}}
{{- $client := genSignedCert "gpufaas-scheduler" nil nil $days $authority -}}
{{- toJson (dict
      "ca.crt" (b64enc $authority.Cert)
      "member.crt" (b64enc $member.Cert) "member.key" (b64enc $member.Key)
      "client.crt" (b64enc $client.Cert) "client.key" (b64enc $client.Key)) -}}
{{- end -}}
