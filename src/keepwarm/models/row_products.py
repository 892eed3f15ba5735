"""How the rows of a batch are multiplied by weights, by what is faster on this device.

On CUDA, by quantised weights. mlx-lm's models give MLX a batch of n sequences as n matrices of one
row, and that costs n times one row. Which way is better depends on the number of rows:

- One row or two: always MLX's own way. A kernel of ours costs the host more for each call than one
  of MLX, and such a step is over before the host has enqueued the next.
- 3 to 7 rows: a kernel that computes each row bit for bit as MLX computes one, and reads the
  weights once for all. It is used only if its results here are equal to MLX's.
- 8 to 32 rows: a kernel on tensor cores. From eight rows on MLX's results are not those of one row
  anyway; those of this kernel are as exact, and do not depend on the number of rows.
- More rows, and from eight on where no kernel fits the weights: MLX's own product of one matrix.
- Rows of which each has its own experts: from 128 pairs of a row and an expert on, a kernel on
  tensor cores.

Each is used only if it was measured to be faster than MLX's own way, for the modules of each shape,
and with what it costs the host: products are measured as decode steps are run, the next begun while
the device computes. What was measured is kept between starts. Measuring compiles kernels, which
takes minutes on a new machine: it is done while the engine is idle, and until then rows are
multiplied in MLX's own way.

On a CPU, by plain weights: a few rows one by one, each bit for bit as it is alone, where the BLAS
takes longer for them as one matrix.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from keepwarm import blas
from keepwarm.device import kernels
from keepwarm.state_file import MACHINE, StateFile

# The kernels: each weight is read once for all rows. Of a row, what they compute does not depend on
# the other rows of the batch.

TILE_ROWS = 8  # of the tensor kernel
TILES = (1, 2, 4)
ALIKE_ROWS = (4, 7)
DTYPES = (mx.bfloat16, mx.float16)
GROUPS = (32, 64, 128)
Quantized: TypeAlias = QuantizedEmbedding | QuantizedLinear | QuantizedSwitchLinear


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


class Kernel:
    """One of the kernels above. MLX compiles it in the first evaluation that needs it."""

    name: str
    source: str
    inputs: tuple[str, ...] = ("x", "w", "scales", "biases")
    bits: tuple[int, ...]
    ndim = 2  # of the weights
    row_counts: range  # that it is meant for
    is_exact = False  # whether results are bit for bit MLX's
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
            and module["weight"].ndim == cls.ndim
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
    outputs_of_block = 16

    @classmethod
    def arguments(cls, x: mx.array, module: Quantized) -> dict[str, Any]:
        n_rows = x.size // x.shape[-1]
        tiles = next(n for n in TILES if n_rows <= n * TILE_ROWS)
        return cls.launch(x, module, BITS=module.bits, TILES=tiles)


class ExpertKernel(Kernel):
    """Multiplies each row by its experts, on tensor cores; pairs count as rows."""

    name = "keepwarm_experts"
    source = EXPERTS
    inputs = (*Kernel.inputs, "experts")
    bits = (4, 8)
    ndim = 3
    row_counts = range(128, 513)  # with fewer it was slower than MLX
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


# What is faster here.

LOG = logging.getLogger(__name__)
TRIAL = 3  # raise it if kernels or the measurement change
# From each of these on, up to the next, one kernel is used. It gains least at the fewest rows.
ROW_COUNTS = (3, 5, 8, 9, 17, 33)
PAIR_COUNTS = (128, 256, ExpertKernel.row_counts.stop)  # the same, of rows and experts
MATRIX_ROWS = 8  # from here on MLX multiplies a matrix on CUDA, below it one row after the other
MARGIN = 0.95  # of the time of `plain`: another way has to be faster than this
ROUNDS = 6
MODULES = 8  # more weights than the cache of a GPU holds, as in a model
MAX_APART = 0.1  # of the mean size of results; rounding makes a tenth of it, another order 1.4

Product: TypeAlias = Callable[..., mx.array]  # of rows, a module, and the rows' experts if any
Names: TypeAlias = dict[int, str]  # of products, each from a number of rows on


def plain(x: mx.array, module: Quantized, *experts: mx.array) -> mx.array:
    """As MLX's own modules multiply; experts are in order, as mlx-lm's models have many pairs."""
    options = {
        "scales": module["scales"],
        "biases": module.get("biases"),
        "transpose": True,
        "group_size": module.group_size,
        "bits": module.bits,
        "mode": module.mode,
    }
    if not experts:
        return mx.quantized_matmul(x, module["weight"], **options)
    (indices,) = experts
    return mx.gather_qmm(x, module["weight"], rhs_indices=indices, sorted_indices=True, **options)


def flat(x: mx.array, module: Quantized) -> mx.array:
    """As one matrix."""
    product = plain(x.reshape(1, -1, x.shape[-1]), module)
    return product.reshape(*x.shape[:-1], -1)


class Products:
    """The ways to multiply that this device has."""

    def __init__(self, kernels: Sequence[RowKernel | ExpertKernel] = ()) -> None:
        self._kernels = {kernel.name: kernel for kernel in kernels}
        self.named: dict[str, Product] = {"plain": plain, "flat": flat, **self._kernels}

    def for_rows(self, n_rows: int, module: Quantized) -> list[str]:
        """What may be used instead of `plain`, the better one first."""
        found = [
            name
            for name, kernel in self._kernels.items()
            if n_rows in kernel.row_counts and kernel.can_multiply(module)
        ]
        is_matrix = n_rows >= MATRIX_ROWS and module["weight"].ndim == 2
        return [*found, "flat"] if is_matrix else found

    def is_right(self, name: str, module: Quantized, n_rows: int) -> bool:
        """Whether it runs here and its result is MLX's: all bits, or all but rounding."""
        x = mx.random.normal((n_rows, 1, _n_inputs(module)), key=mx.random.key(n_rows))
        x = x.astype(module["scales"].dtype)
        experts = some_experts(module, n_rows)
        expected = plain(x, module, *experts)
        try:
            result = self.named[name](x, module, *experts)
            mx.eval(result)
        except RuntimeError as error:  # a kernel that does not compile
            LOG.warning("a way to multiply by quantised weights is not used: %s", error)
            return False
        if name in self._kernels and self._kernels[name].is_exact:
            return bool(mx.array_equal(result, expected))
        return apart(result, expected) < MAX_APART


