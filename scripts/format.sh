#!/bin/bash
# Formats all C and C++ files with clang-format 14 and all Python files with ruff. --check changes nothing and fails
# where something would change.
set -euo pipefail
cd "$(dirname "$0")/.."

clang_options=(-i)
ruff_options=()
if [[ ${1:-} == --check ]]; then
  clang_options=(--dry-run --Werror)
  ruff_options=(--check)
fi

find include src tests bench examples fuzz python \( -name '*.h' -o -name '*.c' -o -name '*.cc' \) -type f -print0 |
  xargs -0 clang-format-14 "${clang_options[@]}"
"${PHSA_VENV:-.venv}/bin/ruff" format "${ruff_options[@]}" python tests/e2e tests/cuda bench scripts/*.py
"${PHSA_VENV:-.venv}/bin/ruff" check python tests/e2e tests/cuda bench scripts/*.py
