#!/usr/bin/env bash
# The steps of action.yml: `install` makes a virtual environment, `evaluate` runs qvlopt and ends with its exit status.
# Lists come one value a line. qvlopt itself writes the step's summary and its outputs `verdict` and `report`.
set -euo pipefail

lines() { # prints the lines of $1 that are not blank, without spaces around them
  sed -e 's/^[[:space:]]*//' -e 's/[[:space:]]*$//' -e '/^$/d' <<<"$1"
}

install() {
  local here what venv arguments
  here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  what=${QVLOPT_INSTALL:-this}
  [ "$what" = this ] && what=$here
  venv=${RUNNER_TEMP:?}/qvlopt-venv
  mapfile -t arguments < <(lines "${QVLOPT_PIP_ARGUMENTS:-}")
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check ${arguments[@]+"${arguments[@]}"} "$what"
  echo "$venv/bin" >>"${GITHUB_PATH:?}"
}

evaluate() {
  local result words setting candidates marker status python
  result=$(mktemp)
  words=(evaluate --json --recipe "${QVLOPT_RECIPE:-demo}")
  [ -n "${QVLOPT_MODEL:-}" ] && words+=(--model "$QVLOPT_MODEL")
  while IFS= read -r setting; do words+=(--set "$setting"); done < <(lines "${QVLOPT_SETTINGS:-}")
  mapfile -t candidates < <(lines "${QVLOPT_CANDIDATES:-}")
  # an empty key is no key
  [ -n "${QVLOPT_API_KEY:-}" ] || unset QVLOPT_API_KEY

  # qvlopt escapes what models say; libraries below it may not, so the runner takes no command from what is printed here
  marker=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
  echo "::stop-commands::$marker"
  status=0
  qvlopt "${words[@]}" -- ${candidates[@]+"${candidates[@]}"} >"$result" || status=$?
  echo
  echo "::$marker::"

  python=$(dirname "$(command -v qvlopt)")/python
  [ -x "$python" ] || python=${PYTHON:-python3}
  "$python" -m qvlopt.report.github "$result"
  [ -n "${GITHUB_OUTPUT:-}" ] && echo "exit_code=$status" >>"$GITHUB_OUTPUT"
  rm -f "$result"
  exit "$status"
}

case ${1:-} in
  install) install ;;
  evaluate) evaluate ;;
  *) echo "usage: action.sh install|evaluate" >&2; exit 2 ;;
esac
