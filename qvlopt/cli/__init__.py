"""The command line: Typer and Rich over `qvlopt.api`. Loads no torch, numpy, transformers or onnxruntime by itself."""
