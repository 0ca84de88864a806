#!/usr/bin/env bash
# The whole system from outside, with the built programs, as its users type
# them: a session runs, two inputs run in order, an interrupt stops a command,
# a killed worker's step goes on elsewhere, a stopped worker hands its step
# over, and Ctrl-C leaves nothing behind.
set -euo pipefail
cd "$(dirname "$0")/.."

make --no-print-directory build
tmp=$(mktemp -d /var/tmp/reveille-e2e-XXXXXX)
chmod 755 "$tmp" # the database's user goes through it
state=$tmp/state
dev=

cleanup() {
  code=$?
  trap - EXIT
  if [ -n "$dev" ] && kill -0 "$dev" 2>/dev/null; then
    kill -INT "$dev" 2>/dev/null || true
    wait "$dev" || true
  fi
  if [ "$code" -ne 0 ]; then
    echo "--- output of reveille dev" >&2
    cat "$tmp/dev.log" >&2 || true
  fi
  rm -rf "$tmp"
  exit "$code"
}
trap cleanup EXIT

fail() { echo "e2e: $*" >&2; exit 1; }
step() { echo "==> $*"; }
rv() { bin/reveille "$@" --dev-state "$state"; }

# until_true SECONDS WHAT COMMAND…: polls, with a bound.
until_true() {
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$end" ] || fail "not in time: $what"
    sleep 0.2
  done
}

# events SESSION PATTERN: its events, a JSON a line, in order, until one matches.
events() {
  local session=$1 last=$2 out watch
  out=$(mktemp "$tmp/watch-XXXXXX")
  bin/reveille watch "$session" --from 1 --json --dev-state "$state" > "$out" & # it follows for ever
  watch=$!
  until_true 60 "$session has an event like $last" grep -q -e "$last" "$out"
  kill "$watch"
  wait "$watch" 2>/dev/null || true
  cat "$out"
}

# order FILE PATTERN…: the patterns match lines of the file in this order.
order() {
  local file=$1 line=0 pattern found
  shift
  for pattern in "$@"; do
    found=$(tail -n "+$((line + 1))" "$file" | grep -n -m 1 -e "$pattern" | cut -d: -f1) ||
      { cat "$file" >&2; fail "no event like $pattern after line $line"; }
    line=$((line + found))
  done
}

# worker_of SESSION: the pid of the worker that runs it.
worker_of() {
  local name
  name=$(events "$1" '"type":"step.started"' | sed -n 's/.*"worker":"\([^"]*\)".*/\1/p' | tail -n 1)
  [ -n "$name" ] || fail "no worker runs $1"
  pgrep -P "$dev" -f -- "--worker-id=$name " || fail "no process of $name"
}

# A step says its input; one that is told to hold also waits for a file, and
# leaves its pid and that of a child where we find them.
cat > "$tmp/step.sh" <<'STEP'
#!/bin/sh
request=$(cat)
body=$(printf '%s\n' "$request" | sed -n 's/.*"index":[0-9]*,"inputs":\[{[^}]*"body":"\([^"]*\)".*/\1/p')
echo "got $body"
case $body in
hold*)
  sleep 1000 &
  echo "$$ $!" > "$HOLD/$RV_SESSION.$RV_EPOCH.tmp"
  mv "$HOLD/$RV_SESSION.$RV_EPOCH.tmp" "$HOLD/$RV_SESSION.$RV_EPOCH"
  until [ -e "$HOLD/$RV_SESSION.go" ]; do sleep 0.1; done
  kill "$!"
  ;;
esac
echo "done $body"
STEP

step "reveille dev starts everything"
HOLD=$tmp bin/reveille dev --state "$state" --nats-port 0 --exec "sh $tmp/step.sh" --grace 1s --kill-after 2s > "$tmp/dev.log" 2>&1 &
dev=$!
until_true 120 "reveille dev says what runs" grep -q 'Paste into another terminal' "$tmp/dev.log"

step "1. a session runs, and its output becomes events in order"
rv wake s1 --input '"hello"' --wait > "$tmp/out" 2> /dev/null
grep -q 'got hello' "$tmp/out" || fail "the command's output: $(cat "$tmp/out")"
events s1 '"type":"execution.ended"' > "$tmp/s1"
order "$tmp/s1" '"type":"input.admitted"' '"type":"execution.started"' '"type":"input.promoted"' '"type":"step.started"' \
  '"type":"text".*got hello' '"type":"step.ended"' '"outcome":"completed"'

