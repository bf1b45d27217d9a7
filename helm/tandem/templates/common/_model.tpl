{{/* Where the model's files come from. */}}

{{- define "tandem.modelMounts" -}}
{{- if ne .Values.model.volume.type "image" }}
- name: model
  mountPath: {{ .Values.model.volume.mountPath }}
  readOnly: true
  {{- with .Values.model.volume.subPath }}
  subPath: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.modelVolumes" -}}
{{- $volume := .Values.model.volume -}}
{{- if eq $volume.type "pvc" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ $volume.claimName }}
    readOnly: true
{{- else if eq $volume.type "hostPath" }}
- name: model
  hostPath:
    path: {{ $volume.path }}
    type: Directory
{{- else if has $volume.type (list "download" "initContainer") }}
- name: model
  emptyDir:
    sizeLimit: {{ $volume.sizeLimit }}
{{- end }}
{{- end -}}

{{/* The containers that fetch it, before the others start. */}}
{{- define "tandem.modelInit" -}}
{{- $volume := .Values.model.volume -}}
{{- if eq $volume.type "download" }}
- name: download-model
  image: {{ include "tandem.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [hf, download, {{ $volume.download.repository | quote }}, --revision, {{ $volume.download.revision | quote }}, --local-dir, {{ $volume.mountPath | quote }}]
  env:
    - {name: HF_HOME, value: /tmp/huggingface}
    {{- with $volume.download.tokenSecret }}
    {{- if .name }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
    {{- end }}
    {{- end }}
  resources:
    requests: {cpu: 500m, memory: 512Mi}
    limits: {memory: 2Gi}
  securityContext:
    {{- include "tandem.containerSecurity" (dict) | nindent 4 }}
  volumeMounts:
    - {name: model, mountPath: {{ $volume.mountPath }}}
    - {name: tmp, mountPath: /tmp}
{{- else if eq $volume.type "initContainer" }}
- {{ mergeOverwrite (dict "name" "fetch-model" "securityContext" (include "tandem.containerSecurity" (dict) | fromYaml) "volumeMounts" (list (dict "name" "model" "mountPath" $volume.mountPath) (dict "name" "tmp" "mountPath" "/tmp"))) $volume.initContainer | toYaml | nindent 2 | trim }}
{{- end }}
{{- end -}}
