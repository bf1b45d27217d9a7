{{/* Combinations that cannot work, refused with what to write. What one value alone must be is in the schema. */}}

{{- define "tandem.checks" -}}
{{- include "tandem.checkModes" . -}}
{{- include "tandem.checkRoom" . -}}
{{- range $name, $shape := include "tandem.shapes" . | fromYaml -}}
{{- include "tandem.checkShape" (dict "root" $ "name" $name "shape" $shape) -}}
{{- end -}}
{{- include "tandem.checkServices" . -}}
{{- end -}}

{{- define "tandem.checkModes" -}}
{{- $mode := .Values.autoscaling.mode -}}
{{- if and (eq $mode "ray") (not .Values.kuberay.enabled) -}}
{{- fail "autoscaling.mode ray adds nodes through the operator: write kuberay.enabled: true, or another mode" -}}
{{- end -}}
{{- if eq $mode "keda" -}}
{{- if .Values.kuberay.enabled -}}
{{- fail "autoscaling.mode keda cannot scale a RayCluster, which has no scale subresource: write kuberay.enabled: false, or autoscaling.mode: ray" -}}
{{- end -}}
{{- if ne .Values.topology.mode "pool" -}}
{{- fail "autoscaling.mode keda scales a StatefulSet for each pool: write topology.mode: pool, or another autoscaling.mode" -}}
{{- end -}}
{{- if not .Values.autoscaling.keda.prometheusAddress -}}
{{- fail "autoscaling.mode keda asks Prometheus: write autoscaling.keda.prometheusAddress, as in http://prometheus.monitoring:9090" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.kuberay.tls (ne .Values.kuberay.version "1.7") -}}
{{- fail "kuberay.tls needs an operator from 1.7 on: write kuberay.version: \"1.7\", or kuberay.tls: false" -}}
{{- end -}}
{{- if and .Values.kuberay.upgradeStrategy (eq .Values.kuberay.version "1.5") -}}
{{- fail "kuberay.upgradeStrategy needs an operator from 1.6 on: write kuberay.version: \"1.6\", or leave the strategy empty" -}}
{{- end -}}
{{- if and (eq .Values.topology.mode "mnnvl") (semverCompare "<1.32.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "topology.mode mnnvl needs resource claims, from Kubernetes 1.32 on; this is %s: write topology.mode: pool" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}

{{/* In whole nodes: whether both pools have room. */}}
{{- define "tandem.checkRoom" -}}
{{- if eq .Values.topology.mode "node" -}}
{{- $counts := include "tandem.podCounts" (dict "root" . "name" "node") | fromYaml -}}
{{- $node := include "tandem.shape" (dict "root" . "name" "node") | fromYaml -}}
{{- $ranks := 0 -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := include "tandem.pool" (dict "root" $ "role" $role) | fromYaml -}}
{{- $slots := int (index $node (printf "%sSlots" $role)) -}}
{{- $room := mul (div $slots (int $pool.ranks)) (int $counts.max) -}}
{{- if gt (int $pool.replicas) (int $room) -}}
{{- fail (printf "%s.replicas is %d, but %d nodes with %d slots have room for %d workers of %d ranks: write a larger node.%sSlots or node.replicas, or fewer replicas" $role (int $pool.replicas) (int $counts.max) $slots (int $room) (int $pool.ranks) $role) -}}
{{- end -}}
{{- $ranks = add $ranks (mul (int $pool.replicas) (int $pool.ranks)) -}}
{{- end -}}
{{- $gpus := mul (int $node.gpu.count) (int $counts.max) -}}
{{- if and $gpus (gt (int $ranks) (int $gpus)) -}}
{{- fail (printf "the pools have %d ranks together, the nodes %d GPUs, and each rank takes one: write fewer replicas or more nodes" (int $ranks) (int $gpus)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* dict root, name, shape */}}
{{- define "tandem.checkShape" -}}
{{- $slots := include "tandem.slots" . | fromYaml -}}
{{- range $role, $number := $slots -}}
{{- if and $.shape.gpu.count (gt (int $number) (int $.shape.gpu.count)) -}}
{{- fail (printf "%s has %d slots for %s and %d GPUs, but each slot takes one: write %d or fewer slots" $.name (int $number) $role (int $.shape.gpu.count) (int $.shape.gpu.count)) -}}
{{- end -}}
{{- end -}}
{{- $ssd := .shape.ssdTier -}}
{{- if and (ne $ssd.type "none") (not $ssd.size) -}}
{{- fail (printf "ssdTier.type %s of %s needs a size: write ssdTier.size, as in 500Gi" $ssd.type .name) -}}
{{- end -}}
{{- if and (eq $ssd.type "hostPath") (not $ssd.path) -}}
{{- fail (printf "ssdTier.type hostPath of %s needs a directory of the node: write ssdTier.path" .name) -}}
{{- end -}}
{{- if and (eq $ssd.type "existingClaim") (not $ssd.claimName) -}}
{{- fail (printf "ssdTier.type existingClaim of %s needs a claim: write ssdTier.claimName" .name) -}}
{{- end -}}
{{- $dram := include "tandem.bytes" (dict "quantity" .shape.dramTier.size "name" "dramTier.size") | int64 -}}
{{- if and (ne $ssd.type "none") (not $dram) -}}
{{- fail (printf "ssdTier.type %s of %s lies below a DRAM tier: write dramTier.size, as in 16Gi" $ssd.type .name) -}}
{{- end -}}
{{- if and $dram (not (dig "prefix_store" "enabled" true .root.Values.config)) -}}
{{- fail (printf "dramTier of %s is the prefix store's: write config.prefix_store.enabled: true, or dramTier.size: \"0\"" .name) -}}
{{- end -}}
{{- if and (eq $ssd.type "existingClaim") (gt (int (include "tandem.podCounts" (dict "root" .root "name" .name) | fromYaml).max) 1) -}}
{{- fail (printf "ssdTier.type existingClaim of %s is one volume for several pods, and each needs its own: write ssdTier.type: ephemeral" .name) -}}
{{- end -}}
{{- $transport := dig "transfer" "transport" "ucx" .root.Values.config -}}
{{- if and (eq $transport "shm") (or (ne .name "node") (gt (int (include "tandem.podCounts" (dict "root" .root "name" .name) | fromYaml).max) 1)) -}}
{{- fail "config.transfer.transport shm moves KV within one pod only: write ucx, or topology.mode: node with one node" -}}
{{- end -}}
{{- if and .root.Values.rdma.enabled (eq $transport "shm") -}}
{{- fail "rdma.enabled needs config.transfer.transport: ucx" -}}
{{- end -}}
{{- end -}}

{{- define "tandem.checkServices" -}}
{{- if and (not .Values.valkey.enabled) (not .Values.externalRedis.url) -}}
{{- fail "without valkey.enabled the cluster needs a Redis: write externalRedis.url, as in redis://host:6379/0" -}}
{{- end -}}
{{- if and .Values.valkey.enabled .Values.externalRedis.url -}}
{{- fail "valkey.enabled and externalRedis.url are both set: write valkey.enabled: false, or leave the URL empty" -}}
{{- end -}}
{{- if and .Values.tls.clientCa (not .Values.tls.secretName) -}}
{{- fail "tls.clientCa needs the server's certificate too: write tls.secretName" -}}
{{- end -}}
{{- if and .Values.tls.clientCa .Values.tests.enabled (not .Values.tls.clientSecretName) -}}
{{- fail "with tls.clientCa `helm test` needs a certificate of its own: write tls.clientSecretName, or tests.enabled: false" -}}
{{- end -}}
{{- if and .Values.tls.clientCa .Values.metrics.serviceMonitor.enabled (not .Values.tls.clientSecretName) -}}
{{- fail "with tls.clientCa Prometheus needs a certificate to scrape routers: write tls.clientSecretName, or metrics.serviceMonitor.enabled: false" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) -}}
{{- fail "ingress.enabled needs a name to answer to: write ingress.host" -}}
{{- end -}}
{{- $router := .Values.router -}}
{{- if lt (len (uniq (list (int $router.grpcPort) (int $router.httpPort) (int $router.healthPort)))) 3 -}}
{{- fail "router.grpcPort, router.httpPort and router.healthPort must differ: write three ports" -}}
{{- end -}}
{{- with .Values.router.autoscaling -}}
{{- if and .enabled (not (or .cpuPercent .runningRequestsPerPod)) -}}
{{- fail "router.autoscaling.enabled needs a load to scale on: write cpuPercent or runningRequestsPerPod" -}}
{{- end -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "router.autoscaling.minReplicas is %d: write maxReplicas (%d) or fewer" (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- include "tandem.checkModel" .Values.model.volume -}}
{{- end -}}

{{- define "tandem.checkModel" -}}
{{- $needs := dict "pvc" (list "claimName" .claimName) "hostPath" (list "path" .path) "download" (list "download.repository, download.revision and sizeLimit" (and .download.repository .download.revision .sizeLimit)) "initContainer" (list "initContainer (with an image) and sizeLimit" (and .initContainer.image .sizeLimit)) -}}
{{- with get $needs .type -}}
{{- if not (index . 1) -}}
{{- fail (printf "model.volume.type %s needs model.volume.%s: write it" $.type (index . 0)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
