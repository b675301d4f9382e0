// The random numbers of philox.py: Philox 4x32-10 with the position as counter and the seed as key.
#pragma once
#include <cstdint>

namespace hybridtrt {

// A uniform number in [0, 1) with 53 bits.
static double uniform(uint64_t seed, uint64_t position) {
  uint32_t c0 = uint32_t(position), c1 = uint32_t(position >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(c0) * 0xD2511F53u, p1 = uint64_t(c2) * 0xCD9E8D57u;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return double(uint64_t(c0 >> 5) << 26 | c1 >> 6) * 0x1p-53;
}

}  // namespace hybridtrt
