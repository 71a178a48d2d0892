// SPDX-License-Identifier: Apache-2.0
// CRC-32C (Castagnoli: polynomial 0x1EDC6F41, reflected; RFC 3720, appendix B.4), in C++17.
//
// It checks the frames of stream.h. On x86 machines with the instruction, one instruction processes
// 8 bytes. Other machines use slicing by 8: eight tables, one look-up per byte, and independent
// look-ups within a step.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace callgate::stream {
namespace crc {

using CrcTables = std::array<std::array<std::uint32_t, 256>, 8>;

// Slicing by 8: table k holds the checksum of a byte followed by k zero bytes.
constexpr CrcTables make_crc_tables() noexcept {
  CrcTables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0x82F63B78u : 0u);
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      std::uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 255u];
    }
  }
  return tables;
}

inline constexpr CrcTables kCrcTables = make_crc_tables();

inline std::uint32_t crc32c_tables(std::uint32_t crc, const unsigned char* data, std::size_t size) {
  const CrcTables& t = kCrcTables;
  for (; size >= 8; size -= 8, data += 8) {
    std::uint32_t low = 0, high = 0;
    std::memcpy(&low, data, 4);
    std::memcpy(&high, data + 4, 4);
    low ^= crc;
    crc = t[7][low & 255u] ^ t[6][(low >> 8) & 255u] ^ t[5][(low >> 16) & 255u] ^ t[4][low >> 24] ^
          t[3][high & 255u] ^ t[2][(high >> 8) & 255u] ^ t[1][(high >> 16) & 255u] ^
          t[0][high >> 24];
  }
  for (; size > 0; --size, ++data) crc = (crc >> 8) ^ t[0][(crc ^ *data) & 255u];
  return crc;
}

#if defined(__x86_64__) && defined(__GNUC__)
#ifdef __clang__
__attribute__((target("sse4.2,crc32")))  // a separate feature for clang
#else
__attribute__((target("sse4.2")))
#endif
inline std::uint32_t crc32c_sse(std::uint32_t crc, const unsigned char* data, std::size_t size) {
  std::uint64_t wide = crc;
  for (; size >= 8; size -= 8, data += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data, 8);
    wide = __builtin_ia32_crc32di(wide, word);
  }
  return crc32c_tables(static_cast<std::uint32_t>(wide), data, size);
}
#endif

}  // namespace crc

// CRC-32C (polynomial 0x1EDC6F41, reflected; RFC 3720). `before` is the checksum of the bytes
// before these.
inline std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t before = 0) {
  const auto* bytes = static_cast<const unsigned char*>(data);
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool has_sse = __builtin_cpu_supports("sse4.2") != 0;
  if (has_sse) return ~crc::crc32c_sse(~before, bytes, size);
#endif
  return ~crc::crc32c_tables(~before, bytes, size);
}

}  // namespace callgate::stream
