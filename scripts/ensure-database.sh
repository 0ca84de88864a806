#!/usr/bin/env bash
# Makes sure that there is a database server for `make run` and `make test`: silent where there is one, else it installs
# PostgreSQL, else it says in one line what to type. It looks where internal/localdb looks.
set -euo pipefail

oldest=15

# new_enough DIR: DIR has a PostgreSQL server that Reveille runs on.
new_enough() {
  [ -x "$1/postgres" ] && [ -x "$1/initdb" ] || return 1
  local version
  version=$("$1/postgres" --version 2>/dev/null) || return 1 # postgres (PostgreSQL) 15.18 (Debian …)
  version=${version#*) }
  version=${version%%[!0-9]*}
  [ -n "$version" ] && [ "$version" -ge "$oldest" ]
}

have_server() {
  [ -z "${RV_DATABASE_URL:-}${RV_TEST_DATABASE_URL:-}" ] || return 0
  ! command -v cockroach >/dev/null || return 0
  local postgres dir
  if postgres=$(command -v postgres) && new_enough "$(dirname "$postgres")"; then
    return 0
  fi
  for dir in /usr/lib/postgresql/*/bin /usr/pgsql-*/bin \
    /opt/homebrew/opt/postgresql@*/bin /usr/local/opt/postgresql@*/bin; do
    if new_enough "$dir"; then
      return 0
    fi
  done
  return 1
}

fail() {
  echo "no database server found, and $1: $2 (or put cockroach on PATH, or set RV_DATABASE_URL)" >&2
  exit 1
}

# The server that the package would start for itself is not wanted: Reveille starts its own.
install_apt() {
  local conf=/etc/postgresql-common/createcluster.conf
  if [ ! -e "$conf" ]; then
    "${as_root[@]}" mkdir -p "${conf%/*}"
    echo 'create_main_cluster = false' | "${as_root[@]}" tee "$conf" >/dev/null
  fi
  "${as_root[@]}" apt-get update &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive UCF_FORCE_CONFFOLD=1 \
      apt-get install -y --no-install-recommends -o Dpkg::Options::=--force-confold postgresql
}

if have_server; then
  exit 0
fi

as_root=()
may_root=true
if [ "$(id -u)" -ne 0 ]; then
  if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root=(sudo -n)
  else
    may_root=false
  fi
fi

if command -v apt-get >/dev/null; then
  line="type sudo apt-get install postgresql"
  "$may_root" || fail "this user may not install one" "$line"
  echo "installing PostgreSQL with apt-get" >&2
  install_apt >&2 || fail "apt-get failed" "$line"
elif command -v dnf >/dev/null; then
  line="type sudo dnf install postgresql-server"
  "$may_root" || fail "this user may not install one" "$line"
  echo "installing PostgreSQL with dnf" >&2
  "${as_root[@]}" dnf install -y postgresql-server >&2 || fail "dnf failed" "$line"
elif command -v brew >/dev/null; then
  line="type brew install postgresql@17"
  echo "installing PostgreSQL with brew" >&2
  brew install postgresql@17 >&2 || fail "brew failed" "$line"
else
  fail "there is none of apt-get, dnf and brew here" "install PostgreSQL $oldest or later your system's way"
fi

have_server || fail "what was installed is older than PostgreSQL $oldest" "install a newer one"
