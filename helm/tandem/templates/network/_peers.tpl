{{/* Peers of network policies. */}}

{{/* dict root, components (a list): these pods of the release. */}}
{{- define "tandem.peer" -}}
podSelector:
  matchLabels:
    {{- include "tandem.selector" (dict "root" .root) | nindent 4 }}
  matchExpressions:
    - {key: app.kubernetes.io/component, operator: In, values: {{ toJson .components }}}
{{- end -}}

{{- define "tandem.dnsEgress" -}}
- to:
    - namespaceSelector: {}
      podSelector:
        matchLabels: {k8s-app: kube-dns}
  ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end -}}

{{/* Where Redis is: the chart's, or whom externalRedis.networkPolicyPeers names (all, if nobody). */}}
{{- define "tandem.redisEgress" -}}
{{- if .Values.valkey.enabled -}}
- to:
    - {{ include "tandem.peer" (dict "root" . "components" (list "valkey")) | nindent 6 | trim }}
  ports:
    - {protocol: TCP, port: {{ .Values.valkey.port }}}
{{- else -}}
{{- $url := .Values.externalRedis.url | urlParse -}}
- ports:
    - {protocol: TCP, port: {{ regexFind "[0-9]+$" $url.host | default "6379" }}}
  {{- with .Values.externalRedis.networkPolicyPeers }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* dict root, ports: scrapes from where networkPolicy.monitoring says. */}}
{{- define "tandem.monitoringIngress" -}}
{{- with .root.Values.networkPolicy.monitoring }}
- from:
    {{- toYaml . | nindent 4 }}
  ports:
    {{- range $.ports }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end }}
{{- end -}}
