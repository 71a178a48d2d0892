// SPDX-License-Identifier: Apache-2.0
// Streams of hostile bytes: reading all of one, and making the checksums of changed ones right.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "callgate/stream.h"
#include "targets.h"

namespace callgate::fuzz {

struct StreamRead {
  std::size_t records = 0;
  std::uint64_t offset = 0;
  bool refused = false;  // FormatError, or a server's refusal
};

// Reads to the end, touching every byte that is handed out.
inline StreamRead read_stream(stream::Reader& reader) {
  StreamRead read;
  try {
    while (auto record = reader.next()) {
      ++read.records;
      for (const stream::Leaf& leaf : record->source->leaves)
        touch(record->data(leaf), leaf.nbytes);
    }
  } catch (const stream::FormatError&) {
    read.refused = true;
  } catch (const stream::RefusedError&) {
    read.refused = true;
  }
  read.offset = reader.offset();
  return read;
}

// From memory of exactly their size, so that the address sanitizer sees a step beyond.
inline StreamRead read_stream(std::string_view bytes) {
  const auto exact = std::make_unique<char[]>(bytes.size() + 1);
  char* start = exact.get() + 1;  // not aligned either
  std::ranges::copy(bytes, start);
  stream::Reader reader(start, bytes.size());
  return read_stream(reader);
}

// Makes the checksums of all frames right that lie within the bytes, so that fields are looked at.
inline void reseal(std::string& bytes) {
  for (std::size_t at = 0; at + stream::kHeaderBytes <= bytes.size();) {
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data() + at + 8, 8);
    if (length < stream::kHeaderBytes || length > bytes.size() - at) length = bytes.size() - at;
    const std::uint32_t body = stream::crc32c(bytes.data() + at + 24, length - 24);
    std::memcpy(bytes.data() + at + 4, &body, 4);
    const std::uint32_t head = stream::crc32c(bytes.data() + at, 20);
    std::memcpy(bytes.data() + at + 20, &head, 4);
    at += length;
  }
}

}  // namespace callgate::fuzz
