{{/* The cluster's Redis: the chart's Valkey, or one that is there already. */}}

{{- define "tandem.redisUrl" -}}
{{- if .Values.valkey.enabled -}}
{{- printf "%s://%s@%s-valkey:%d/0" (ternary "rediss" "redis" (ne .Values.valkey.tls.secretName "")) .Values.valkey.username (include "tandem.fullname" .) (int .Values.valkey.port) -}}
{{- else -}}
{{- .Values.externalRedis.url -}}
{{- end -}}
{{- end -}}

{{/* The Secret of the password, as a secretKeyRef; empty where there is none. */}}
{{- define "tandem.redisPasswordRef" -}}
{{- if .Values.valkey.enabled -}}
name: {{ default (printf "%s-valkey" (include "tandem.fullname" .)) .Values.valkey.passwordSecret.name }}
key: {{ ternary .Values.valkey.passwordSecret.key "password" (ne .Values.valkey.passwordSecret.name "") }}
{{- else if .Values.externalRedis.passwordSecret.name -}}
name: {{ .Values.externalRedis.passwordSecret.name }}
key: {{ .Values.externalRedis.passwordSecret.key }}
{{- end -}}
{{- end -}}

{{/* name and key of the Secret with the CA of Redis's certificate; empty where it does not speak TLS. */}}
{{- define "tandem.redisCaRef" -}}
{{- if and .Values.valkey.enabled .Values.valkey.tls.secretName -}}
name: {{ .Values.valkey.tls.secretName }}
key: ca.crt
{{- else if and (not .Values.valkey.enabled) .Values.externalRedis.caSecret.name -}}
name: {{ .Values.externalRedis.caSecret.name }}
key: {{ .Values.externalRedis.caSecret.key }}
{{- end -}}
{{- end -}}

{{/* Environment of every process that asks Redis. */}}
{{- define "tandem.redisEnv" -}}
- name: TANDEM_REDIS_URL
  value: {{ include "tandem.redisUrl" . | quote }}
{{- with include "tandem.redisPasswordRef" . | fromYaml }}
- name: TANDEM_REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
{{- end }}
{{- with include "tandem.redisCaRef" . }}
- name: TANDEM_REDIS_CA_FILE
  value: /etc/tandem/redis-ca/ca.crt
{{- end }}
{{- end -}}
