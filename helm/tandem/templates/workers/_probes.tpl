{{/* Probes of a worker's pod. */}}

{{/* dict root, name, shape. A pod that is there for a worker is ready when the router has admitted that worker: else a
     rollout would take the next one away too early. Where pods may stand empty, ready means that none is half started. */}}
{{- define "tandem.workerProbes" -}}
{{- $always := and (ne .name "node") (has .root.Values.autoscaling.mode (list "none" "keda")) -}}
startupProbe:
  {{- include "tandem.probe" "live" | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 15
  failureThreshold: {{ include "tandem.ceil" (dict "a" .shape.startupSeconds "b" 5) }}
livenessProbe:
  {{- include "tandem.probe" "live" | nindent 2 }}
  periodSeconds: 20
  timeoutSeconds: 15
  failureThreshold: 3
readinessProbe:
  {{- include "tandem.probe" (ternary "router-admitted" "ready" $always) | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 15
  failureThreshold: 2
{{- end -}}

{{- define "tandem.probe" -}}
exec:
  command: [sh, -c, 'exec tandem probe --config /etc/tandem/config.yaml --redis-url "$TANDEM_REDIS_URL" --node-ip "$POD_IP" --for {{ . }}']
{{- end -}}