step "2. two wakes of one session run one after the other; many sessions run"
rv wake s2 --input '"first"' --id first > /dev/null 2>&1
rv wake s2 --input '"second"' --id second --wait > /dev/null 2>&1
events s2 'done second' > "$tmp/s2"
order "$tmp/s2" '"inputs":\["first"\]' 'done first' '"type":"step.ended"' '"inputs":\["second"\]' 'done second'
for i in $(seq 1 20); do rv wake "many-$i" --input '"x"' > /dev/null 2>&1; done
for i in $(seq 1 20); do
  events "many-$i" '"type":"execution.ended"' | grep -q '"outcome":"completed"' || fail "many-$i did not complete"
done

step "3. an interrupt ends the whole process group, then the step"
rv wake s3 --input '"hold"' --wait > /dev/null 2>&1 & waiting=$!
until_true 30 "s3 holds" test -e "$tmp/s3.1"
code=0; rv interrupt s3 --reason 'pressed stop' --wait > /dev/null 2>&1 || code=$?
[ "$code" -eq 4 ] || fail "interrupt --wait exits $code, want 4"
code=0; wait "$waiting" || code=$?
[ "$code" -eq 4 ] || fail "wake --wait of an interrupted step exits $code, want 4"
for pid in $(cat "$tmp/s3.1"); do
  if kill -0 "$pid" 2>/dev/null; then fail "process $pid of s3 outlived its step"; fi
done
events s3 '"type":"execution.ended"' > "$tmp/s3"
order "$tmp/s3" '"type":"execution.cancelling"' '"type":"step.interrupted".*"joined":true' '"outcome":"interrupted"'
[ "$(grep -c '"type":"step.interrupted"' "$tmp/s3")" -eq 1 ] || fail "not exactly one step.interrupted"

step "4. kill -9 of the worker in mid-step: another runs the continuation"
rv wake s4 --input '"hold"' --wait > /dev/null 2>&1 & waiting=$!
until_true 30 "s4 holds" test -e "$tmp/s4.1"
kill -9 "$(worker_of s4)"
until_true 60 "s4 goes on" test -e "$tmp/s4.3" # the takeover is epoch 2
for pid in $(cat "$tmp/s4.1"); do
  if kill -0 "$pid" 2>/dev/null; then fail "process $pid outlived its worker"; fi
done
touch "$tmp/s4.go"
code=0; wait "$waiting" || code=$?
[ "$code" -eq 0 ] || fail "wake --wait over a recovery exits $code, want 0"
events s4 '"outcome":"completed"' > "$tmp/s4"
order "$tmp/s4" '"type":"step.failed".*"worker_lost"' '"outcome":"recovered"' '"type":"step.started".*"kind":"recovery"' 'done hold' '"outcome":"completed"'
sed -n '/"worker_lost"/,$p' "$tmp/s4" | grep -q '"epoch":1,' && fail "something of the dead worker's came after the takeover"

step "5. SIGTERM of the worker in mid-step: another goes on at once"
rv wake s5 --input '"hold"' --wait > /dev/null 2>&1 & waiting=$!
until_true 30 "s5 holds" test -e "$tmp/s5.1"
kill -TERM "$(worker_of s5)"
until_true 30 "s5 goes on" test -e "$tmp/s5.2" # no takeover: the next epoch
touch "$tmp/s5.go"
code=0; wait "$waiting" || code=$?
[ "$code" -eq 0 ] || fail "wake --wait over a hand-over exits $code, want 0"
events s5 '"outcome":"completed"' > "$tmp/s5"
order "$tmp/s5" '"type":"step.failed".*"shutdown"' '"outcome":"handed_over"' '"type":"step.started".*"kind":"handover"' '"outcome":"completed"'

step "Ctrl-C stops everything; a second start finds its data"
kill -INT "$dev"
code=0; wait "$dev" || code=$?
[ "$code" -eq 0 ] || fail "reveille dev exits $code"
if pgrep -f "$tmp" > "$tmp/left"; then fail "still running: $(cat "$tmp/left")"; fi
HOLD=$tmp bin/reveille dev --state "$state" --nats-port 0 --exec "sh $tmp/step.sh" > "$tmp/dev.log" 2>&1 &
dev=$!
until_true 120 "reveille dev says what runs" grep -q 'Paste into another terminal' "$tmp/dev.log"
rv wake s1 --input '"again"' --wait > "$tmp/out" 2> /dev/null
grep -q 'got again' "$tmp/out" || fail "the second start ran: $(cat "$tmp/out")"
events s1 'got again' | grep -q 'got hello' || fail "the second start has lost the events of the first"

echo "e2e: passed"
