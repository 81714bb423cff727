"""ONNX graphs of Qwen3-VL, built from the weights by name and the config: float and quantised."""
