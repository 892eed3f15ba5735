"""Our CUDA kernels read and write nothing outside their arrays: run on the host, thread by thread,
with a sanitizer of addresses and alignment, and arrays that end where they end.

No address depends on what threads tell each other, so they tell each other nothing here.
"""

import os
import re
import shutil
import subprocess

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from keepwarm.models.row_products import (
    GROUPS,
    HEADER,
    AlikeKernel,
    ExpertKernel,
    TensorKernel,
)

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs `g++`")

# What the kernels use of CUDA. Their instructions in assembler touch registers only.
DEVICE = r"""
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <set>
using std::min;
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __syncthreads()
#define __shfl_xor_sync(all, value, mask) (value)
struct __nv_bfloat16 { unsigned short bits; };
struct __half { unsigned short bits; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct { unsigned x, y; } static threadIdx, blockIdx, gridDim;
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint4 __ldcs(const uint4* at) { return *at; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned) { return a ^ b; }
inline unsigned __float_as_uint(float) { return 0; }
inline float __uint_as_float(unsigned) { return 0; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline float __half2float(__half) { return 0; }
inline __half __float2half_rn(float) { return {}; }
inline __nv_bfloat16 __float2bfloat16_rn(float) { return {}; }
"""

# The arguments are those that MLX passes.
KERNEL = r"""
template <typename T, %s>
void %s(const T* x, const int* x_shape, int x_ndim, const unsigned* w, const int* w_shape,
        const T* scales, const T* biases, const unsigned* experts, T* out) {
%s
}
"""

RUN = r"""
template <typename U> auto array_of(size_t n) {
  return std::unique_ptr<U, decltype(&free)>(static_cast<U*>(calloc(n, sizeof(U))), free);
}

template <typename Kernel>
void run(Kernel kernel, int rows, int pairs, long n_experts, long n_outputs, long n_inputs,
         int bits, int group, unsigned blocks, unsigned blocks_y, unsigned threads) {
  printf("%d rows, %d pairs, %ld to %ld, %d bits, groups of %d\n", rows, pairs, n_inputs, n_outputs,
         bits, group);
  fflush(stdout);
  using T = __nv_bfloat16;
  const int n_words = n_inputs * bits / 32;
  const int x_shape[] = {rows, 1, int(n_inputs)};
  const int matrix[] = {int(n_outputs), n_words}, matrices[] = {int(n_experts), matrix[0], n_words};
  const size_t n_weights = n_experts * n_outputs * n_inputs;
  auto x = array_of<T>(rows * n_inputs), out = array_of<T>(std::max(pairs, rows) * n_outputs);
  auto scales = array_of<T>(n_weights / group), biases = array_of<T>(n_weights / group);
  auto w = array_of<unsigned>(n_weights * bits / 32), experts = array_of<unsigned>(pairs);
  for (int i = 0; i < pairs; ++i) experts.get()[i] = i * n_experts / pairs;
  gridDim = {blocks, blocks_y};
  for (unsigned at_y : std::set{0u, blocks_y / 2, blocks_y - 1})
    for (unsigned at_x : std::set{0u, blocks / 2, blocks - 1})
      for (unsigned at = 0; at < threads; ++at) {
        blockIdx = {at_x, at_y}, threadIdx = {at, 0};
        kernel(x.get(), x_shape, 3, w.get(), pairs ? matrices : matrix, scales.get(), biases.get(),
               experts.get(), out.get());
      }
}
"""

WIDTHS = [  # of the inputs, then of the outputs
    (4096, 1024), (14336, 4096), (4096, 128256),  # Llama-8B
    (3840, 15360), (2048, 512),  # Gemma-3-12B, Qwen3-30B-A3B
    (128, 1), (128, 7), (640, 17), (896, 33), (4736, 24),
]  # fmt: skip
EXPERT_WIDTHS = [(2048, 768), (768, 2048), (128, 1), (384, 17)]
FEW, MORE = (3, 4, 5, 7), (8, 9, 17, 32)  # rows


