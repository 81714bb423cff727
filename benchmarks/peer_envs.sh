#!/usr/bin/env bash
# Makes the environments of benchmarks/peers.py, one a peer, and llama.cpp's programs, for a CPU:
#   serve, optimum   those of tools/conformance/make_envs.sh: transformers 5.24; optimum-intel 2.2 with OpenVINO GenAI 2026.4
#   llama            Python for llama.cpp's converter, and llama-server and llama-quantize built from a checkout
# usage: LLAMA_CPP_SOURCE=CHECKOUT benchmarks/peer_envs.sh FOLDER [serve|optimum|llama]...     all of them when none is named
# CHECKOUT is llama.cpp at the tag that is to be measured (b11434 when this was written), cloned by you. Two build jobs.
set -euo pipefail

here=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:?usage: peer_envs.sh FOLDER [serve|optimum|llama]...}
shift
[ $# -gt 0 ] || set -- serve optimum llama

make_llama() {
  local source=${LLAMA_CPP_SOURCE:?LLAMA_CPP_SOURCE is not set: a checkout of llama.cpp}
  "${PYTHON:-python3.11}" -m venv "$folder/llama"
  "$folder/llama/bin/pip" install --quiet --upgrade pip
  "$folder/llama/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy sentencepiece protobuf safetensors pyyaml
  cmake -S "$source" -B "$folder/llama/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF
  cmake --build "$folder/llama/build" --config Release -j 2 --target llama-server llama-quantize
  ln -sfn "$(cd "$source" && pwd)" "$folder/llama/source"
  git -C "$source" describe --tags --always > "$folder/llama/version"
  touch "$folder/llama/finished"
}

for name; do
  case $name in
    serve | optimum) "$here/tools/conformance/make_envs.sh" "$folder" "$name" ;;
    llama) [ -e "$folder/llama/finished" ] || make_llama ;;
    *) echo "peer_envs.sh: there is no environment '$name'" >&2; exit 2 ;;
  esac
done
