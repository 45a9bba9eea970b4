#!/bin/bash
# Unpacks Debian packages into a folder or a tar file, from the mirrors that apt knows here; flags go to mmdebstrap.
#
#   scripts/debian-root.sh TARGET --variant=extract --architectures=arm64 --include=libhwy-dev
set -euo pipefail

target=$1
shift
release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
mirrors=$(apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' \
  'Origin: Debian' 2>/dev/null | grep -E " ${release:-none}(-[a-z]+)? " | sort -u || true)
if [[ -n $mirrors ]]; then
  mmdebstrap --quiet "$@" "$release" "$target" - <<<"$mirrors"
else
  mmdebstrap --quiet "$@" bookworm "$target"
fi
