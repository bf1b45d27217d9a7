{{/* The head: Ray's head and the controller. */}}

{{/* Where nodes join: the chart's Service, or the operator's. */}}
{{- define "tandem.headService" -}}
{{- include "tandem.fullname" . }}-{{ ternary "ray-head-svc" "head" .Values.kuberay.enabled -}}
{{- end -}}

{{- define "tandem.headAddress" -}}
{{- include "tandem.headService" . }}:{{ int .Values.head.port -}}
{{- end -}}

{{/* What Ray takes only from the environment; without the operator `tandem start` sets it. */}}
{{- define "tandem.rayEnv" -}}
{{- if .Values.kuberay.enabled }}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef:
      {{- include "tandem.rayTokenRef" . | nindent 6 }}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
- {name: RAY_worker_niceness, value: "0"}
- {name: SPT_NOENV, value: "1"}
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "0"}  # preStop has drained: Ray would wait for workers that stay
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: "600"}
- {name: RAY_health_check_initial_delay_ms, value: "1000"}
- {name: RAY_health_check_period_ms, value: "1000"}
- {name: RAY_health_check_timeout_ms, value: "5000"}
{{- with include "tandem.redisCaRef" . }}
- {name: RAY_REDIS_CA_CERT, value: /etc/tandem/redis-ca/ca.crt}
{{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.rayTokenRef" -}}
{{- $given := .Values.kuberay.authTokenSecret -}}
name: {{ default (printf "%s-ray-token" (include "tandem.fullname" .)) $given.name }}
key: {{ ternary $given.key "token" (ne $given.name "") }}
{{- end -}}

{{/* dict root, containers (YAML): metadata and spec of the head's pod. */}}
{{- define "tandem.headPod" -}}
{{- $root := .root -}}
{{- $head := $root.Values.head -}}
metadata:
  {{- include "tandem.podMetadata" (dict "root" $root "component" "head" "section" $head "checksum" (include "tandem.nodeChecksum" $root)) | nindent 2 }}
spec:
  serviceAccountName: {{ include "tandem.serviceAccountName" (dict "root" $root "component" "head") }}
  automountServiceAccountToken: {{ eq $root.Values.autoscaling.mode "ray" }}
  {{- if $root.Values.kuberay.enabled }}
  shareProcessNamespace: true  # the controller must see Ray's processes
  {{- end }}
  terminationGracePeriodSeconds: {{ include "tandem.grace" (dict "needed" (include "tandem.workerGrace" $root) "given" $head.terminationGracePeriodSeconds "name" "head.terminationGracePeriodSeconds") }}
  {{- include "tandem.podScheduling" (dict "root" $root "section" $head) | nindent 2 }}
  {{- with $head.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "tandem.podSecurity" (dict) | nindent 4 }}
  {{- with include "tandem.extraInit" $head | fromYamlArray }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    {{- .containers | nindent 4 }}
  volumes:
    {{- include "tandem.commonVolumes" (dict "root" $root "tmpSize" $head.resources.ephemeralStorage) | nindent 4 }}
    - name: shared-memory
      emptyDir:
        medium: Memory
        sizeLimit: 256Mi
    - name: sizes
      configMap:
        name: {{ include "tandem.fullname" $root }}-sizes
    {{- with $head.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* dict root, sharedMemory (whether Ray runs in it): mounts of a container of the head's pod. */}}
{{- define "tandem.headMounts" -}}
{{ include "tandem.commonMounts" .root }}
- {name: shared-memory, mountPath: /dev/shm}
- {name: sizes, mountPath: /etc/tandem/sizes, readOnly: true}
{{- with .root.Values.head.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tandem.headEnv" -}}
{{ include "tandem.podIpEnv" . }}
{{ include "tandem.redisEnv" . }}
{{ include "tandem.clusterKeyEnv" . }}
{{- include "tandem.rayEnv" . }}
{{- with .Values.head.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Probes of a container that listens on the port of the given name. */}}
{{- define "tandem.tcpProbes" -}}
startupProbe:
  tcpSocket: {port: {{ . }}}
  periodSeconds: 2
  failureThreshold: 90
livenessProbe:
  tcpSocket: {port: {{ . }}}
  periodSeconds: 10
  failureThreshold: 6
readinessProbe:
  tcpSocket: {port: {{ . }}}
  periodSeconds: 5
  failureThreshold: 2
{{- end -}}
