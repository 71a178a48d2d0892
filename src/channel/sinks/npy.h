// SPDX-License-Identifier: Apache-2.0
// The sink Npy: each leaf is a .npy file that grows by a row for each lane of each record.
//
// At the end of each batch, after the rows are in the file, the header's first extent is rewritten
// in place. np.load can therefore read the file at any time, also after a crash, and rows that the
// header doesn't count yet are overwritten. If there is room for only a part of a batch, all files
// have the same first rows of it. Only one sink at a time writes a file (sinks/file.h). dtypes that
// NumPy lacks are widened (npy_descr).
//
// A leaf in a program over several devices has a second file, "loss.shard.npy" beside "loss.npy".
// It has a row for each shard: its part of the whole array, and its origin (ShardRow).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "channel/consumer.h"
#include "channel/sinks/file.h"
#include "channel/sinks/leaves.h"
#include "channel/sinks/npy_header.h"
#include "core/array_view.h"
#include "core/error.h"

namespace callgate {

// A row of facts about a shard's leaf, as a structured type of NumPy.
struct ShardRow {
  // NumPy's name of the type, for arrays of a rank.
  static std::string descr(std::size_t rank);

  // The row's bytes.
  static std::string of(const Record& record, const LeafPart& part, std::int64_t process);
};

// One file. Rows wait in memory until the batch ends or there are many.
class NpyColumn {
 public:
  // For a leaf, by its name (leaves.h); `view` is one of its lanes.
  NpyColumn(std::string name, const ArrayView& view, const std::string& path, FileMode mode);

  // A column of rows of any NumPy type: its name, a row's extents and bytes.
  NpyColumn(std::string name, const std::string& descr, const std::vector<std::int64_t>& row,
            std::size_t row_bytes, const std::string& path, FileMode mode);

  // Throws Error unless the leaf fits this file.
  void check(const std::string& name, const ArrayView& view) const {
    check(name, npy_descr(view.dtype), view.shape());
  }
  void check(const std::string& name, const std::string& descr,
             std::span<const std::int64_t> row) const;

  // Begins a batch: rows are counted from here.
  void begin();

  // If it throws, the column is unchanged.
  void append(const ArrayView& view);

  void append(std::string_view row);

  // Removes the last row, which has not been written.
  void take_back() noexcept;

  // Writes the waiting rows as far as there is room: whole rows.
  void write_rows();

  // The number of rows in the batch.
  std::uint64_t offered() const noexcept { return offered_; }
  std::uint64_t written() const noexcept { return header_.rows - start_; }

  // Cuts the batch down to its first `count` rows.
  void keep(std::uint64_t count);

  // After the rows, writes the header that counts them.
  void count_rows();

  void close() { file_.close(); }

 private:
  static constexpr std::size_t kManyBytes = std::size_t{1} << 20;  // larger writes gain nothing

  void start(const std::string& descr, const std::vector<std::int64_t>& row);

  // Continues after the rows that the file has and counts; rows behind them, left by a crash, are
  // cut off.
  void resume(const std::string& descr, const std::vector<std::int64_t>& row);

  // The file position behind the last row.
  std::uint64_t end() const noexcept { return header_.bytes + header_.rows * row_bytes_; }

  void write_header();

  std::string name_;
  File file_;
  NpyHeader header_;
  std::size_t row_bytes_ = 0;
  std::uint64_t counted_ = 0;  // rows, by the header in the file
  std::uint64_t start_ = 0;    // rows before the batch
  std::uint64_t offered_ = 0;  // rows of the batch
  int error_ = 0;              // the errno if not all rows could be written, or 0
  std::string rows_;           // not yet in the file
};

class NpySink final : public Sink {
 public:
  // In `path`, "{name}" is replaced by the leaf's name (leaves.h), with '_' for characters that
  // file names can't have. Without "{name}" there is one leaf, and a second one raises an error.
  // With kAppend, existing files grow. After close(), further records open the files again. A
  // record with another dtype or shape than the file is refused as a whole. `process` is the index
  // of this process in its program.
  NpySink(std::string path, FileMode mode, std::int64_t process = 0)
      : path_(std::move(path)), mode_(mode), process_(process) {}

  void close() override;

  std::string description() const override { return "Npy('" + path_ + "')"; }

 private:
  void begin() override {
    for (auto& [path, column] : columns_) column->begin();
  }

  // The path for a leaf's name.
  std::string file_of(std::string part) const;

  NpyColumn* column(const std::string& name, const ArrayView& view);

  // The column of the shards of a leaf.
  NpyColumn* shards_column(const std::string& name, std::size_t rank);

  NpyColumn* column(const std::string& name, const std::string& file, const std::string& descr,
                    const std::vector<std::int64_t>& row, std::size_t row_bytes);

  std::unique_ptr<NpyColumn> new_column(const std::string& name, const std::string& file,
                                        const std::string& descr,
                                        const std::vector<std::int64_t>& row,
                                        std::size_t row_bytes);

  void take(const Record& record) override;

  // Keeps the leaves of a record in step: if one leaf has no room, the others remove their rows.
  void align(const std::vector<NpyColumn*>& columns);

  void write() override;

  std::string path_;
  FileMode mode_;
  const std::int64_t process_;
  // The mode in which a file is opened next; empty for a file that belonged to another writer.
  std::map<std::string, std::optional<FileMode>> modes_;
  std::map<std::string, std::unique_ptr<NpyColumn>> columns_;  // by path
  NamedSources sources_;
  std::unordered_map<std::uint64_t, std::vector<NpyColumn*>> rows_;  // columns, by Source::id
};

}  // namespace callgate
