// Kernels that do in a launch or two what torch's operations do in several, and with their bits: `fused.py` compares them.
//
// Each has its twin in Python, of the same name, which says what it computes. Compiled without contraction (a * b + c is
// rounded twice) and with divisions that are rounded correctly. Arguments that are written come first. The texts of
// features follow this one.

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;

struct bf16 { uint16 bits; };
struct fp16 { uint16 bits; };

__device__ inline int thread() { return blockIdx.x * blockDim.x + threadIdx.x; }

#ifndef HOST  // where tests compile it for the host, these are the compiler's
__device__ inline float half_to_float(uint16 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

__device__ inline uint16 float_to_half(float x) {
  uint16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
#endif

// --- numbers ---------------------------------------------------------------------------------------------------------

__device__ inline float wide(float x) { return x; }
__device__ inline double wide(double x) { return x; }
__device__ inline float wide(bf16 x) { return __uint_as_float((uint32)x.bits << 16); }
__device__ inline float wide(fp16 x) { return half_to_float(x.bits); }

__device__ inline void round_to(float& to, float x) { to = x; }
__device__ inline void round_to(double& to, double x) { to = x; }
__device__ inline void round_to(fp16& to, float x) { to.bits = float_to_half(x); }

__device__ inline void round_to(bf16& to, float x) {
  uint32 bits = __float_as_uint(x);
  to.bits = (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

template <class T> struct Running { typedef float type; };
template <> struct Running<double> { typedef double type; };

template <class R> __device__ inline R average(R sum, int ranks) {
  if ((ranks & ranks - 1) == 0) return sum * (R(1) / R(ranks));
  return sum / R(ranks);
}

// --- arithmetic/sums.py ---------------------------------------------------------------------------------------------------

template <class P> __device__ inline auto read(const P* piece, int at) -> decltype(wide(*piece)) { return wide(piece[at]); }

template <class T, class S, class P>
__device__ inline void fold(T* total, const S* start, const P* const (&pieces)[8], int numel, int count, int begun,
                            int times, int over) {
  typedef typename Running<T>::type R;
  int at = thread();
  if (at >= numel) return;
  R sum = begun ? R(read(start, at)) : R(read(pieces[0], at));
  if (begun && times > 1) sum = sum * R(times);
#pragma unroll
  for (int piece = 0; piece < 8; piece++)
    if (piece >= 1 - begun && piece < count) sum = sum + R(read(pieces[piece], at));
  round_to(total[at], over > 1 ? average(sum, over) : sum);
}

#define FOLD(NAME, T, S, P)                                                                                        \
  extern "C" __global__ void NAME(T* total, const S* start, const P* a, const P* b, const P* c, const P* d,        \
                                  const P* e, const P* f, const P* g, const P* h, int numel, int count, int begun, \
                                  int times, int over) {                                                           \
    const P* const pieces[8] = {a, b, c, d, e, f, g, h};                                                           \
    fold<T, S, P>(total, start, pieces, numel, count, begun, times, over);                                         \
  }

// --- bins.block_sums of squares, and bins.add_to_bins: a warp for a block of 128 elements ----------------------------

template <class T>
__device__ inline void squares(float* sums, const T* shard, const long long* rows, const uint8* hidden, int count,
                               int ranks) {
  int lane = threadIdx.x % 32, at = thread() / 32;
  if (at >= count) return;  // all of a warp, or none of it
  uint64 block = rows ? rows[at] : at;
  float x[4];
  for (int k = 0; k < 4; k++) {
    x[k] = average(wide(shard[block * 128 + k * 32 + lane]), ranks);
    if (hidden && hidden[at * 128 + k * 32 + lane]) x[k] = 0;
    x[k] = x[k] * x[k];
  }
  float sum = (x[0] + x[2]) + (x[1] + x[3]);
  for (int half = 16; half; half /= 2) sum = sum + __shfl_down_sync(0xFFFFFFFF, sum, half);
  if (lane == 0) sums[block] = sum;
}

#define SQUARES(NAME, T)                                                                              \
  extern "C" __global__ void NAME(float* sums, const T* shard, int count, int ranks) {                \
    squares<T>(sums, shard, nullptr, nullptr, count, ranks);                                          \
  }                                                                                                   \
  extern "C" __global__ void NAME##_some(float* sums, const T* shard, const long long* rows,          \
                                         const uint8* hidden, int count, int ranks) {                 \
    squares<T>(sums, shard, rows, hidden, count, ranks);                                              \
  }

extern "C" __global__ void add_to_bins(uint64* bins, const long long* owner, const float* sums, int count, int width) {
  int at = thread();
  if (at >= count) return;
  uint32 bits = __float_as_uint(sums[at]) & 0x7FFFFFFF, exponent = bits >> 23;
  uint64 value = exponent ? bits & 0x7FFFFF | 0x800000 : bits & 0x7FFFFF;
  exponent = exponent ? exponent : 1;
  int column = exponent / 8;
  value <<= exponent % 8;
  if (bits >= 0x7F800000) column = bits == 0x7F800000 ? width - 2 : width - 1, value = 1;
  atomicAdd(bins + owner[at] * width + column, value);
}
