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
{{- include "tandem.requireField" (dict "root" $ "field" (printf "%s.%s" $role $field) "value" (printf "%s.%s" $role $key) "write" "1") -}}
{{- $_ := set $config $role (merge (dict $field (int (index $pool $key))) (default dict (get $config $role))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* The prefix store's tiers: the same on every node, since the file is. */}}
{{- define "tandem.tierConfig" -}}
{{- $shapes := include "tandem.shapes" . | fromYaml -}}
{{- $all := list -}}
{{- range $name, $shape := $shapes -}}
{{- $all = append $all (include "tandem.shapeTiers" (dict "name" $name "shape" $shape)) -}}
{{- end -}}
{{- $all = uniq $all -}}
{{- if gt (len $all) 1 -}}
{{- fail "prefill and decode have different dramTier or ssdTier; the prefix store is configured once for all nodes: write them under `workers`" -}}
{{- end -}}
{{- $tiers := first $all | fromYaml -}}
{{- range $field, $_ := $tiers -}}
{{- include "tandem.requireField" (dict "root" $ "field" (printf "prefix_store.%s" $field) "value" (ternary "dramTier.size" "ssdTier.type" (eq $field "host_bytes")) "write" (ternary "0" "none" (eq $field "host_bytes"))) -}}
{{- end -}}
{{- if $tiers }}{{ toYaml (dict "prefix_store" $tiers) }}{{ else }}{}{{ end -}}
{{- end -}}

{{/* dict name, shape */}}
{{- define "tandem.shapeTiers" -}}
{{- $dram := include "tandem.bytes" (dict "quantity" .shape.dramTier.size "name" "dramTier.size") | int64 -}}
{{- $tiers := dict -}}
{{- if $dram }}{{ $_ := set $tiers "host_bytes" $dram }}{{ end -}}
{{- if ne .shape.ssdTier.type "none" -}}
{{- $_ := set $tiers "disk_bytes" (include "tandem.ssdCapBytes" .shape | int64) -}}
{{- $_ := set $tiers "disk_path" "/var/lib/tandem/ssd" -}}
{{- end -}}
{{- toYaml $tiers -}}
{{- end -}}

{{/* A shape of pods: what the engine may fill of the SSD tier, which is less than the volume holds. */}}
{{- define "tandem.ssdCapBytes" -}}
{{- $size := include "tandem.bytes" (dict "quantity" .ssdTier.size "name" "ssdTier.size") | int64 -}}
{{- div (mul $size (sub 100 (int .ssdTier.reservePercent))) 100 -}}
{{- end -}}

{{/* dict root, field, value, write: fails when this version of Tandem has no such field in its configuration. */}}
{{- define "tandem.requireField" -}}
{{- $known := .root.Files.Get "files/config-fields.txt" | splitList "\n" -}}
{{- if not (or .root.Values.compatibility.allowUnknownFields (has .field $known)) -}}
{{- fail (printf "%s needs %s in the configuration, which Tandem %s does not have: write %s, or, for an image that has it, compatibility.allowUnknownFields: true" .value .field .root.Chart.AppVersion .write) -}}
{{- end -}}
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
