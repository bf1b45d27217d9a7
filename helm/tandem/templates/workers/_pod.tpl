{{/* The pod of a worker node, the same under the operator and without it but for who starts Ray. */}}

{{/* dict root, name: metadata and spec. */}}
{{- define "tandem.workerPod" -}}
{{- $root := .root -}}
{{- $shape := include "tandem.shape" . | fromYaml -}}
{{- $selector := include "tandem.workerNodeSelector" $shape | fromYaml -}}
{{- $section := mergeOverwrite (deepCopy $shape) (dict "nodeSelector" $selector) -}}
{{- $annotations := dict -}}
{{- if and $root.Values.rdma.enabled $root.Values.rdma.networks }}{{ $_ := set $annotations "k8s.v1.cni.cncf.io/networks" $root.Values.rdma.networks }}{{ end -}}
metadata:
  {{- include "tandem.podMetadata" (dict "root" $root "component" .name "section" $shape "checksum" (include "tandem.nodeChecksum" $root) "annotations" $annotations "labels" (dict "tandem.dev/takes" "workers")) | nindent 2 }}
spec:
  serviceAccountName: {{ include "tandem.serviceAccountName" (dict "root" $root "component" "worker") }}
  automountServiceAccountToken: false
  {{- with $shape.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ include "tandem.grace" (dict "needed" (include "tandem.workerGrace" $root) "given" $shape.terminationGracePeriodSeconds "name" (printf "%s.terminationGracePeriodSeconds" .name)) }}
  {{- if $root.Values.kuberay.enabled }}
  restartPolicy: {{ ternary "Never" "Always" (eq $root.Values.autoscaling.mode "ray") }}
  {{- end }}
  {{- include "tandem.podScheduling" (dict "root" $root "section" $section) | nindent 2 }}
  {{- with include "tandem.workerAffinity" (dict "root" $root "name" .name "shape" $shape) | fromYaml }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "tandem.podSecurity" (dict "runAsRoot" (and $root.Values.rdma.enabled $root.Values.rdma.runAsRoot)) | nindent 4 }}
  {{- with printf "%s%s" (include "tandem.modelInit" $root) (include "tandem.extraInit" $shape) | fromYamlArray }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - {{ include "tandem.workerContainer" (dict "root" $root "name" .name "shape" $shape) | nindent 6 | trim }}
    {{- if $root.Values.kuberay.enabled }}
    - {{ include "tandem.nodeMetricsContainer" (dict "root" $root "shape" $shape) | nindent 6 | trim }}
    {{- end }}
  {{- if eq $root.Values.topology.mode "mnnvl" }}
  resourceClaims:
    - name: compute-domain
      resourceClaimTemplateName: {{ include "tandem.channelClaim" $root }}
  {{- end }}
  volumes:
    {{- include "tandem.workerVolumes" (dict "root" $root "shape" $shape) | nindent 4 }}
{{- end -}}

{{- define "tandem.extraInit" -}}
{{- with .initContainers }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The ResourceClaimTemplate that the ComputeDomain makes. */}}
{{- define "tandem.channelClaim" -}}
{{- default (printf "%s-channel" (include "tandem.fullname" .)) .Values.topology.computeDomain.channelClaim -}}
{{- end -}}

{{/* dict root, name, shape */}}
{{- define "tandem.workerContainer" -}}
{{- $root := .root -}}
name: {{ ternary "ray-worker" "node" $root.Values.kuberay.enabled }}
image: {{ include "tandem.image" $root }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
{{- if not $root.Values.kuberay.enabled }}
command: [tandem, start]
args:
  {{- include "tandem.workerArguments" . | nindent 2 }}
{{- end }}
env:
  {{- include "tandem.podIpEnv" $root | nindent 2 }}
  - name: NODE_NAME
    valueFrom:
      fieldRef: {fieldPath: spec.nodeName}
  {{- include "tandem.redisEnv" $root | nindent 2 }}
  {{- include "tandem.clusterKeyEnv" $root | nindent 2 }}
  {{- with include "tandem.modelEnv" $root }}{{- . | trim | nindent 2 }}{{- end }}
  {{- with include "tandem.rayEnv" $root }}{{- . | trim | nindent 2 }}{{- end }}
  {{- if $root.Values.rdma.enabled }}
  - {name: UCX_TLS, value: {{ $root.Values.rdma.ucxTls | quote }}}
  - {name: UCX_NET_DEVICES, value: {{ $root.Values.rdma.ucxNetDevices | quote }}}
  {{- end }}
  {{- with .shape.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if not $root.Values.kuberay.enabled }}
ports:
  - {name: tandem-metrics, containerPort: {{ .shape.metricsPort }}}
{{- end }}
resources:
  {{- include "tandem.workerResources" . | nindent 2 }}
securityContext:
  {{- include "tandem.containerSecurity" (dict "capabilities" (ternary (list "IPC_LOCK") (list) $root.Values.rdma.enabled)) | nindent 2 }}
{{- include "tandem.workerProbes" . | nindent 0 }}
{{- if $root.Values.kuberay.enabled }}
lifecycle:
  preStop:
    exec:
      command: [sh, -c, 'exec tandem drain-node --config /etc/tandem/config.yaml --redis-url "$TANDEM_REDIS_URL" --node-ip "$POD_IP" --timeout {{ include "tandem.leaveSeconds" $root }}']
{{- end }}
volumeMounts:
  {{- include "tandem.workerMounts" (dict "root" $root "shape" .shape) | nindent 2 }}
{{- end -}}

{{/* dict root, shape: beside Ray under the operator, where no process of ours runs the node. */}}
{{- define "tandem.nodeMetricsContainer" -}}
name: node-metrics
image: {{ include "tandem.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command: [tandem, node-metrics]
args:
  - --config
  - /etc/tandem/config.yaml
  - --redis-url
  - $(TANDEM_REDIS_URL)
  - --node-ip
  - $(POD_IP)
  - --metrics-port
  - {{ .shape.metricsPort | quote }}
env:
  {{- include "tandem.podIpEnv" .root | nindent 2 }}
  {{- include "tandem.redisEnv" .root | nindent 2 }}
ports:
  - {name: tandem-metrics, containerPort: {{ .shape.metricsPort }}}
resources:
  {{- include "tandem.resources" (dict "cpu" "100m" "memory" "512Mi" "cpuLimit" "" "ephemeralStorage" "256Mi") | nindent 2 }}
securityContext:
  {{- include "tandem.containerSecurity" (dict) | nindent 2 }}
volumeMounts:
  {{- include "tandem.commonMounts" .root | nindent 2 }}
{{- end -}}

{{/* dict root, name, shape: of `tandem start`, without the operator. */}}
{{- define "tandem.workerArguments" -}}
{{- $slots := include "tandem.slots" (dict "root" .root "name" .name) | fromYaml -}}
- --address
- {{ include "tandem.headAddress" .root }}
- --config
- /etc/tandem/config.yaml
- --redis-url
- $(TANDEM_REDIS_URL)
- --node-ip
- $(POD_IP)
- --prefill-slots
- {{ $slots.prefill | quote }}
- --decode-slots
- {{ $slots.decode | quote }}
- --metrics-port
- {{ .shape.metricsPort | quote }}
- --label
- node=$(NODE_NAME)
{{- range $key, $value := include "tandem.rayLabels" (dict "root" .root "shape" .shape) | fromYaml }}
- --label
- {{ printf "%s=%s" $key $value | quote }}
{{- end }}
{{- end -}}
