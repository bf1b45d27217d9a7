{{/* How long pods get to end: lingering or pre-stop, drain, the longest lease of KV, margin. A shorter value is refused. */}}

{{/* Seconds in which a node has its workers moved: the drain, and successors that become ready elsewhere. */}}
{{- define "tandem.leaveSeconds" -}}
{{- addf (include "tandem.drainSeconds" . | float64) (include "tandem.leaseSeconds" . | float64) (include "tandem.replacementSeconds" . | float64) | ceil | int -}}
{{- end -}}

{{- define "tandem.workerGrace" -}}
{{- add (include "tandem.leaveSeconds" . | int) 15 -}}
{{- end -}}

{{- define "tandem.routerGrace" -}}
{{- add .Values.router.lingerSeconds (include "tandem.drainSeconds" . | float64 | ceil | int) 15 -}}
{{- end -}}

{{/* dict needed, given, name */}}
{{- define "tandem.grace" -}}
{{- if kindIs "invalid" .given -}}
{{- .needed -}}
{{- else if lt (int .given) (int .needed) -}}
{{- fail (printf "%s is %d, but lingering, drain, lease and margin take %d s: write %d or more, or lower config.drain_timeout_s" .name (int .given) (int .needed) (int .needed)) -}}
{{- else -}}
{{- .given -}}
{{- end -}}
{{- end -}}
