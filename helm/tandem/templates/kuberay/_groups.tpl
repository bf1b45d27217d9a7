{{/* What the operator is told of Ray. */}}

{{/* dict root, name: rayStartParams of a worker group. Ray counts slots only: processors and GPUs are the workers' own. */}}
{{- define "tandem.rayStartParams" -}}
{{- $slots := include "tandem.slots" . | fromYaml -}}
{{- $resources := dict -}}
{{- range $role, $number := $slots -}}
{{- if $number }}{{ $_ := set $resources (printf "tandem_%s" $role) (int $number) }}{{ end -}}
{{- end -}}
num-cpus: "1"
num-gpus: "0"
object-store-memory: "83886080"
node-ip-address: $POD_IP
resources: {{ toJson $resources | quote | squote }}
{{ include "tandem.rayAgentPorts" . }}
{{- end -}}

{{/* Where ports are given, Ray does not end a node whose agents take longer than 15 s to start and to tell theirs. */}}
{{- define "tandem.rayAgentPorts" -}}
dashboard-agent-grpc-port: "6381"
runtime-env-agent-port: "6382"
{{- end -}}

{{/* One container of the head's pod is Ray, the other the controller, which is its driver. */}}
{{- define "tandem.rayHeadContainers" -}}
- name: ray-head
  image: {{ include "tandem.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  env:
    {{- include "tandem.headEnv" . | nindent 4 }}
  ports:
    - {name: gcs-server, containerPort: {{ .Values.head.port }}}
  resources:
    {{- include "tandem.resources" .Values.head.resources | nindent 4 }}
  securityContext:
    {{- include "tandem.containerSecurity" (dict) | nindent 4 }}
  {{- include "tandem.tcpProbes" "gcs-server" | nindent 2 }}
  volumeMounts:
    {{- include "tandem.headMounts" (dict "root" .) | nindent 4 }}
- name: controller
  image: {{ include "tandem.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [tandem, controller]
  args:
    - --config
    - /etc/tandem/config.yaml
    - --redis-url
    - $(TANDEM_REDIS_URL)
    - --ray-address
    - $(POD_IP):{{ .Values.head.port }}
    - --sizes-file
    - /etc/tandem/sizes/sizes.yaml
  env:
    {{- include "tandem.headEnv" . | nindent 4 }}
  ports:
    - {name: tandem-metrics, containerPort: {{ .Values.head.metricsPort }}}
  resources:
    {{- include "tandem.resources" .Values.head.controllerResources | nindent 4 }}
  securityContext:
    {{- include "tandem.containerSecurity" (dict) | nindent 4 }}
  {{- include "tandem.tcpProbes" "tandem-metrics" | nindent 2 }}
  volumeMounts:
    {{- include "tandem.headMounts" (dict "root" .) | nindent 4 }}
{{- end -}}

{{- define "tandem.autoscalerOptions" -}}
{{- $ray := .Values.autoscaling.ray -}}
version: v2
idleTimeoutSeconds: {{ $ray.idleTimeoutSeconds }}
upscalingMode: {{ $ray.upscalingMode }}
{{- with $ray.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
env:
  {{- include "tandem.rayEnv" . | trim | nindent 2 }}
securityContext:
  {{- include "tandem.containerSecurity" (dict) | nindent 2 }}
{{- end -}}

{{/* Ray's own state, in the cluster's Redis: a lost head is started again and finds nodes and workers. */}}
{{- define "tandem.gcsFaultTolerance" -}}
{{- $url := include "tandem.redisUrl" . | urlParse -}}
redisAddress: {{ ternary "rediss://" "" (eq $url.scheme "rediss") }}{{ $url.host }}
externalStorageNamespace: {{ include "tandem.clusterName" . }}
{{- with $url.userinfo }}
redisUsername:
  value: {{ splitList ":" . | first | quote }}
{{- end }}
{{- with include "tandem.redisPasswordRef" . | fromYaml }}
redisPassword:
  valueFrom:
    secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
{{- end }}
{{- end -}}
