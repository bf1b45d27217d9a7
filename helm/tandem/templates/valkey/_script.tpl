{{- define "tandem.valkeyConfig" -}}
protected-mode no
appendonly {{ ternary "yes" "no" .Values.valkey.persistence.enabled }}
appendfsync everysec
save ""
maxmemory {{ .Values.valkey.maxMemory }}
maxmemory-policy noeviction
repl-diskless-sync-delay 0
tcp-keepalive 60
{{- end -}}

{{/* Writes the users from the password, which is on no command line, and becomes the server. */}}
{{- define "tandem.valkeyScript" -}}
set -eu
umask 077
hash=$(printf %s "$VALKEY_PASSWORD" | sha256sum | cut -d' ' -f1)
{
  echo "user default off resetpass"
  echo "user $VALKEY_USER on #$hash ~* &* +@all -@admin -@dangerous +info +keys"
} > "$VALKEY_RUN_DIR/users.acl"
unset VALKEY_PASSWORD
set -- "$(dirname "$0")/valkey.conf" --bind "$POD_IP" --dir "$VALKEY_DATA_DIR" --aclfile "$VALKEY_RUN_DIR/users.acl"
if [ -n "${VALKEY_TLS_DIR:-}" ]; then
  set -- "$@" --port 0 --tls-port "$VALKEY_PORT" --tls-auth-clients no
  set -- "$@" --tls-cert-file "$VALKEY_TLS_DIR/tls.crt" --tls-key-file "$VALKEY_TLS_DIR/tls.key"
  set -- "$@" --tls-ca-cert-file "$VALKEY_TLS_DIR/ca.crt"
else
  set -- "$@" --port "$VALKEY_PORT"
fi
exec valkey-server "$@"
{{- end -}}
