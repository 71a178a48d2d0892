// SPDX-License-Identifier: Apache-2.0
// Sources and records made by hand, for tests of what consumes them.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "channel/record.h"

namespace callgate::testing {

// Fills in what follows from the leaves' dtypes and dims.
inline std::shared_ptr<const Source> finished(Source source) {
  for (LeafType& leaf : source.leaves) {
    leaf.nbytes = ArrayView{nullptr, leaf.dims.data(), static_cast<std::int32_t>(leaf.dims.size()),
                            leaf.dtype}
                      .nbytes();
    leaf.offset = source.payload_bytes;
    source.payload_bytes += align_record(leaf.nbytes);
  }
  if (source.value_leaves == 0) source.value_leaves = source.leaves.size();
  return std::make_shared<const Source>(std::move(source));
}

inline LeafType leaf(std::string path, DType dtype, std::vector<std::int64_t> dims) {
  return {std::move(path), dtype, std::move(dims), 0, 0};
}

// A tap of one float32.
inline std::shared_ptr<const Source> scalar_source(std::uint64_t id = 7) {
  Source source;
  source.id = id;
  source.name = "loss";
  source.description = R"({"tree": "*"})";
  source.leaves = {leaf("", DType::kF32, {})};
  return finished(std::move(source));
}

// A record and the memory of its payload.
struct OwnedRecord {
  Record record;
  std::shared_ptr<std::vector<char>> payload;
};

// `step` shows in every field and in every byte of the payload.
inline OwnedRecord record_of(const Source& source, std::uint64_t step) {
  auto payload = std::make_shared<std::vector<char>>(source.payload_bytes);
  for (std::size_t i = 0; i < payload->size(); ++i)
    (*payload)[i] = static_cast<char>((i * 31 + step * 7) & 1U);
  Record record{&source, step, static_cast<std::int64_t>(1000 + step), 5, 2, 0, payload->data()};
  return {record, payload};
}

// A folder that is removed with its contents.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "callgate_XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

inline std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_contents(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::ssize(bytes));
}

}  // namespace callgate::testing
