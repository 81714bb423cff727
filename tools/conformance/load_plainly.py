"""Loads a checkpoint in transformers with no option at all, as a user would first. Run in the environment hf-awq.

load_plainly.py CHECKPOINT
"""

from __future__ import annotations

import sys

from transformers import AutoModelForImageTextToText

if __name__ == "__main__":
    model, info = AutoModelForImageTextToText.from_pretrained(sys.argv[1], dtype="auto", output_loading_info=True)
    problems = {kind: keys for kind, keys in info.items() if keys}
    print(problems or type(model).__name__)
    sys.exit(1 if problems else 0)
