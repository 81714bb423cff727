"""Runs llama.cpp's own convert_hf_to_gguf.py on a checkpoint whose tokenizer it does not know, such as one with random weights.

    peer_llama_convert.py LLAMA_CPP_SOURCE ARGUMENTS_OF_convert_hf_to_gguf...

It names a tokenizer's splitting rule by a hash of what it does to a test text; here it is Qwen2's, which all of Qwen's are.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    source, *arguments = sys.argv[1:]
    sys.path[:0] = [source, str(Path(source) / "gguf-py")]
    script = str(Path(source) / "convert_hf_to_gguf.py")
    sys.argv = [script, *arguments]
    names = runpy.run_path(script, run_name="convert_hf_to_gguf")
    model = names.get("TextModel") or sys.modules["conversion.base"].TextModel
    model.get_vocab_base_pre = lambda _self, _tokenizer: "qwen2"
    names["main"]()


if __name__ == "__main__":
    main()
