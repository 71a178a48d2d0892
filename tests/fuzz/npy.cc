// SPDX-License-Identifier: Apache-2.0
// A .npy file: its header, and a sink that appends a row to it.
#include "channel/sinks/npy.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "targets.h"

namespace callgate::fuzz {
namespace {

Source rows_of_three() {
  Source source;
  source.id = 1;
  source.name = "x";
  source.leaves = {{"", DType::kS16, {3}, 0, 6}};
  source.value_leaves = 1;
  source.payload_bytes = align_record(6);
  return source;
}

// A file of other content stays as it is. A file of such rows has a row more.
void append(std::string_view bytes, const NpyHeader& header) {
  static const Source source = rows_of_three();
  static const std::vector<char> payload(source.payload_bytes, 'x');
  const MemoryFile file(bytes);
  NpySink sink(file.path(), FileMode::kAppend);
  const Record record{&source, 0, 0, 0, 0, 0, payload.data()};
  try {
    sink.consume({&record, 1});
    sink.close();
  } catch (const Error&) {
    return;
  }
  if (bytes.empty()) return;
  const std::string now = file.contents();
  const NpyHeader after = NpyHeader::parse(now, file.path());
  const std::uint64_t there =
      std::min<std::uint64_t>(header.rows, (bytes.size() - header.bytes) / 6);
  require(after.descr == header.descr && after.row == header.row, "a file's type stays");
  require(after.rows == there + 1, "a file has one row more");
  require(now.size() == after.bytes + 6 * after.rows, "a file holds the rows that it counts");
}

}  // namespace

void npy(std::string_view bytes) {
  try {
    const NpyHeader header = NpyHeader::parse(bytes, "a file");
    require(header.bytes <= bytes.size(), "a header is inside its file");
    append(bytes, header);
    const NpyHeader again = NpyHeader::parse(header.text(), "a file");
    require(again.descr == header.descr && again.row == header.row && again.rows == header.rows &&
                again.bytes == header.bytes,
            "a header goes there and back");
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the promised one
  }
}

}  // namespace callgate::fuzz
