#!/bin/sh
# Starts nats-server with the configuration of this folder, and with the
# arguments given, once each variable that it takes from the environment has a
# value. The server itself refuses a variable that is missing; an empty one is
# to it a user with an empty password, as whom anybody could come in.
set -eu
cd "$(dirname "$0")"

included() { sed -n 's/^ *include "\(.*\)".*/\1/p' nats-server.conf; }

empty=
for name in $({ echo nats-server.conf; included; } | xargs cat | sed 's/#.*//' | grep -Eo '\$[A-Z][A-Z0-9_]*_(PASSWORD|CERT|KEY)' | tr -d '$' | sort -u); do
  eval "value=\${$name:-}"
  [ -n "$value" ] || empty="$empty $name"
done
if [ -n "$empty" ]; then
  echo "start.sh: these variables have no value:$empty: set them, README.md says to what" >&2
  exit 2
fi
exec nats-server -c nats-server.conf "$@"
