#include "reduce.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace simulated {
namespace {

// A float of 1 + Exponent + Mantissa bits, computed with as float, as NCCL's kernels do. E4M3 has no
// infinities: its largest exponent holds numbers, and only one pattern is NaN.
template <class Bits, int Exponent, int Mantissa, bool HasInfinity>
struct SmallFloat {
  Bits bits;
  static constexpr int BIAS = (1 << (Exponent - 1)) - 1;

  explicit operator float() const {
    int exponent = bits >> Mantissa & ((1 << Exponent) - 1), mantissa = bits & ((1 << Mantissa) - 1);
    constexpr int TOP = (1 << Exponent) - 1;
    float magnitude;
    if (exponent == TOP && HasInfinity) magnitude = mantissa ? NAN : INFINITY;
    else if (exponent == TOP && mantissa == (1 << Mantissa) - 1) magnitude = NAN;
    else if (exponent == 0) magnitude = std::ldexp(static_cast<float>(mantissa), 1 - BIAS - Mantissa);
    else magnitude = std::ldexp(static_cast<float>(mantissa | 1 << Mantissa), exponent - BIAS - Mantissa);
    return bits >> (Exponent + Mantissa) & 1 ? -magnitude : magnitude;
  }

  static SmallFloat from(float value) {
    const Bits sign = static_cast<Bits>((std::signbit(value) ? 1 : 0) << (Exponent + Mantissa));
    constexpr int TOP = (1 << Exponent) - 1;
    constexpr Bits NOT_A_NUMBER = static_cast<Bits>((TOP << Mantissa) | ((1 << Mantissa) - 1));
    constexpr Bits LARGEST = HasInfinity ? static_cast<Bits>(TOP << Mantissa) : static_cast<Bits>(NOT_A_NUMBER - 1);
    if (std::isnan(value)) return {static_cast<Bits>(sign | NOT_A_NUMBER)};
    float magnitude = std::fabs(value);
    if (magnitude == 0) return {sign};
    int exponent;
    std::frexp(magnitude, &exponent);  // magnitude = 0.5..1 * 2^exponent
    exponent = std::max(exponent - 1, 1 - BIAS);
    if (std::isinf(magnitude) || exponent > TOP - BIAS) return {static_cast<Bits>(sign | LARGEST)};
    // The bits of finite numbers are in the order of their values, so that a carry of rounding is right.
    double steps = std::nearbyint(std::ldexp(static_cast<double>(magnitude), Mantissa - exponent));
    int64_t code = static_cast<int64_t>(steps) + (static_cast<int64_t>(exponent + BIAS - 1) << Mantissa);
    return {static_cast<Bits>(sign | std::min<int64_t>(code, LARGEST))};
  }
};
using Half = SmallFloat<uint16_t, 5, 10, true>;
using E4M3 = SmallFloat<uint8_t, 4, 3, false>;
using E5M2 = SmallFloat<uint8_t, 5, 2, true>;

// The upper half of a float, so that the conversions are shifts that the compiler vectorises.
struct BFloat {
  uint16_t bits;
  explicit operator float() const {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
  static BFloat from(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    if (value != value) return {0x7fff};
    return {static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16)};
  }
};

template <class T, class Sum>
T stored(Sum value) {
  if constexpr (std::is_arithmetic_v<T>) return static_cast<T>(value);
  else return T::from(value);
}

constexpr size_t BLOCK = 512;  // elements whose partial results stay in the first-level cache

template <int op, class Sum>
inline Sum combined(Sum a, Sum b) {
  if constexpr (op == ncclProd) return a * b;
  else if constexpr (op == ncclMax) return a != a ? a : (b != b ? b : std::max(a, b));  // a NaN stays
  else if constexpr (op == ncclMin) return a != a ? a : (b != b ? b : std::min(a, b));
  else return a + b;
}

template <class T, class Sum, int op>
void reduce_blocks(T* out, const std::vector<const char*>& in, size_t count, const double* scale, bool average) {
  Sum partial[BLOCK];
  for (size_t done = 0; done < count; done += BLOCK) {
    const size_t size = std::min(BLOCK, count - done);
    for (size_t rank = 0; rank < in.size(); ++rank) {
      const T* values = reinterpret_cast<const T*>(in[rank]) + done;
      if (scale) {
        const Sum factor = static_cast<Sum>(*scale);
        for (size_t i = 0; i < size; ++i) {
          Sum value = static_cast<Sum>(values[i]) * factor;
          partial[i] = rank ? combined<op, Sum>(partial[i], value) : value;
        }
      } else if (rank == 0) {
        for (size_t i = 0; i < size; ++i) partial[i] = static_cast<Sum>(values[i]);
      } else {
        for (size_t i = 0; i < size; ++i) partial[i] = combined<op, Sum>(partial[i], static_cast<Sum>(values[i]));
      }
    }
    if (average)
      for (size_t i = 0; i < size; ++i) partial[i] = static_cast<Sum>(partial[i] / static_cast<Sum>(in.size()));
    for (size_t i = 0; i < size; ++i) out[done + i] = stored<T, Sum>(partial[i]);
  }
}

// Sum is the type in which NCCL computes: floats for the small floats, and for integers the type itself,
// whose overflow wraps. The unsigned type wraps without undefined behaviour, but only for sums and products.
template <class T, class Sum>
void reduce_as(char* out, const std::vector<const char*>& in, size_t count, int op, const double* scale) {
  T* typed = reinterpret_cast<T*>(out);
  switch (op) {
    case ncclProd: return reduce_blocks<T, Sum, ncclProd>(typed, in, count, scale, false);
    case ncclMax: return reduce_blocks<T, Sum, ncclMax>(typed, in, count, scale, false);
    case ncclMin: return reduce_blocks<T, Sum, ncclMin>(typed, in, count, scale, false);
    default: return reduce_blocks<T, Sum, ncclSum>(typed, in, count, scale, op == ncclAvg);
  }
}

}  // namespace

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    default: return 0;
  }
}