class ProductByRows:
    """The way for every number of rows."""

    def __init__(self, dtype: mx.Dtype, named: Mapping[str, Product], names: Names) -> None:
        self._dtype = dtype
        self._products: list[Product] = [plain]
        for n_rows in range(1, max(names) + 1):
            self._products.append(named[names[n_rows]] if n_rows in names else self._products[-1])

    def __call__(self, x: mx.array, module: Quantized) -> mx.array:
        return self.way(x.size // x.shape[-1], x.dtype)(x, module)

    def way(self, n_rows: int, dtype: mx.Dtype) -> Product:
        if n_rows == 1 or dtype != self._dtype:
            return plain
        return self._products[min(n_rows, len(self._products) - 1)]


class RowModule(Module):
    """The same module, with the same parameters, that multiplies as `product` does."""

    def __init__(self, module: Quantized, product: ProductByRows) -> None:
        Module.__init__(self)
        share(module, self)
        self._product = product


class RowLinear(RowModule, QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        x = self._product(x, self)
        return x + self["bias"] if "bias" in self else x


class RowEmbedding(RowModule, QuantizedEmbedding):
    """Of embeddings that are the head too."""

    def as_linear(self, x: mx.array) -> mx.array:
        return self._product(x, self)


class RowSwitch(RowModule, QuantizedSwitchLinear):  # type: ignore[misc]
    """Of experts; pairs of a row and an expert count as rows."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> Any:
        way = self._product.way(indices.size, x.dtype)
        if way is plain:
            return super().__call__(x, indices, sorted_indices)
        x = way(x, self, indices)
        return x + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else x


REPLACED: dict[Any, Any] = {
    QuantizedLinear: RowLinear,
    QuantizedEmbedding: RowEmbedding,
    QuantizedSwitchLinear: RowSwitch,
}


def share(module: Any, copy: Any) -> None:
    """All that a module is: items are its parameters, attributes its options."""
    copy.__dict__.update(module.__dict__)
    dict.update(copy, module)


class ProductsFile:
    """What was faster on this machine, kept in the home directory."""

    def __init__(self, home: Path) -> None:
        self._file = StateFile(home / MACHINE, "products", self._from_json, self._to_json)
        self._depends = [TRIAL, version("mlx"), mx.device_info().get("device_name")]

    def read(self) -> dict[str, Names]:
        """By shape; empty if it was measured with another device or another MLX."""
        return self._file.read()

    def add(self, names: Mapping[str, Names]) -> None:
        def merged(kept: dict[str, Names]) -> dict[str, Names]:
            return kept | {shape: {**kept.get(shape, {}), **own} for shape, own in names.items()}

        with suppress(OSError):  # the next start measures again
            self._file.change(merged)

    def _from_json(self, kept: Mapping[str, Any]) -> dict[str, Names]:
        if kept.get("depends") != self._depends:
            return {}
        return {
            shape: {int(n_rows): name for n_rows, name in names.items()}
            for shape, names in kept["names"].items()
        }

    def _to_json(self, names: Mapping[str, Names]) -> dict[str, Any]:
        return {"depends": self._depends, "names": names}


def speed_up(model: Module, home: Path) -> ProductTrials | None:
    """Have the model's products computed in the ways that are known to be faster here, and say
    what is not known yet.

    Does nothing on Metal, which joins rows by itself.
    """
    if kernels.are_compiled():
        products = Products([AlikeKernel(), TensorKernel(), ExpertKernel()])
        return ProductTrials(model, products, ProductsFile(home), lambda: kernels.keep(home))
    if (most := blas.rows_apart(home)) > 1:
        multiply_apart(model, most)
    return None


class ProductTrials:
    """What is not compiled or not measured yet: shapes of modules and numbers of rows, the fewest
    rows first.

    Runs on the thread that runs the model, while nobody waits for it.
    """

    def __init__(
        self,
        model: Module,
        products: Products,
        kept: ProductsFile,
        on_compiled: Callable[[], None] = lambda: None,
    ) -> None:
        """What is kept is used at once. `on_compiled` is called by `save`."""
        self._model, self._products, self._kept = model, products, kept
        self._on_compiled = on_compiled
        self._shapes = by_shape(model)
        known = kept.read()
        self._names = {shape: known.get(shape, {}) for shape in self._shapes}
        pairs = [(shape, n_rows) for shape in self._shapes for n_rows in self._row_counts(shape)]
        self._left = deque(sorted(pairs, key=lambda pair: (self._name(*pair) is None, pair[1])))
        self.n_all = len(self._left)
        for shape in self._shapes:
            self._use(shape)

    @property
    def n_left(self) -> int:
        return len(self._left)

    @property
    def is_measured(self) -> bool:
        """Whether all are in use that will be; some may be left to compile, which come first."""
        return not self._left or self._name(*self._left[-1]) is not None

    def run(self) -> Generator[object, None, None]:
        """Compile what is in use first: MLX compiles our kernels in every process anew. Then
        measure the rest, and multiply so from then on."""
        while self._left:
            try:
                yield from self._run_next(*self._left[0])
            except Exception:
                LOG.exception("a way to multiply could not be measured")
            self._left.popleft()

    def _run_next(self, shape: str, n_rows: int) -> Generator[object, None, None]:
        """One number of rows for one shape."""
        modules, name = [*self._shapes[shape].values()], self._name(shape, n_rows)
        for way in [name] if name else self._products.for_rows(n_rows, modules[0]):
            yield self._products.is_right(way, modules[0], n_rows)  # compiles it
        if name is None:
            way = faster_way(self._products, modules, n_rows)
            self._names[shape] = {**self._names[shape], n_rows: way}
            self._use(shape)

    def save(self) -> None:
        """Keep what was measured and compiled, once nothing is any more; it waits for files."""
        self._kept.add(self._names)
        self._on_compiled()

    def _name(self, shape: str, n_rows: int) -> str | None:
        """The way that was measured; None if there is none here."""
        name = self._names[shape].get(n_rows)
        return name if name in self._products.named else None

    def _row_counts(self, shape: str) -> tuple[int, ...]:
        return row_counts(next(iter(self._shapes[shape].values())))

    def _use(self, shape: str) -> None:
        """Rows that are not measured yet are multiplied as MLX does."""
        names = {n: self._name(shape, n) or "plain" for n in self._row_counts(shape)}
        replace(self._model, self._shapes[shape], self._products, names)


def by_shape(model: Module) -> dict[str, dict[str, Quantized]]:
    """Its quantised modules by path, those of one shape together."""
    found: dict[str, dict[str, Quantized]] = defaultdict(dict)
    leaves: Any = tree_flatten(model.leaf_modules(), is_leaf=Module.is_module)
    for path, module in leaves:
        if type(module) in REPLACED:
            found[_shape(module)][path] = module
    return found


def _shape(module: Quantized) -> str:
    *experts, outputs, _ = module["weight"].shape
    sizes = f"{_n_inputs(module)} to {' of '.join(map(str, [outputs, *experts]))}"
    dtype = str(module["scales"].dtype).removeprefix("mlx.core.")
    return f"{sizes}, {module.bits} bits, {module.group_size}, {module.mode}, {dtype}"


def row_counts(module: Quantized) -> tuple[int, ...]:
    """That are measured."""
    return ROW_COUNTS if module["weight"].ndim == 2 else PAIR_COUNTS


def some_experts(module: Quantized, n_pairs: int) -> list[mx.array]:
    """One for each pair, as random rows have them; none for a module of one matrix."""
    *n_experts, _, _ = module["weight"].shape
    key = mx.random.key(n_pairs)
    return [mx.sort(mx.random.randint(0, n, (n_pairs,), mx.uint32, key=key)) for n in n_experts]


def replace(
    model: Module, modules: Mapping[str, Quantized], products: Products, names: Names
) -> None:
    if set(names.values()) == {"plain"}:
        return
    changed = []
    for path, module in modules.items():
        product = ProductByRows(module["scales"].dtype, products.named, names)
        changed.append((path, REPLACED[type(module)](module, product)))
    model.update_modules(tree_unflatten(changed))


def faster_way(products: Products, modules: Sequence[Quantized], n_rows: int) -> str:
    """For so many rows, by modules of one shape."""
    names = products.for_rows(n_rows, modules[0])
    usable = [name for name in names if products.is_right(name, modules[0], n_rows)]
    if not usable:
        return "plain"
    enough = MARGIN * seconds(plain, modules, n_rows)
    for name in usable:
        if seconds(products.named[name], modules, n_rows) < enough:
            return name
    return "plain"


def apart(result: mx.array, expected: mx.array) -> float:
    """The mean difference, of the mean size; not a number if a result is not."""
    result, expected = result.astype(mx.float32), expected.astype(mx.float32)
    return float(mx.abs(result - expected).mean() / mx.abs(expected).mean())


def _n_inputs(module: Quantized) -> int:
    return int(module["scales"].shape[-1] * module.group_size)


def seconds(product: Product, modules: Sequence[Quantized], n_rows: int) -> float:
    """Of one product by each module, where rounds of them follow each other as decode steps do.

    The next round is built and begun before this one is waited for, so that it takes what the
    device needs or what the host needs, whichever is more.
    """
    x = mx.ones((n_rows, 1, _n_inputs(modules[0])), modules[0]["scales"].dtype)
    experts = some_experts(modules[0], n_rows)
    mx.eval(experts)
    before = _round(product, modules[:MODULES], x, *experts)
    mx.eval(before)  # compiles a kernel
    times = []
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        after = _round(product, modules[:MODULES], before, *experts)
        mx.async_eval(after)
        mx.eval(before)
        times.append(time.perf_counter() - start)
        before = after
    mx.eval(before)
    return median(times[1:])  # in the first, nothing is waited for


def _round(
    product: Product, modules: Sequence[Quantized], x: mx.array, *experts: mx.array
) -> mx.array:
    """One product after the other; the few operations between them are as many as in a model."""
    for module in modules:
        x = x + 0 * product(x, module, *experts)[..., :1]
    return x


# Rows one by one, on a CPU.


class ApartLinear(Linear):
    """The same module, that multiplies up to `most` rows one by one."""

    def __init__(self, linear: Linear, most: int) -> None:
        Module.__init__(self)
        share(linear, self)
        self._most = most

    def __call__(self, x: mx.array) -> mx.array:
        return multiplied(x, self["weight"], self._most, self.get("bias"))


class ApartEmbedding(Embedding):
    """The same for embeddings that are the head too."""

    def __init__(self, embedding: Embedding, most: int) -> None:
        Module.__init__(self)
        share(embedding, self)
        self._most = most

    def as_linear(self, x: mx.array) -> mx.array:
        return multiplied(x, self["weight"], self._most)


APART: dict[Any, Any] = {Linear: ApartLinear, Embedding: ApartEmbedding}


def multiplied(x: mx.array, weight: mx.array, most: int, bias: mx.array | None = None) -> mx.array:
    """Few rows, of a batch or of a draft, have a product each.

    MLX copies nothing for that, and the products are one operation.
    """
    *rows, width = x.shape
    n_rows = math.prod(rows)
    columns = weight.T
    if 1 < n_rows <= most:
        x, columns = x.reshape(n_rows, 1, width), mx.broadcast_to(columns, (n_rows, *columns.shape))
    y = x @ columns if bias is None else mx.addmm(bias, x, columns)
    return y.reshape(*rows, -1)


def multiply_apart(model: Module, most: int) -> None:
    leaves: Any = tree_flatten(model.leaf_modules(), is_leaf=Module.is_module)
    changed = [(path, APART[type(m)](m, most)) for path, m in leaves if type(m) in APART]
    model.update_modules(tree_unflatten(changed))
