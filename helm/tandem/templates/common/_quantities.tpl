{{/* Arithmetic on Kubernetes quantities. */}}

{{/* dict quantity, name: bytes, as a decimal integer. */}}
{{- define "tandem.bytes" -}}
{{- $text := toString .quantity -}}
{{- $number := regexFind "^[0-9]+(\\.[0-9]+)?" $text -}}
{{- $unit := trimPrefix $number $text -}}
{{- $factors := dict "" 1.0 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 -}}
{{- if or (eq $number "") (not (hasKey $factors $unit)) -}}
{{- fail (printf "%s is %q, which is no amount of memory; write a number with Ki, Mi, Gi or Ti, as in 16Gi" .name $text) -}}
{{- end -}}
{{- printf "%d" (int64 (mulf (float64 $number) (get $factors $unit))) -}}
{{- end -}}

{{/* Bytes as a quantity, rounded up to a Mi. */}}
{{- define "tandem.mebibytes" -}}
{{- printf "%dMi" (div (add (int64 .) 1048575) 1048576) -}}
{{- end -}}

{{/* dict a, b: a/b rounded up. */}}
{{- define "tandem.ceil" -}}
{{- div (sub (add (int64 .a) (int64 .b)) 1) (int64 .b) -}}
{{- end -}}
