"""Products of a few rows with quantised weights on CUDA: each weight is read once for all rows.

MLX's own product of fewer than eight rows reads all weights again for every row. Of a row, what is
computed here does not depend on the other rows of the batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias, cast

import mlx.core as mx
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

TILE_ROWS = 8  # of the tensor kernel
TILES = (1, 2, 4)
ALIKE_ROWS = (4, 7)
DTYPES = (mx.bfloat16, mx.float16)
GROUPS = (32, 64, 128)
Quantized: TypeAlias = QuantizedEmbedding | QuantizedLinear


# Two 16-bit numbers are in one register. `fma.rn` exists from compute capability 8.0 on, `mul` and
# `add` for bfloat16 only from 9.0 on.
HEADER = r"""
namespace keepwarm {

template <typename T> struct Pairs;

template <> struct Pairs<__nv_bfloat16> {
  static constexpr unsigned ONE = 0x3F803F80;

  static __device__ __forceinline__ unsigned twice(__nv_bfloat16 value) {
    unsigned bits = __bfloat16_as_ushort(value);
    return bits | (bits << 16);
  }

  static __device__ __forceinline__ unsigned fma(unsigned a, unsigned b, unsigned c) {
    unsigned result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
  }

  static __device__ __forceinline__ void mma(
      float* sums, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }

  // Four bits in each half: 128 + q, then minus 128, both exact.
  static __device__ __forceinline__ unsigned from_nibbles(unsigned bits) {
    return fma((bits & 0x000F000F) | 0x43004300, ONE, 0xC300C300);
  }

  static __device__ __forceinline__ unsigned from_bytes(unsigned bits) {
    float low = __uint_as_float(0x4B000000 | (bits & 0xFF)) - 8388608.0f;
    float high = __uint_as_float(0x4B000000 | ((bits >> 16) & 0xFF)) - 8388608.0f;
    return (__float_as_uint(low) >> 16) | (__float_as_uint(high) & 0xFFFF0000);  // exact
  }

  static __device__ __forceinline__ float low(unsigned pair) {
    return __uint_as_float(pair << 16);
  }

  static __device__ __forceinline__ float high(unsigned pair) {
    return __uint_as_float(pair & 0xFFFF0000);
  }

  static __device__ __forceinline__ __nv_bfloat16 rounded(float value) {
    return __float2bfloat16_rn(value);
  }
};

template <> struct Pairs<__half> {
  static constexpr unsigned ONE = 0x3C003C00;

  static __device__ __forceinline__ unsigned twice(__half value) {
    unsigned bits = __half_as_ushort(value);
    return bits | (bits << 16);
  }

  static __device__ __forceinline__ unsigned fma(unsigned a, unsigned b, unsigned c) {
    unsigned result;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
  }

  static __device__ __forceinline__ void mma(
      float* sums, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }

  // 1024 + q, then minus 1024, both exact.
  static __device__ __forceinline__ unsigned from_nibbles(unsigned bits) {
    return fma((bits & 0x000F000F) | 0x64006400, ONE, 0xE400E400);
  }

  static __device__ __forceinline__ unsigned from_bytes(unsigned bits) {
    return fma((bits & 0x00FF00FF) | 0x64006400, ONE, 0xE400E400);
  }

  static __device__ __forceinline__ float low(unsigned pair) {
    return __half2float(__ushort_as_half((unsigned short)(pair & 0xFFFF)));
  }

  static __device__ __forceinline__ float high(unsigned pair) {
    return __half2float(__ushort_as_half((unsigned short)(pair >> 16)));
  }

  static __device__ __forceinline__ __half rounded(float value) {
    return __float2half_rn(value);
  }
};

template <typename Dims>
__device__ __forceinline__ int rows_of(const Dims& shape, int ndim) {
  int rows = 1;
  for (int i = 0; i < ndim - 1; ++i) {
    rows *= shape[i];
  }
  return rows;
}

}  // namespace keepwarm

