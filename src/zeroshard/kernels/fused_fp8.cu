// Numbers of 8 bits (arithmetic/fp8.py): the largest magnitude of each tile, rounding, and reading.

struct e4m3 { uint8 bits; };

__device__ inline float wide(e4m3 x) {
  uint32 exponent = x.bits >> 3 & 15, mantissa = x.bits & 7;
  if ((x.bits & 0x7F) == 0x7F) return __uint_as_float(0x7FFFFFFF);
  float found = exponent ? __uint_as_float((exponent + 120) << 23 | mantissa << 20) : mantissa * 0.001953125f;
  return x.bits & 0x80 ? -found : found;
}

__device__ inline void round_to(e4m3& to, float x) {
  uint32 bits = __float_as_uint(x), sign = bits & 0x80000000u;
  bits ^= sign;
  if (bits >= 1087u << 20) bits = 0x7F;  // 480 and above, and what is no number
  else if (bits < 121u << 23) bits = __float_as_uint(__uint_as_float(bits) + __uint_as_float(141u << 23)) - (141u << 23);
  else bits = (bits + (uint32(7 - 127) << 23) + 0x7FFFF + (bits >> 20 & 1)) >> 20;
  to.bits = bits | sign >> 24;
}

__device__ inline int tile(int at, int columns, int tall, int broad, int across) {
  return at / columns / tall * across + at % columns / broad;
}

extern "C" __global__ void largest(int* most, const float* masters, int first, int numel, int columns, int tall,
                                   int broad, int across) {  // a warp for 1,024 elements
  int lane = threadIdx.x % 32, from = thread() / 32 * 1024, until = min(from + 1024, numel), own = -1, found = 0;
  for (int at = from + lane; at < until; at += 32) {
    int here = tile(first + at, columns, tall, broad, across);
    if (here != own && own >= 0) atomicMax(most + own, found), found = 0;
    own = here;
    found = max(found, int(__float_as_uint(masters[at]) & 0x7FFFFFFF));
  }
  int leader = __shfl_sync(0xFFFFFFFF, own, 0);
  if (__all_sync(0xFFFFFFFF, own == leader || own < 0)) {
    for (int half = 16; half; half /= 2) found = max(found, __shfl_down_sync(0xFFFFFFFF, found, half));
    own = lane ? -1 : leader;
  }
  if (own >= 0) atomicMax(most + own, found);
}

extern "C" __global__ void quantise_(e4m3* raw, const float* masters, const float* scales, int first, int numel,
                                     int columns, int tall, int broad, int across) {
  int at = thread();
  if (at < numel) round_to(raw[at], masters[at] / scales[tile(first + at, columns, tall, broad, across)]);
}

#define DEQUANTISE(NAME, T)                                                                                           \
  extern "C" __global__ void NAME(T* values, const e4m3* raw, const float* scales, int first, int numel, int columns, \
                                  int tall, int broad, int across) {                                                  \
    int at = thread();                                                                                                \
    if (at < numel) round_to(values[at], wide(raw[at]) * scales[tile(first + at, columns, tall, broad, across)]);     \
  }
