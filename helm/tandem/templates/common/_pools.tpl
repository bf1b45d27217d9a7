{{/* Workers, ranks, slots and pods: what the values say, resolved. */}}

{{/* dict root, name (node, prefill or decode): the pods' shape, the pool's own keys over those of `workers`. */}}
{{- define "tandem.shape" -}}
{{- toYaml (mergeOverwrite (deepCopy .root.Values.workers) (index .root.Values .name)) -}}
{{- end -}}

{{/* The shapes in use, by the name of their component. */}}
{{- define "tandem.shapes" -}}
{{- $shapes := dict -}}
{{- range include "tandem.components" . | fromYamlArray -}}
{{- $_ := set $shapes . (include "tandem.shape" (dict "root" $ "name" .) | fromYaml) -}}
{{- end -}}
{{- toYaml $shapes -}}
{{- end -}}

{{- define "tandem.components" -}}
{{- ternary (list "node") (list "prefill" "decode") (eq .Values.topology.mode "node") | toYaml -}}
{{- end -}}

{{/* dict root, role: replicas, min, max and ranks of one pool, in workers. */}}
{{- define "tandem.pool" -}}
{{- $pool := index .root.Values .role -}}
{{- $replicas := int $pool.replicas -}}
{{- $min := ternary (min 1 $replicas) (int $pool.minReplicas) (kindIs "invalid" $pool.minReplicas) -}}
{{- $max := ternary $replicas (int $pool.maxReplicas) (kindIs "invalid" $pool.maxReplicas) -}}
{{- if or (gt (int $min) $replicas) (lt $max $replicas) -}}
{{- fail (printf "%s.replicas is %d; write a number from minReplicas (%d) to maxReplicas (%d), or change those" .role $replicas (int $min) $max) -}}
{{- end -}}
replicas: {{ $replicas }}
min: {{ $min }}
max: {{ $max }}
ranks: {{ mul (int $pool.tensorParallel) (int $pool.pipelineParallel) }}
{{- end -}}

{{/* dict root, name: slots of a pod for each pool, in ranks. */}}
{{- define "tandem.slots" -}}
{{- $shape := include "tandem.shape" . | fromYaml -}}
{{- if eq .name "node" -}}
prefill: {{ int $shape.prefillSlots }}
decode: {{ int $shape.decodeSlots }}
{{- else -}}
{{- $slots := int (ternary (max 1 (int $shape.gpu.count)) $shape.slotsPerPod (kindIs "invalid" $shape.slotsPerPod)) -}}
prefill: {{ ternary $slots 0 (eq .name "prefill") }}
decode: {{ ternary $slots 0 (eq .name "decode") }}
{{- end -}}
{{- end -}}

{{/* dict root, role, workers: pods that hold so many workers; all ranks of a worker share a pod. */}}
{{- define "tandem.podsFor" -}}
{{- $pool := include "tandem.pool" . | fromYaml -}}
{{- $slots := index (include "tandem.slots" (dict "root" .root "name" .role) | fromYaml) .role -}}
{{- $each := div (int $slots) (int $pool.ranks) -}}
{{- if lt (int $each) 1 -}}
{{- fail (printf "a pod of %s has room for %d ranks, a worker has %d (tensorParallel x pipelineParallel); write %s.slotsPerPod: %d or more" .role (int $slots) (int $pool.ranks) .role (int $pool.ranks)) -}}
{{- end -}}
{{- include "tandem.ceil" (dict "a" .workers "b" $each) -}}
{{- end -}}

{{/* dict root, name: replicas, min and max of a component, in pods. replicas is absent when an autoscaler owns it. */}}
{{- define "tandem.podCounts" -}}
{{- $mode := .root.Values.autoscaling.mode -}}
{{- $counts := dict -}}
{{- if eq .name "node" -}}
{{- $node := .root.Values.node -}}
{{- $max := ternary $node.replicas $node.maxReplicas (kindIs "invalid" $node.maxReplicas) -}}
{{- if lt (int $max) (int $node.replicas) -}}
{{- fail (printf "node.maxReplicas is %d; write node.replicas (%d) or more" (int $max) (int $node.replicas)) -}}
{{- end -}}
{{- $counts = dict "replicas" (int $node.replicas) "min" (int $node.replicas) "max" (int (ternary $max $node.replicas (eq $mode "ray"))) -}}
{{- else -}}
{{- $pool := include "tandem.pool" (dict "root" .root "role" .name) | fromYaml -}}
{{- range $key := list "replicas" "min" "max" -}}
{{- $_ := set $counts $key (include "tandem.podsFor" (dict "root" $.root "role" $.name "workers" (index $pool $key)) | int) -}}
{{- end -}}
{{- if eq $mode "controller" }}{{ $_ := set $counts "replicas" $counts.max }}{{ end -}}
{{- if has $mode (list "none" "controller") }}{{ $_ := set $counts "min" $counts.replicas }}{{ $_ := set $counts "max" $counts.replicas }}{{ end -}}
{{- end -}}
{{- if has $mode (list "ray" "keda") }}{{ $counts = omit $counts "replicas" }}{{ end -}}
{{- toYaml $counts -}}
{{- end -}}
