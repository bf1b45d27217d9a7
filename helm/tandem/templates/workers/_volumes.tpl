{{/* Memory and disks of a worker's pod. */}}

{{/* dict root, shape: requests and limits. /dev/shm and the DRAM tier, which is no file, count as memory; an emptyDir SSD
     tier counts as ephemeral storage. */}}
{{- define "tandem.workerResources" -}}
{{- $resources := .shape.resources -}}
{{- $memory := 0 -}}
{{- range $name, $quantity := dict "resources.memory" $resources.memory "sharedMemory" .shape.sharedMemory "dramTier.size" .shape.dramTier.size -}}
{{- $memory = add $memory (include "tandem.bytes" (dict "quantity" $quantity "name" $name) | int64) -}}
{{- end -}}
{{- $disk := include "tandem.bytes" (dict "quantity" $resources.ephemeralStorage "name" "resources.ephemeralStorage") | int64 -}}
{{- if eq .shape.ssdTier.type "emptyDir" -}}
{{- $disk = add $disk (include "tandem.bytes" (dict "quantity" .shape.ssdTier.size "name" "ssdTier.size") | int64) -}}
{{- end -}}
{{- $devices := dict -}}
{{- if .shape.gpu.count }}{{ $_ := set $devices .shape.gpu.resource (int .shape.gpu.count) }}{{ end -}}
{{- if .root.Values.rdma.enabled }}{{ $_ := set $devices .root.Values.rdma.resource (int .root.Values.rdma.count) }}{{ end -}}
{{- $common := merge (dict "memory" (include "tandem.mebibytes" $memory) "ephemeral-storage" (include "tandem.mebibytes" $disk)) $devices -}}
{{- $limits := deepCopy $common -}}
{{- with $resources.cpuLimit }}{{ $_ := set $limits "cpu" . }}{{ end -}}
{{- $all := dict "requests" (merge (dict "cpu" $resources.cpu) $common) "limits" $limits -}}
{{- if eq .root.Values.topology.mode "mnnvl" -}}
{{- $_ := set $all "claims" (list (dict "name" "compute-domain")) -}}
{{- end -}}
{{- toYaml $all -}}
{{- end -}}

{{/* dict root, shape */}}
{{- define "tandem.workerMounts" -}}
{{ include "tandem.commonMounts" .root }}
- {name: shared-memory, mountPath: /dev/shm}
{{- include "tandem.modelMounts" .root }}
{{- if ne .shape.ssdTier.type "none" }}
- {name: ssd-tier, mountPath: /var/lib/tandem/ssd}
{{- end }}
{{- with .shape.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* dict root, shape */}}
{{- define "tandem.workerVolumes" -}}
{{ include "tandem.commonVolumes" (dict "root" .root "tmpSize" .shape.resources.ephemeralStorage) }}
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ include "tandem.mebibytes" (include "tandem.bytes" (dict "quantity" .shape.sharedMemory "name" "sharedMemory")) }}
{{- include "tandem.modelVolumes" .root }}
{{- include "tandem.ssdVolume" .shape.ssdTier }}
{{- with .shape.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* An ssdTier. */}}
{{- define "tandem.ssdVolume" -}}
{{- if eq .type "emptyDir" }}
- name: ssd-tier
  emptyDir:
    sizeLimit: {{ .size }}
{{- else if eq .type "ephemeral" }}
- name: ssd-tier
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ .size }}
{{- else if eq .type "hostPath" }}
- name: ssd-tier
  hostPath:
    path: {{ .path }}
    type: DirectoryOrCreate
{{- else if eq .type "existingClaim" }}
- name: ssd-tier
  persistentVolumeClaim:
    claimName: {{ .claimName }}
{{- end }}
{{- end -}}
