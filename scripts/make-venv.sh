#!/bin/bash
# Makes the virtual environment with the packages of packages/python.txt: .venv, or PHSA_VENV.
#
#   scripts/make-venv.sh [bench]     # bench: with the peers that `make bench` compares with
#
# Does nothing when the environment holds this very list already.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${PHSA_VENV:-.venv}
list=packages/python.txt
group=${1:-}
stamp=$venv/phsa-packages$group-$(sha256sum "$list" | cut -c1-16)

[[ -e $stamp && -x $venv/bin/python ]] && exit 0

# Debian's own interpreter where there is one: other ones on the PATH may have been built without what torch needs.
python=/usr/bin/python3
[[ -x $python ]] || python=python3

if ! [[ -x $venv/bin/python ]]; then
  echo "phsa: making the virtual environment $venv"
  "$python" -m venv "$venv"
fi
echo "phsa: installing the Python packages of $list into $venv (torch brings about 3 GB; minutes)"
wanted=()
while read -r package _ only; do
  [[ -z $package || $package == \#* ]] && continue
  [[ -z $only || $only == "$group" ]] && wanted+=("$package")
done <"$list"
"$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off "${wanted[@]}" </dev/null
rm -f "$venv/phsa-packages$group"-*
touch "$stamp"
