#!/usr/bin/env bash
# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
# Runs the core suite on every supported Transformers version, each in a virtual environment of its own (.venv-VERSION).
# Usage: tests/matrix.sh [VERSION ...]; without arguments, all of them. "newest" is what the package index has.
set -euo pipefail
cd "$(dirname "$0")/.."

versions=("$@")
if [ ${#versions[@]} -eq 0 ]; then
    versions=(4.57.6 5.0.0 5.12.1 5.20.2 newest)
fi

failed=()
table=$'| transformers | core suite |\n|---|---|'
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for version in "${versions[@]}"; do
    pinned=$version
    if [ "$version" = newest ]; then
        pinned=$("${PYTHON:-python3}" -m pip index versions transformers 2>/dev/null | sed -nE '1s/.*\((.*)\)/\1/p')
        if [ -z "$pinned" ]; then
            echo "matrix: the package index does not say which Transformers is newest" >&2
            exit 1
        fi
    fi
    echo "matrix: transformers $pinned"
    make core VENV=".venv-$pinned" TRANSFORMERS="$pinned" PYTHON="${PYTHON:-python3}" TORCH="${TORCH:-}" \
        CORE_TESTS="${CORE_TESTS:-tests/core}" TEST_ARGS="--quiet ${TEST_ARGS:-}" | tee "$log" || failed+=("$pinned")
    # One line for the tests that ran side by side, one for those that measure time.
    results=$(grep -E '[0-9]+ (passed|failed|error)' "$log" | paste -sd ';' | sed 's/;/; /' || true)
    table+=$'\n'"| $pinned | ${results:-did not run} |"
done

echo "$table"
if [ ${#failed[@]} -gt 0 ]; then
    echo "matrix: failed on transformers ${failed[*]}" >&2
    exit 1
fi
echo "matrix: all passed"
