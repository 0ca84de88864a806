#!/usr/bin/env bash
# Three nats-server processes as a cluster: two workers and a scanner run a load
# of sessions on streams of three replicas, the server that leads the event
# stream is killed while that is published to, and comes back. Then the stream
# has the events of the database, each once and in order.
set -euo pipefail
cd "$(dirname "$0")/.."

why='a command failed' # the last line where it does
fail() { why=$*; exit 1; }
step() { echo "==> $*"; }

if [ -z "${RV_E2E_DATABASE_URL:-}" ]; then # a database of its own, whatever else there is
  exec env -u RV_TEST_DATABASE_URL go run ./internal/testenv -- sh -c 'RV_E2E_DATABASE_URL=$RV_TEST_DATABASE_URL exec scripts/e2e-cluster.sh'
fi

make --no-print-directory build
tmp=$(mktemp -d /var/tmp/reveille-e2e-XXXXXX)
declare -A pid=() # of what runs, by name

# end SIGNAL NAME: ends one process, by its id, and waits for it.
end() {
  local p=${pid[$2]:-}
  [ -n "$p" ] || return 0
  unset "pid[$2]"
  kill "-$1" "$p" 2>/dev/null || true
  wait "$p" 2>/dev/null || true
}

cleanup() {
  code=$?
  trap - EXIT
  for name in "${!pid[@]}"; do
    case $name in nats-*) ;; *) end TERM "$name" ;; esac
  done
  for name in "${!pid[@]}"; do end KILL "$name"; done
  if [ "$code" -ne 0 ]; then
    for log in "$tmp"/*.log; do
      echo "--- the last of $(basename "$log")" >&2
      tail -n 20 "$log" >&2 || true
    done
  fi
  rm -rf "$tmp"
  if [ "$code" -ne 0 ]; then echo "e2e-cluster: $why" >&2; fi
  exit "$code"
}
trap cleanup EXIT
trap 'why=stopped; exit 130' INT
trap 'why=stopped; exit 143' TERM

# run NAME COMMAND…: starts a process.
run() {
  local name=$1
  shift
  "$@" >> "$tmp/$name.log" 2>&1 &
  pid[$name]=$!
}

# alive: nothing has ended by itself.
alive() {
  local name
  for name in "${!pid[@]}"; do
    kill -0 "${pid[$name]}" 2>/dev/null || fail "$name has ended"
  done
}

go build -o "$tmp/nats-server" github.com/nats-io/nats-server/v2 || fail "nats-server can't be built from the module cache"
go build -o "$tmp/cluster" ./internal/systemtest/cluster
mapfile -t port < <("$tmp/cluster" ports 9)
[ "${#port[@]}" -eq 9 ] || fail "no nine free ports"

routes=nats://127.0.0.1:${port[3]},nats://127.0.0.1:${port[4]},nats://127.0.0.1:${port[5]}
nats() { # NUMBER
  run "nats-$1" "$tmp/nats-server" -n "nats-$1" -a 127.0.0.1 -p "${port[$1]}" -js -sd "$tmp/store-$1" \
    --cluster_name e2e --cluster "nats://127.0.0.1:${port[$(($1 + 3))]}" --routes "$routes"
}
export RV_NATS_URL=nats://127.0.0.1:${port[0]},nats://127.0.0.1:${port[1]},nats://127.0.0.1:${port[2]}
export RV_DATABASE_URL=$RV_E2E_DATABASE_URL

# leads MESSAGES [NOT]: waits until somebody, and not that one, leads the event
# stream with at least so many messages, and says who.
leads() {
  local deadline=$((SECONDS + 90)) name n
  while [ "$SECONDS" -lt "$deadline" ]; do
    alive
    read -r name n < <("$tmp/cluster" leader) || fail "nobody leads the event stream"
    if [ "$n" -ge "$1" ] && [ "$name" != "${2:-}" ]; then
      leader=$name messages=$n
      return
    fi
    sleep 0.2
  done
  fail "not in 90 s: $1 events, led by somebody else than ${2:-nobody}; $name leads with $n"
}

step "three nats-servers, two workers and a scanner with three replicas"
bin/reveille migrate > /dev/null
for i in 0 1 2; do nats "$i"; done
run scanner bin/scanner --replicas 3 --http "127.0.0.1:${port[6]}"
for i in 7 8; do
  run "worker-$i" bin/worker --replicas 3 --slots 8 --http "127.0.0.1:${port[$i]}" --exec 'cat > /dev/null; echo hello; echo world'
done

step "a load of sessions"
run load "$tmp/cluster" load "$tmp/enough"
leads 200

step "kill -9 of $leader, which leads the event stream, at $messages events"
end KILL "$leader"
alive # the load goes on, so it was published to
gone=$leader
leads $((messages + 100)) "$gone"
step "$gone comes back"
nats "${gone#nats-}"
leads $((messages + 200))
touch "$tmp/enough"
wait "${pid[load]}" || fail "the load could not be published"
unset "pid[load]"
inputs=$(tail -n 1 "$tmp/load.log")

step "the stream and the database, event for event"
alive
"$tmp/cluster" compare "$inputs" || fail "the stream is not the copy of the database"

step "all end when they are told"
for name in worker-7 worker-8 scanner; do
  p=${pid[$name]}
  kill -TERM "$p"
  unset "pid[$name]"
  wait "$p" || fail "$name exits $?"
done
echo "e2e-cluster: passed"