"""

# Tensor cores multiply 16 outputs by 8 rows, 16 inputs at a time; missing rows are zeros. Which
# inputs these are is up to us, as long as weights and rows agree: a thread takes what it can load
# at once, 16 bytes of weights of two outputs. The warps of a block share the inputs among them.
TENSOR_CORES = r"""
  using P = keepwarm::Pairs<T>;
  constexpr int AT_ONCE = 128 / BITS;      // weights in 16 bytes
  constexpr int IN_WORD = 32 / BITS;
  constexpr int LOADS = AT_ONCE / 8;       // of 8 numbers of a row
  constexpr int STRIDE = WARPS * 4 * AT_ONCE;
  __shared__ float parts[WARPS][TILES * 128];

  const int n_inputs = n_words * IN_WORD;
  const int n_groups = n_inputs / GROUP;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int place = lane / 4;
  const int quarter = lane % 4;
  const int first = blockIdx.x * 16;
  const long long upper = min(first + place, n_outputs - 1);
  const long long lower = min(first + place + 8, n_outputs - 1);

  float sums[TILES][4] = {};

#pragma unroll 2
  for (int start = warp * 4 * AT_ONCE; start < n_inputs; start += STRIDE) {
    const int at = start + quarter * AT_ONCE;
    const bool inside = at < n_inputs;
    const int k = inside ? at : 0;
    const uint4 up = __ldcs(reinterpret_cast<const uint4*>(w + upper * n_words + k / IN_WORD));
    const uint4 low = __ldcs(reinterpret_cast<const uint4*>(w + lower * n_words + k / IN_WORD));
    uint4 row[TILES][LOADS];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const int r = tile * 8 + place;
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        row[tile][i] = make_uint4(0, 0, 0, 0);
        if (inside && r < n_rows) {
          row[tile][i] = *reinterpret_cast<const uint4*>(x + (long long)r * n_inputs + k + 8 * i);
        }
      }
    }
    const unsigned scale_up = P::twice(scales[upper * n_groups + k / GROUP]);
    const unsigned scale_low = P::twice(scales[lower * n_groups + k / GROUP]);
    const unsigned bias_up = P::twice(biases[upper * n_groups + k / GROUP]);
    const unsigned bias_low = P::twice(biases[lower * n_groups + k / GROUP]);
    const unsigned ups[4] = {up.x, up.y, up.z, up.w};
    const unsigned lows[4] = {low.x, low.y, low.z, low.w};

#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < IN_WORD / 4; ++j) {
        unsigned a[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int shift = BITS * (2 * j + half);
          const unsigned q_up = ups[i] >> shift;
          const unsigned q_low = lows[i] >> shift;
          a[2 * half] = P::fma(
              BITS == 4 ? P::from_nibbles(q_up) : P::from_bytes(q_up), scale_up, bias_up);
          a[2 * half + 1] = P::fma(
              BITS == 4 ? P::from_nibbles(q_low) : P::from_bytes(q_low), scale_low, bias_low);
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          // Number n of a word goes with number n + half a word, as in the shifted weights.
          unsigned one, other;
          if (BITS == 4) {
            one = j == 0 ? row[tile][i % LOADS].x : row[tile][i % LOADS].y;
            other = j == 0 ? row[tile][i % LOADS].z : row[tile][i % LOADS].w;
          } else {
            one = i % 2 == 0 ? row[tile][(i / 2) % LOADS].x : row[tile][(i / 2) % LOADS].z;
            other = i % 2 == 0 ? row[tile][(i / 2) % LOADS].y : row[tile][(i / 2) % LOADS].w;
          }
          P::mma(
              sums[tile], a[0], a[1], a[2], a[3],
              __byte_perm(one, other, 0x5410), __byte_perm(one, other, 0x7632));
        }
      }
    }
  }

