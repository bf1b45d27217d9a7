{{/* Where a worker's pods may go. */}}

{{/* dict root, name, shape: the shape's own affinity, its wish to share an NVLink domain and a rack with its peers, and
     that two pods do not share a directory of a node, which is one store's. */}}
{{- define "tandem.workerAffinity" -}}
{{- $affinity := deepCopy .shape.affinity -}}
{{- $topology := .root.Values.topology -}}
{{- $nvlink := ternary "required" .shape.nvlinkDomain (eq $topology.mode "mnnvl") -}}
{{- $pod := default dict $affinity.podAffinity -}}
{{- $required := default list $pod.requiredDuringSchedulingIgnoredDuringExecution -}}
{{- $preferred := default list $pod.preferredDuringSchedulingIgnoredDuringExecution -}}
{{- $peers := dict "matchLabels" (include "tandem.selector" (dict "root" .root) | fromYaml) "matchExpressions" (list (dict "key" "app.kubernetes.io/component" "operator" "In" "values" (include "tandem.components" .root | fromYamlArray))) -}}
{{- range $wish := list (list $nvlink $topology.nvlinkDomainKey 100) (list .shape.rack $topology.rackKey 50) -}}
{{- $term := dict "labelSelector" $peers "topologyKey" (index $wish 1) -}}
{{- if eq (index $wish 0) "required" -}}
{{- $required = append $required $term -}}
{{- else if eq (index $wish 0) "preferred" -}}
{{- $preferred = append $preferred (dict "weight" (index $wish 2) "podAffinityTerm" $term) -}}
{{- end -}}
{{- end -}}
{{- if $required }}{{ $_ := set $pod "requiredDuringSchedulingIgnoredDuringExecution" $required }}{{ end -}}
{{- if $preferred }}{{ $_ := set $pod "preferredDuringSchedulingIgnoredDuringExecution" $preferred }}{{ end -}}
{{- if $pod }}{{ $_ := set $affinity "podAffinity" $pod }}{{ end -}}
{{- if eq .shape.ssdTier.type "hostPath" -}}
{{- $anti := default dict $affinity.podAntiAffinity -}}
{{- $apart := append (default list $anti.requiredDuringSchedulingIgnoredDuringExecution) (dict "labelSelector" $peers "topologyKey" "kubernetes.io/hostname") -}}
{{- $_ := set $anti "requiredDuringSchedulingIgnoredDuringExecution" $apart -}}
{{- $_ := set $affinity "podAntiAffinity" $anti -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end -}}

{{/* A shape: node labels it asks for, the GPU's product among them. */}}
{{- define "tandem.workerNodeSelector" -}}
{{- $selector := deepCopy .nodeSelector -}}
{{- if and .gpu.count .gpu.product }}{{ $_ := set $selector .gpu.productKey .gpu.product }}{{ end -}}
{{- toYaml $selector -}}
{{- end -}}
