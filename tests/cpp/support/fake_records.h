// SPDX-License-Identifier: Apache-2.0
// Records made by hand, for tests of consumers: a tap that owns its source and its payloads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "channel/record.h"

namespace callgate {

using Bytes = std::vector<char>;

template <typename T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

class FakeTap {
 public:
  explicit FakeTap(std::string name, Role role = Role::kPrimal) {
    static std::atomic<std::uint64_t> next_id{1000};
    source_.id = next_id++;
    source_.name = std::move(name);
    source_.role = role;
  }
  FakeTap(const FakeTap&) = delete;
  FakeTap& operator=(const FakeTap&) = delete;

  // A tap of one array.
  FakeTap(std::string name, DType dtype, std::vector<std::int64_t> dims)
      : FakeTap(std::move(name)) {
    leaf("", dtype, std::move(dims));
  }

  FakeTap& leaf(std::string path, DType dtype, std::vector<std::int64_t> dims) {
    add(std::move(path), dtype, std::move(dims));
    ++source_.value_leaves;
    return *this;
  }

  // After all leaves: a bool for each lane, or one for the record.
  FakeTap& where(std::vector<std::int64_t> dims) {
    add("", DType::kPred, std::move(dims));
    source_.has_where = true;
    return *this;
  }

  FakeTap& lanes(std::vector<std::int64_t> sizes, const std::vector<std::int64_t>& masks) {
    source_.lanes = Lanes(std::move(sizes), masks);
    return *this;
  }

  // The next record, with the bytes of each leaf. Valid for as long as the tap.
  Record record(const std::vector<Bytes>& leaves, std::uint32_t flags = 0) {
    Bytes& payload = payloads_.emplace_back(source_.payload_bytes);
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      const LeafType& leaf = source_.leaves.at(i);
      if (leaves[i].size() != leaf.nbytes) throw std::invalid_argument("bytes of " + leaf.path);
      std::copy(leaves[i].begin(), leaves[i].end(),
                payload.begin() + static_cast<std::ptrdiff_t>(leaf.offset));
    }
    Record record;
    record.source = &source_;
    record.seq = seq_++;
    record.time_ns = 1'700'000'000'000'000'000 + static_cast<std::int64_t>(record.seq);
    record.run = 7;
    record.device = 0;
    record.flags = flags;
    record.payload = payload.data();
    return record;
  }

 private:
  void add(std::string path, DType dtype, std::vector<std::int64_t> dims) {
    LeafType leaf{std::move(path), dtype, std::move(dims), source_.payload_bytes, 0};
    std::size_t count = 1;
    for (std::int64_t extent : leaf.dims) count *= static_cast<std::size_t>(extent);
    leaf.nbytes = storage_bytes(dtype, count);
    source_.payload_bytes += align_record(leaf.nbytes);
    source_.leaves.push_back(std::move(leaf));
  }

  Source source_;
  std::uint64_t seq_ = 0;
  std::deque<Bytes> payloads_;
};

// A folder for one test, removed with its files.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "callgate-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp " + pattern);
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

inline std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

}  // namespace callgate
