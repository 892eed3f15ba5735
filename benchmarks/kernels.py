"""Kernels that are measured beside the one that is used: `benchmarks.decode`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from keepwarm.models.product_kernels import (
    TENSOR_CORES,
    Kernel,
    Quantized,
    RowKernel,
    TensorKernel,
)

MAX_ALIKE = 8  # rows

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

# As MLX's `qmv` for one row and four bits, by its machine code for compute capability 9.0: a warp
# has one output, a thread sixteen inputs at a time, and its sums are of the type of the row. So
# results are bit for bit those of that kernel.
ALIKE = r"""
  using P = keepwarm::Pairs<T>;
  const int n_rows = keepwarm::rows_of(x_shape, x_ndim);
  const int n_outputs = w_shape[0];
  const int n_words = w_shape[1];
  const int n_inputs = n_words * 8;
  const int n_groups = n_inputs / GROUP;
  const int lane = threadIdx.x % 32;
  const long long output = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
  if (output >= n_outputs) {
    return;
  }
  const unsigned SELECT[4] = {0x0400, 0x0501, 0x0602, 0x0703};
  unsigned sums[ROWS][8] = {};

#pragma unroll 2
  for (int k = lane * 16; k < n_inputs; k += 512) {
    const uint2 words = *reinterpret_cast<const uint2*>(w + output * n_words + k / 8);
    const unsigned scale = P::twice(scales[output * n_groups + k / GROUP]);
    const unsigned bias = P::twice(biases[output * n_groups + k / GROUP]);
    unsigned weights[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const unsigned word = i < 4 ? words.x : words.y;
      const unsigned pair = __byte_perm(word, word >> 4, SELECT[i % 4]);
      weights[i] = P::fma(P::from_nibbles(pair), scale, bias);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const T* row = x + (long long)min(r, n_rows - 1) * n_inputs + k;
      const uint4 one = *reinterpret_cast<const uint4*>(row);
      const uint4 two = *reinterpret_cast<const uint4*>(row + 8);
      const unsigned values[8] = {one.x, one.y, one.z, one.w, two.x, two.y, two.z, two.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sums[r][i] = P::fma(values[i], weights[i], sums[r][i]);
      }
    }
  }

#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum += P::low(sums[r][i]);
      sum += P::high(sums[r][i]);
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      sum += __shfl_xor_sync(0xFFFFFFFF, sum, mask);
    }
    if (lane == 0 && r < n_rows) {
      out[r * n_outputs + output] = P::rounded(sum);
    }
  }
"""


class FourWarps(TensorKernel):
    name = "keepwarm_tensor_4"
    warps = 4
    max_rows = 8


class SixteenWarps(TensorKernel):
    name = "keepwarm_tensor_16"
    warps = 16
    max_rows = 8


class AlikeKernel(RowKernel):
    """Rows as MLX computes one."""

    name = "keepwarm_alike"
    source = ALIKE
    bits = (4,)
    max_rows = MAX_ALIKE
    outputs_of_block = Kernel.warps

    @classmethod
    def arguments(cls, x: mx.array, module: Quantized) -> dict[str, Any]:
        n_rows = x.size // x.shape[-1]
        return cls.launch(x, module, ROWS=next(n for n in (1, 2, 4, MAX_ALIKE) if n_rows <= n))


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
