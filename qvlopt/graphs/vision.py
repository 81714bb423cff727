"""The vision tower as an ONNX graph of one picture of any size; `model.vision.VisionTower` is the same in torch.

What depends on the grid alone (resampled positions, rotary angles) comes in from the host, which keeps it for the next
picture of that size. Attention is over all patches of the one picture, so it has neither mask nor bias, which is what
onnxruntime's fast path needs. Letters in shapes as in `names`.
"""

from __future__ import annotations

from qvlopt.graphs import names
from qvlopt.graphs.weights import QKV_PARTS, Linear, Weights
from qvlopt.graphs.writer import FLOAT, GraphWriter
from qvlopt.model.names import VISION
from qvlopt.model.vision import LAYER_NORM_EPS, VisionConfig

EMBED_STAGE = "stage.embed"
"""Name inside the graph of the first block's input [N, D]; the self-check looks at it."""
_ACTIVATIONS = {"gelu_pytorch_tanh": "FastGelu", "gelu": "Gelu"}


def build_vision(graph: GraphWriter, config: VisionConfig, weights: Weights, linear: Linear) -> None:
    """Adds the whole tower, its inputs and outputs. `weights` and `linear` take canonical names."""
    _Tower(graph, config, weights, linear).build()


class _Tower:
    def __init__(self, graph: GraphWriter, config: VisionConfig, weights: Weights, linear: Linear) -> None:
        self.graph, self.config, self.weights, self.linear = graph, config, weights, linear

    def build(self) -> None:
        graph, config = self.graph, self.config
        x = self._embed()
        cos, sin = (graph.input(name, FLOAT, ("patches", config.head_dim // 2)) for name in (names.ROPE_COS, names.ROPE_SIN))
        y = self._norm("blocks.0.norm1", x)
        taps: list[str] = []
        for index in range(config.depth):
            block = f"blocks.{index}"
            y, x = self._add_norm(f"{block}.norm2", x, self._attention(block, y, cos, sin))
            inner = graph.one(_ACTIVATIONS[config.hidden_act], self._linear(f"{block}.mlp.linear_fc1", y))
            following = f"blocks.{index + 1}.norm1" if index + 1 < config.depth else "merger.norm"
            y, x = self._add_norm(following, x, self._linear(f"{block}.mlp.linear_fc2", inner))
            if index in config.deepstack_visual_indexes:
                tap = f"deepstack_merger_list.{config.deepstack_visual_indexes.index(index)}"
                merged = self._merge(tap, self._norm(f"{tap}.norm", self._side_by_side(x)))
                taps.append(graph.one("Unsqueeze", merged, graph.shape(0)))
        self._merge("merger", self._side_by_side(y), output=names.IMAGE_EMBEDS)
        graph.output(names.IMAGE_EMBEDS, FLOAT, ("tokens", config.out_hidden_size))
        if taps:
            graph.one("Concat", *taps, name=names.DEEPSTACK, axis=0)
            graph.output(names.DEEPSTACK, FLOAT, (len(taps), "tokens", config.out_hidden_size))

    def _embed(self) -> str:
        """The convolution's stride equals its kernel: one product a patch."""
        graph, config, layer = self.graph, self.config, f"{VISION}.patch_embed.proj"
        pixels = graph.input(names.PIXEL_VALUES, FLOAT, ("patches", config.patch_dim))
        positions = graph.input(names.POS_EMBEDS, FLOAT, ("patches", config.hidden_size))
        weight = graph.weight(f"{layer}.weight", self.weights(f"{layer}.weight").flatten(1))
        patches = graph.one("Gemm", pixels, weight, self._parameter("patch_embed.proj.bias"), transB=1)
        return graph.one("Add", patches, positions, name=EMBED_STAGE)

    def _attention(self, block: str, y: str, cos: str, sin: str) -> str:
        graph, width = self.graph, self.config.hidden_size
        parts = self.linear(graph, [f"{VISION}.{block}.attn.qkv.{part}" for part in QKV_PARTS], y)
        q, k, v = (graph.one("Unsqueeze", part, graph.shape(0)) for part in parts)
        q, k = (graph.one("RotaryEmbedding", part, graph.shape(0), cos, sin) for part in (q, k))
        attended = graph.one("MultiHeadAttention", q, k, v, num_heads=self.config.num_heads)
        return self._linear(f"{block}.attn.proj", graph.one("Reshape", attended, graph.shape(-1, width)))

    def _side_by_side(self, x: str) -> str:
        """[N, D] to [M, merge**2 * D]."""
        return self.graph.one("Reshape", x, self.graph.shape(-1, self.config.spatial_merge_size**2 * self.config.hidden_size))

    def _merge(self, name: str, x: str, output: str = "") -> str:
        inner = self.graph.one("Gelu", self._linear(f"{name}.linear_fc1", x))
        merged = self._linear(f"{name}.linear_fc2", inner)
        return self.graph.one("Identity", merged, name=output) if output else merged

    def _linear(self, name: str, x: str) -> str:
        return self.linear(self.graph, [f"{VISION}.{name}"], x)[0]

    def _norm(self, name: str, x: str) -> str:
        scale, bias = self._parameter(f"{name}.weight"), self._parameter(f"{name}.bias")
        return self.graph.one("LayerNormalization", x, scale, bias, axis=-1, epsilon=LAYER_NORM_EPS)

    def _add_norm(self, name: str, x: str, change: str) -> tuple[str, str]:
        """(normalised, sum) of x + change. SkipLayerNormalization does both at once, in six times the time."""
        total = self.graph.one("Add", x, change, name=f"{name}.input")
        return self._norm(name, total), total

    def _parameter(self, name: str) -> str:
        return self.graph.weight(f"{VISION}.{name}", self.weights(f"{VISION}.{name}"))
