{{/* Secrets that are made once and kept. */}}

{{/* dict root, secret, key, given, name: base64 of the value: given, or as it stands in the cluster, or a new one. */}}
{{- define "tandem.keptSecret" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .secret -}}
{{- if .given -}}
{{- .given | b64enc -}}
{{- else if and $found (hasKey (default dict $found.data) .key) -}}
{{- index $found.data .key -}}
{{- else -}}
{{- randAlphaNum 64 | sha256sum | b64enc -}}
{{- end -}}
{{- end -}}

{{/* The key by which routers, heads and workers know one another. */}}
{{- define "tandem.clusterKeyEnv" -}}
{{- $given := .Values.auth.clusterKeySecret -}}
- name: TANDEM_CLUSTER_KEY
  valueFrom:
    secretKeyRef:
      name: {{ default (printf "%s-cluster-key" (include "tandem.fullname" .)) $given.name }}
      key: {{ ternary $given.key "key" (ne $given.name "") }}
{{- end -}}