double scalar(ncclDataType_t type, const void* value) {
  switch (type) {
    case ncclInt8: return *static_cast<const int8_t*>(value);
    case ncclUint8: return *static_cast<const uint8_t*>(value);
    case ncclInt32: return *static_cast<const int32_t*>(value);
    case ncclUint32: return *static_cast<const uint32_t*>(value);
    case ncclInt64: return static_cast<double>(*static_cast<const int64_t*>(value));
    case ncclUint64: return static_cast<double>(*static_cast<const uint64_t*>(value));
    case ncclFloat16: return static_cast<float>(*static_cast<const Half*>(value));
    case ncclBfloat16: return static_cast<float>(*static_cast<const BFloat*>(value));
    case ncclFloat32: return *static_cast<const float*>(value);
    case ncclFloat64: return *static_cast<const double*>(value);
    case ncclFloat8e4m3: return static_cast<float>(*static_cast<const E4M3*>(value));
    case ncclFloat8e5m2: return static_cast<float>(*static_cast<const E5M2*>(value));
    default: return 1;
  }
}

void reduce(char* out, const std::vector<const char*>& in, size_t count, ncclDataType_t type, int op,
            const double* scale) {
  switch (type) {
    case ncclInt8: return reduce_as<int8_t, int>(out, in, count, op, scale);
    case ncclUint8: return reduce_as<uint8_t, unsigned>(out, in, count, op, scale);
    case ncclInt32: return reduce_as<int32_t, int64_t>(out, in, count, op, scale);
    case ncclUint32: return reduce_as<uint32_t, uint64_t>(out, in, count, op, scale);
    case ncclInt64: return reduce_as<int64_t, int64_t>(out, in, count, op, scale);
    case ncclUint64: return reduce_as<uint64_t, uint64_t>(out, in, count, op, scale);
    case ncclFloat16: return reduce_as<Half, float>(out, in, count, op, scale);
    case ncclBfloat16: return reduce_as<BFloat, float>(out, in, count, op, scale);
    case ncclFloat32: return reduce_as<float, float>(out, in, count, op, scale);
    case ncclFloat64: return reduce_as<double, double>(out, in, count, op, scale);
    case ncclFloat8e4m3: return reduce_as<E4M3, float>(out, in, count, op, scale);
    case ncclFloat8e5m2: return reduce_as<E5M2, float>(out, in, count, op, scale);
    default: return;
  }
}

}  // namespace simulated
