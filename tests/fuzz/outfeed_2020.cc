// SPDX-License-Identifier: Apache-2.0
// The framing of 2020: metadata, headers, and files of messages.
#include "channel/outfeed_2020.h"

#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "targets.h"

namespace callgate::fuzz {
namespace {

using outfeed_2020::ArrayType;

void read_metadata(std::string_view bytes) {
  try {
    const std::vector<ArrayType> arrays = outfeed_2020::decode_metadata(bytes);
    const std::string written = outfeed_2020::encode_metadata(arrays);
    require(outfeed_2020::decode_metadata(written) == arrays, "metadata goes there and back");
    for (const ArrayType& array : arrays) array.nbytes();
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the promised one
  }
}

void read_header(std::string_view bytes) {
  try {
    const outfeed_2020::Header header = outfeed_2020::decode_header(bytes);
    read_metadata(outfeed_2020::metadata_of(header, bytes));
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the promised one
  }
}

void read_file(std::string_view bytes) {
  const MemoryFile file(bytes);
  Outfeed2020Reader reader(file.path());
  std::size_t messages = 0;
  try {
    for (auto message = reader.next(); message; message = reader.next()) {
      touch(message->data.data(), message->data.size());
      require(reader.offset() <= bytes.size(), "a message is inside its file");
      require(++messages <= bytes.size() / outfeed_2020::kBlockBytes, "a message takes its bytes");
    }
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the promised one
  }
}

}  // namespace

void outfeed_2020(std::string_view bytes) {
  read_metadata(bytes);
  read_header(bytes);
  read_file(bytes);
}

}  // namespace callgate::fuzz
