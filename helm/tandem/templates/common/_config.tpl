{{/* The cluster's configuration file, and the sizes of the pools. */}}

{{- define "tandem.clusterName" -}}
{{- default "tandem" .Values.config.cluster -}}
{{- end -}}

{{- define "tandem.drainSeconds" -}}
{{- ternary .Values.config.drain_timeout_s 30 (hasKey .Values.config "drain_timeout_s") -}}
{{- end -}}

{{- define "tandem.replacementSeconds" -}}
{{- ternary .Values.config.replacement_timeout_s 30 (hasKey .Values.config "replacement_timeout_s") -}}
{{- end -}}

{{- define "tandem.leaseSeconds" -}}
{{- dig "transfer" "lease_s" 10 .Values.config -}}
{{- end -}}

{{/* All of it, as YAML. What the chart sets wins over `config`. */}}
{{- define "tandem.config" -}}
{{- $set := dict "cluster" (include "tandem.clusterName" .) "controller_metrics_port" (int .Values.head.metricsPort) -}}
{{- $_ := set $set "model" (dict "source" .Values.model.source) -}}
{{- with .Values.model.servedName }}{{ $_ := set $set.model "served_name" . }}{{ end -}}
{{- $_ := set $set "router" (include "tandem.routerConfig" . | fromYaml) -}}
{{- $parallel := include "tandem.parallelConfig" . | fromYaml -}}
{{- $tiers := include "tandem.tierConfig" . | fromYaml -}}
{{- $config := mergeOverwrite (deepCopy .Values.config) $set $parallel $tiers -}}
{{- toYaml $config -}}
{{- end -}}

{{- define "tandem.routerConfig" -}}
host: 0.0.0.0
grpc_port: {{ .Values.router.grpcPort }}
http_port: {{ .Values.router.httpPort }}
health_port: {{ .Values.router.healthPort }}
linger_s: {{ .Values.router.lingerSeconds }}
{{- if .Values.tls.secretName }}
tls_cert_file: /etc/tandem/tls/tls.crt
tls_key_file: /etc/tandem/tls/tls.key
{{- if .Values.tls.clientCa }}
tls_client_ca_file: /etc/tandem/tls/ca.crt
{{- end }}
{{- end }}
{{- if .Values.auth.apiKeysSecret.name }}
api_keys_file: /etc/tandem/api-keys/keys
{{- end }}
{{- end -}}

{{- define "tandem.parallelConfig" -}}
{{- $config := dict -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := index $.Values $role -}}
{{- range $key, $field := dict "tensorParallel" "tensor_parallel" "pipelineParallel" "pipeline_parallel" -}}
{{- if gt (int (index $pool $key)) 1 -}}
{{- $_ := set $config $role (merge (dict $field (int (index $pool $key))) (default dict (get $config $role))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* The prefix store's tiers, the largest of all pods: labels of nodes have what pods of one kind have less. */}}
{{- define "tandem.tierConfig" -}}
{{- $host := 0 -}}
{{- $disk := 0 -}}
{{- range $name, $shape := include "tandem.shapes" . | fromYaml -}}
{{- $tiers := include "tandem.shapeTiers" $shape | fromYaml -}}
{{- $host = max $host ($tiers.host | int64) -}}
{{- $disk = max $disk ($tiers.disk | int64) -}}
{{- end -}}
{{- $store := dict -}}
{{- if $host }}{{ $_ := set $store "host_bytes" $host }}{{ end -}}
{{- if $disk }}{{ $_ := set $store "disk_bytes" $disk }}{{ $_ := set $store "disk_path" "/var/lib/tandem/ssd" }}{{ end -}}
{{- if $store }}{{ toYaml (dict "prefix_store" $store) }}{{ else }}{}{{ end -}}
{{- end -}}

{{/* A shape of pods: bytes of its tiers, as text. */}}
{{- define "tandem.shapeTiers" -}}
host: {{ include "tandem.bytes" (dict "quantity" .dramTier.size "name" "dramTier.size") | quote }}
disk: {{ if eq .ssdTier.type "none" }}"0"{{ else }}{{ include "tandem.ssdCapBytes" . | quote }}{{ end }}
{{- end -}}

{{/* dict root, shape: labels of its nodes in Ray. Where kinds of pods have different tiers, they say which. */}}
{{- define "tandem.rayLabels" -}}
{{- $all := list -}}
{{- range $name, $shape := include "tandem.shapes" .root | fromYaml -}}
{{- $all = append $all (include "tandem.shapeTiers" $shape) -}}
{{- end -}}
{{- $labels := deepCopy .shape.rayLabels -}}
{{- if gt (len (uniq $all)) 1 -}}
{{- $tiers := include "tandem.shapeTiers" .shape | fromYaml -}}
{{- $_ := set $labels "tandem.dev/store-host-bytes" $tiers.host -}}
{{- $_ := set $labels "tandem.dev/store-disk-bytes" $tiers.disk -}}
{{- end -}}
{{- toYaml $labels -}}
{{- end -}}

{{/* A shape of pods: what its store may fill of the SSD tier, which is less than the volume holds. */}}
{{- define "tandem.ssdCapBytes" -}}
{{- $size := include "tandem.bytes" (dict "quantity" .ssdTier.size "name" "ssdTier.size") | int64 -}}
{{- div (mul $size (sub 100 (int .ssdTier.reservePercent))) 100 -}}
{{- end -}}

{{/* What the cluster is to start with: in KEDA's mode as many workers as there may be, for its pods decide. */}}
{{- define "tandem.sizes" -}}
{{- $key := ternary "max" "replicas" (eq .Values.autoscaling.mode "keda") -}}
prefill: {{ index (include "tandem.pool" (dict "root" . "role" "prefill") | fromYaml) $key }}
decode: {{ index (include "tandem.pool" (dict "root" . "role" "decode") | fromYaml) $key }}
generation: {{ .Release.Revision }}
{{- end -}}

{{/* Checksums that make pods start again: the router's covers all, the others' all but the router's section. */}}
{{- define "tandem.routerChecksum" -}}
{{- include "tandem.config" . | sha256sum -}}
{{- end -}}

{{- define "tandem.nodeChecksum" -}}
{{- omit (include "tandem.config" . | fromYaml) "router" | toYaml | sha256sum -}}
{{- end -}}
