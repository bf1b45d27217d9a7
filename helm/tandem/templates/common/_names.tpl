{{/* Names and labels. Every helper takes the root context unless it says otherwise. */}}

{{- define "tandem.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Room is left for "-prefill-12" and the hash that Kubernetes appends. */}}
{{- define "tandem.fullname" -}}
{{- $name := include "tandem.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* dict root, component */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: {{ include "tandem.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{/* dict root, component */}}
{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: tandem
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name (.root.Chart.Version | replace "+" "_") }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* dict root, component, name (without the release's), annotations (optional): the metadata of an object. */}}
{{- define "tandem.metadata" -}}
name: {{ include "tandem.fullname" .root }}{{ with .name }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "tandem.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (deepCopy (default dict .annotations)) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* dict repository, tag, digest; root for the default tag (optional). */}}
{{- define "tandem.imageName" -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag }}
{{- end -}}
{{- end -}}

{{- define "tandem.image" -}}
{{- $image := .Values.image -}}
{{- include "tandem.imageName" (dict "repository" $image.repository "digest" $image.digest "tag" (default .Chart.AppVersion $image.tag)) -}}
{{- end -}}

{{/* dict root, component */}}
{{- define "tandem.serviceAccountName" -}}
{{- $accounts := .root.Values.serviceAccounts -}}
{{- if $accounts.create -}}
{{- include "tandem.fullname" .root }}-{{ .component }}
{{- else -}}
{{- default "default" $accounts.name -}}
{{- end -}}
{{- end -}}
