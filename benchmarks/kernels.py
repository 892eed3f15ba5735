"""A kernel that is measured and not used yet: `benchmarks.decode`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from keepwarm.models.row_products import TENSOR_CORES, Kernel, Quantized

# A block has one row and one of its experts; the rows of x have equally many experts each.
EXPERTS = (
    r"""
  const int n_rows = 1;
  const int n_outputs = w_shape[1];
  const int n_words = w_shape[2];
  const long long pair = blockIdx.y;
  const long long expert = experts[pair];
  const long long row_of_pair = pair / (gridDim.y / keepwarm::rows_of(x_shape, x_ndim));
  x += row_of_pair * n_words * (32 / BITS);
  w += expert * n_outputs * n_words;
  scales += expert * n_outputs * n_words * (32 / BITS) / GROUP;
  biases += expert * n_outputs * n_words * (32 / BITS) / GROUP;
  out += pair * n_outputs;
"""
    + TENSOR_CORES
)


class ExpertKernel(Kernel):
    """Multiplies each row by its experts, on tensor cores."""

    name = "keepwarm_experts"
    source = EXPERTS
    inputs = ("x", "w", "scales", "biases", "experts")
    bits = (4, 8)
    outputs_of_block = 16

    def __call__(self, x: mx.array, module: Quantized, experts: mx.array) -> mx.array:
        return self.run(self.arguments(x, module, experts))

    @classmethod
    def arguments(cls, x: mx.array, module: Quantized, experts: mx.array) -> dict[str, Any]:
        """`x` has one row for each expert, or for all experts of one row."""
        launch = cls.launch(x, module, BITS=module.bits, TILES=1)
        width = launch["grid"][0]
        (shape,) = launch["output_shapes"]
        return launch | {
            "inputs": [*launch["inputs"], experts],
            "grid": (width, experts.size, 1),
            "output_shapes": [(*experts.shape, 1, shape[-1])],
        }
