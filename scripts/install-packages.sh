#!/bin/bash
# Installs those packages of packages/debian.txt that are missing.
#
#   scripts/install-packages.sh build test     # the groups that are wanted
#
# Does nothing at all when none is missing. PHSA_SKIP_PACKAGES=1 skips it, for systems that are not Debian.
set -euo pipefail
cd "$(dirname "$0")/.."

[[ ${PHSA_SKIP_PACKAGES:-0} == 1 ]] && exit 0

wanted=()
while read -r package groups; do
  [[ -z $package || $package == \#* ]] && continue
  for group in "$@"; do
    if [[ " $groups " == *" $group "* ]]; then
      wanted+=("$package")
      break
    fi
  done
done <packages/debian.txt

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "phsa: this system has no apt. Install what these Debian packages hold, then set PHSA_SKIP_PACKAGES=1:" >&2
  echo "  ${wanted[*]}" >&2
  exit 1
fi

missing=()
for package in "${wanted[@]}"; do
  status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
  # Several architectures of one package give one word each.
  [[ $status == *installed* && $status != *not-installed* ]] || missing+=("$package")
done
[[ ${#missing[@]} == 0 ]] && exit 0

as_root=()
if [[ $(id -u) != 0 ]]; then
  # Asked for a password here, once, and not in the middle.
  if ! command -v sudo >/dev/null || ! sudo true; then
    echo "phsa: these Debian packages are missing, and neither is this root nor does sudo make it so. As root, run:" >&2
    echo "  apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -y --no-install-recommends)

echo "phsa: installing ${#missing[@]} Debian packages: ${missing[*]}"
# Fetching the package lists is worth it only where they do not know a package, or know one that has moved on.
fresh=0
update() {
  "${apt[@]}" update </dev/null
  fresh=1
}
for package in "${missing[@]}"; do
  if [[ $fresh == 0 && -z $(apt-cache madison "$package" 2>/dev/null) ]]; then update; fi
done
if ! "${apt[@]}" install "${missing[@]}" </dev/null; then
  [[ $fresh == 0 ]] || exit 1
  update
  "${apt[@]}" install "${missing[@]}" </dev/null
fi
