{{/* What all pods share: security, scheduling, resources, environment. */}}

{{/* dict root, runAsRoot (optional) */}}
{{- define "tandem.podSecurity" -}}
runAsNonRoot: {{ not .runAsRoot }}
runAsUser: {{ ternary 0 10001 (default false .runAsRoot) }}
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* dict capabilities (a list to add, optional) */}}
{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with .capabilities }}
  add: {{ toJson . }}
  {{- end }}
{{- end -}}

{{/* dict root, section (values with scheduling keys): what stands in every pod's spec. */}}
{{- define "tandem.podScheduling" -}}
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .section.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .section.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .section.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .section.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* dict root, component, section; checksum, annotations and labels are optional: metadata of a pod. */}}
{{- define "tandem.podMetadata" -}}
labels:
  {{- include "tandem.selector" . | nindent 2 }}
  {{- with merge (deepCopy (default dict .labels)) .section.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $annotations := deepCopy (default dict .section.podAnnotations) -}}
{{- with .checksum }}{{ $_ := set $annotations "checksum/config" . }}{{ end -}}
{{- with .annotations }}{{ $annotations = merge $annotations . }}{{ end -}}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A section's `resources`, of processes without GPUs: memory is request and limit. */}}
{{- define "tandem.resources" -}}
requests:
  cpu: {{ .cpu | quote }}
  memory: {{ .memory }}
  ephemeral-storage: {{ .ephemeralStorage }}
limits:
  {{- with .cpuLimit }}
  cpu: {{ . | quote }}
  {{- end }}
  memory: {{ .memory }}
  ephemeral-storage: {{ .ephemeralStorage }}
{{- end -}}

{{- define "tandem.podIpEnv" -}}
- name: POD_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
{{- end -}}

{{/* A tokenizer that a GGUF file holds is prepared into a cache; the image has the default model's. */}}
{{- define "tandem.modelEnv" -}}
{{- if hasSuffix ".gguf" .Values.model.source }}
- name: TANDEM_CACHE
  value: /tmp/tandem-cache
{{- end }}
{{- end -}}

{{- define "tandem.commonMounts" -}}
- {name: config, mountPath: /etc/tandem/config.yaml, subPath: config.yaml, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- with include "tandem.redisCaRef" . }}
- {name: redis-ca, mountPath: /etc/tandem/redis-ca, readOnly: true}
{{- end }}
{{- end -}}

{{/* dict root, tmpSize */}}
{{- define "tandem.commonVolumes" -}}
- name: config
  configMap:
    name: {{ include "tandem.fullname" .root }}-config
- name: tmp
  emptyDir:
    sizeLimit: {{ .tmpSize }}
{{- with include "tandem.redisCaRef" .root | fromYaml }}
- name: redis-ca
  secret:
    secretName: {{ .name }}
    items:
      - {key: {{ .key }}, path: ca.crt}
{{- end }}
{{- end -}}
