{{/* Secrets that are made once and kept. */}}

{{/* dict root, secret, key, given, name: base64 of the value: given, or as it stands in the cluster, or a new one. */}}
{{- define "tandem.keptSecret" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .secret -}}
{{- if .given -}}
{{- .given | b64enc -}}
{{- else if and $found (hasKey (default dict $found.data) .key) -}}
{{- index $found.data .key -}}
{{- else -}}
{{- randAlphaNum 40 | b64enc -}}
{{- end -}}
{{- end -}}