#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      parts[warp][(tile * 4 + i) * 32 + lane] = sums[tile][i];
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < TILES * 128; at += WARPS * 32) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
      sum += parts[i][at];
    }
    const int i = at / 32 % 4;
    const int from = at % 32;
    const int output = first + from / 4 + 8 * (i / 2);
    const int r = at / 128 * 8 + from % 4 * 2 + i % 2;
    if (output < n_outputs && r < n_rows) {
      out[(long long)r * n_outputs + output] = P::rounded(sum);
    }
  }
"""

TENSOR = (
    r"""
  const int n_rows = keepwarm::rows_of(x_shape, x_ndim);
  const int n_outputs = w_shape[0];
  const int n_words = w_shape[1];
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


class Kernel:
    """One of the kernels above. MLX compiles it in the first evaluation that needs it."""

    name: str
    source: str
    inputs: tuple[str, ...] = ("x", "w", "scales", "biases")
    bits: tuple[int, ...]
    outputs_of_block: int
    warps = 8  # of a block; each has 32 threads

    def __init__(self) -> None:
        self._call: Any = mx.fast.cuda_kernel(
            name=self.name,
            input_names=list(self.inputs),
            output_names=["out"],
            source=self.source,
            header=HEADER,
        )

    def run(self, arguments: dict[str, Any]) -> mx.array:
        (result,) = self._call(**arguments)
        return cast("mx.array", result)

    @classmethod
    def can_multiply(cls, module: Quantized) -> bool:
        return (
            module.mode == "affine"
            and module.bits in cls.bits
            and module.group_size in GROUPS
            and module["scales"].dtype in DTYPES
        )

    @classmethod
    def launch(cls, x: mx.array, module: Quantized, **constants: int) -> dict[str, Any]:
        """What all kernels are called with. Every other constant is another one to compile."""
        n_outputs = module["weight"].shape[-2]
        n_blocks = -(-n_outputs // cls.outputs_of_block)
        template = {"T": x.dtype, "GROUP": module.group_size, "WARPS": cls.warps, **constants}
        return {
            "inputs": [x, module["weight"], module["scales"], module["biases"]],
            "template": list(template.items()),
            "grid": (n_blocks * cls.warps * 32, 1, 1),
            "threadgroup": (cls.warps * 32, 1, 1),
            "output_shapes": [(*x.shape[:-1], n_outputs)],
            "output_dtypes": [x.dtype],
        }


class RowKernel(Kernel, ABC):
    """Multiplies rows by one matrix."""

    row_counts: range  # that it is meant for
    is_exact: bool  # whether results are bit for bit MLX's

    def __call__(self, x: mx.array, module: Quantized) -> mx.array:
        return self.run(self.arguments(x, module))

    @classmethod
    @abstractmethod
    def arguments(cls, x: mx.array, module: Quantized) -> dict[str, Any]:
        """What the kernel is run with."""


class AlikeKernel(RowKernel):
    """Rows as MLX computes one."""

    name = "keepwarm_alike"
    source = ALIKE
    bits = (4,)
    row_counts = range(3, ALIKE_ROWS[-1] + 1)
    is_exact = True
    outputs_of_block = Kernel.warps

    @classmethod
    def arguments(cls, x: mx.array, module: Quantized) -> dict[str, Any]:
        n_rows = x.size // x.shape[-1]
        return cls.launch(x, module, ROWS=next(n for n in ALIKE_ROWS if n_rows <= n))


class TensorKernel(RowKernel):
    """On tensor cores, with sums in fp32."""

    name = "keepwarm_tensor"
    source = TENSOR
    bits = (4, 8)
    row_counts = range(TILE_ROWS, TILES[-1] * TILE_ROWS + 1)
    is_exact = False
    outputs_of_block = 16

    @classmethod
    def arguments(cls, x: mx.array, module: Quantized) -> dict[str, Any]:
        n_rows = x.size // x.shape[-1]
        tiles = next(n for n in TILES if n_rows <= n * TILE_ROWS)
        return cls.launch(x, module, BITS=module.bits, TILES=tiles)
