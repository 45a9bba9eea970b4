#!/bin/bash
# Installs a build into a temporary prefix, builds the two examples against it through CMake and through pkg-config,
# and runs them. Nothing but the prefix may be needed: no header or library of the source tree.
#
#   scripts/test-install.sh build/release
set -euo pipefail
cd "$(dirname "$0")/.."

build=$1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
prefix=$scratch/prefix

cmake --install "$build" --prefix "$prefix" >"$scratch/install.log"
# Moved as a whole after the install, so that a path that was fixed too early shows.
mv "$prefix" "$scratch/moved"
prefix=$scratch/moved
libdir=$(dirname "$(find "$prefix" -name 'libphsa.*' | head -n 1)")
export PKG_CONFIG_PATH=$libdir/pkgconfig

# Made from the program's flags as it is installed.
if [[ -x $prefix/bin/phsa ]]; then
  bash -c "source '$prefix/share/bash-completion/completions/phsa'; COMP_WORDS=(phsa ru); COMP_CWORD=1; _phsa
    [[ \${COMPREPLY[*]} == run ]]"
  grep -q '^#compdef phsa' "$prefix/share/zsh/site-functions/_phsa"
  grep -q '^complete -c phsa' "$prefix/share/fish/vendor_completions.d/phsa.fish"
  grep -q '^\.SS phsa run' "$prefix/share/man/man1/phsa.1"
fi

# The examples lie outside the tree, as a user's program would.
cp -r examples "$scratch/examples"

Run() {
  local name=$1
  shift
  echo "== $name"
  "$@" | tee "$scratch/output"
  # The share of tokens read is between nothing and everything; the four outputs are finite numbers.
  awk '/^tokens read: / { share = $6; sub(/^\(/, "", share); share += 0 }
       /^last query/ { for (i = NF - 3; i <= NF; ++i) if ($i !~ /^-?[0-9]+\.[0-9]+$/) exit 1; values = 1 }
       END { if (!(share > 0 && share < 100 && values)) exit 1 }' "$scratch/output" ||
    { echo "$name: unexpected output" >&2; exit 1; }
}

for language in c cpp; do
  cmake -S "$scratch/examples/$language" -B "$scratch/build-$language" -DCMAKE_PREFIX_PATH="$prefix" \
    -DCMAKE_BUILD_TYPE=Release >"$scratch/configure.log" || { cat "$scratch/configure.log" >&2; exit 1; }
  cmake --build "$scratch/build-$language" >"$scratch/build.log" || { cat "$scratch/build.log" >&2; exit 1; }
  Run "$language, find_package" "$scratch/build-$language/attention"
done

read -ra flags <<<"$(pkg-config --cflags --libs phsa) -Wl,-rpath,$libdir"
"${CC:-cc}" -Wall "$scratch/examples/c/attention.c" -o "$scratch/attention_c" "${flags[@]}" -lm
Run "c, pkg-config" "$scratch/attention_c"
"${CXX:-c++}" -std=c++20 -Wall "$scratch/examples/cpp/attention.cc" -o "$scratch/attention_cpp" "${flags[@]}"
Run "cpp, pkg-config" "$scratch/attention_cpp"

[[ $(pkg-config --modversion phsa) == "$(sed -n 's/^project(phsa VERSION \([0-9.]*\) .*/\1/p' CMakeLists.txt)" ]]