def linear(n_inputs, n_outputs, bits, group):
    made = nn.QuantizedLinear(n_inputs, n_outputs, False, group, bits)  # nothing of it is computed
    made.scales, made.biases = (made[name].astype(mx.bfloat16) for name in ("scales", "biases"))
    return made


def switch(n_inputs, n_outputs, bits, group):
    made = QuantizedSwitchLinear(n_inputs, n_outputs, 16, False, group, bits)
    made.scales, made.biases = (made[name].astype(mx.bfloat16) for name in ("scales", "biases"))
    return made


def launches(kernel):
    """What it is launched with, for all shapes and numbers of rows: module, x, arguments, pairs."""
    for group in GROUPS:
        for bits in kernel.bits:
            for widths in WIDTHS if kernel.ndim == 2 else EXPERT_WIDTHS:
                module = (linear if kernel.ndim == 2 else switch)(*widths, bits, group)
                assert kernel.can_multiply(module)
                yield from of_module(kernel, module, widths[0])


def of_module(kernel, module, n_inputs):
    def rows_of(n_rows):
        return mx.zeros((n_rows, 1, n_inputs), mx.bfloat16)

    if kernel is ExpertKernel:
        for n_rows, n_pairs in ((128, 128), (16, 128), (511, 511), (64, 512)):
            experts = mx.zeros((n_rows, n_pairs // n_rows), mx.uint32)
            yield module, n_rows, kernel.arguments(rows_of(n_rows), module, experts), n_pairs
        return
    for n_rows in FEW if kernel is AlikeKernel else MORE:
        assert n_rows in kernel.row_counts
        yield module, n_rows, kernel.arguments(rows_of(n_rows), module), 0


def program_of(kernel, source):
    """A program that runs all launches of a kernel."""
    calls, names = [], []
    for module, n_rows, arguments, n_pairs in launches(kernel):
        *experts, n_outputs, _ = module["weight"].shape
        constants = [(name, value) for name, value in arguments["template"] if name != "T"]
        (width, blocks_y, _), (threads, _, _) = arguments["grid"], arguments["threadgroup"]
        n_inputs = module["scales"].shape[-1] * module.group_size
        numbers = [n_rows, n_pairs, *(experts or [1]), n_outputs, n_inputs, module.bits,
                   module.group_size, width // threads, blocks_y, threads]  # fmt: skip
        values = ", ".join(str(value) for _, value in constants)
        calls.append(f"run({kernel.name}<__nv_bfloat16, {values}>, {str(numbers)[1:-1]});")
        names = [f"int {name}" for name, _ in constants]
    body = KERNEL % (", ".join(names), kernel.name, source)
    text = re.sub(r"\basm\(.*?\);", "", DEVICE + HEADER + body, flags=re.DOTALL)
    return text + RUN + "int main() {\n" + "\n".join(calls) + "\n}\n"


def run(folder, kernel, source):
    (folder / "kernel.cpp").write_text(program_of(kernel, source))
    flags = ["-std=c++17", "-w", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run(["g++", *flags, "-o", "kernel", "kernel.cpp"], cwd=folder, check=True)
    environ = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # which would trace this process
    return subprocess.run(
        [folder / "kernel"], check=False, capture_output=True, text=True, env=environ
    )


@needs_compiler
@pytest.mark.parametrize("kernel", [AlikeKernel, TensorKernel, ExpertKernel])
def test_a_kernel_stays_within_its_arrays(kernel, tmp_path):
    ran = run(tmp_path, kernel, kernel.source)
    assert ran.returncode == 0, f"{ran.stdout[-100:]}{ran.stderr[:2000]}"


@needs_compiler
def test_a_kernel_that_does_not_is_seen(tmp_path):
    """One thread too many writes: one output behind the last."""
    broken = AlikeKernel.source.replace("output >= n_outputs", "output > n_outputs")
    assert broken != AlikeKernel.source
    assert "heap-buffer-overflow" in run(tmp_path, AlikeKernel, broken).stderr
