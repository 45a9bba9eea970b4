#!/bin/bash
# Builds the image of the Containerfile where no registry can be reached: on a Debian made from the packages of the
# mirrors that apt knows here.
#
#   packaging/make-image.sh [--cuda] [--try]     # build/image/phsa.tar or phsa-cuda.tar, an OCI archive
#
# Load it with `podman load -i` or `docker load -i`. --try runs scripts/demo.sh inside, with the models of this user's
# cache. An nvcc and a ccache of this machine are lent to the build. Needs root (or what buildah asks of other users).
set -euo pipefail
cd "$(dirname "$0")/.."

name=phsa cuda=OFF try=0
for flag in "$@"; do
  case $flag in
    --cuda) name=phsa-cuda cuda=ON ;;
    --try) try=1 ;;
    *) echo "packaging/make-image.sh: $flag is not one of --cuda, --try" >&2 && exit 2 ;;
  esac
done
scripts/install-packages.sh image

# A chroot is enough for our steps, and needs no container runtime.
export BUILDAH_ISOLATION=chroot
out=build/image
mkdir -p "$out"
if ! buildah inspect --type image phsa-base >/dev/null 2>&1; then
  scripts/debian-root.sh "$out/base.tar" --variant=minbase
  container=$(buildah from scratch)
  buildah add --quiet "$container" "$out/base.tar" /
  buildah commit --quiet --rm "$container" phsa-base
  rm "$out/base.tar"
fi

lent=()
if nvcc=$(command -v nvcc); then lent+=(--volume "$(realpath "$(dirname "$nvcc")/.."):/usr/local/cuda:ro"); fi
if cache=$(ccache --get-config cache_dir 2>/dev/null); then lent+=(--volume "$cache:/var/cache/ccache:rw"); fi
buildah build --pull-never --layers=false --build-arg BASE=localhost/phsa-base --build-arg CUDA=$cuda "${lent[@]}" \
  --tag "$name" -f Containerfile .
rm -f "$out/$name.tar"
buildah push --quiet "$name" "oci-archive:$PWD/$out/$name.tar:$name:latest"
ls -sh "$out/$name.tar"

if [[ $try == 1 ]]; then
  # What scripts/demo.sh reads, in a folder where the image's user may write.
  demo=$(mktemp -d)
  container=$(buildah from --pull-never "$name")
  trap 'buildah rm "$container" >/dev/null; rm -rf "$demo"' EXIT
  mkdir -p "$demo/bench" "$demo/demo"
  cp -r scripts models "$demo"
  cp -r bench/data "$demo/bench"
  chmod -R a+rwX "$demo"
  models=()
  cache=${PHSA_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/phsa}
  if [[ -d $cache ]]; then models+=(--volume "$cache:/cache:ro" --env PHSA_CACHE=/cache); fi
  run() {
    echo "\$ $*"
    buildah run "${models[@]}" --volume "$demo:/demo:rw" "$container" -- "$@"
  }
  run phsa --version
  run phsa info
  run /demo/scripts/demo.sh /usr/local/bin --quick
fi
