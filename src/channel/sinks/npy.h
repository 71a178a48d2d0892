// SPDX-License-Identifier: Apache-2.0
// The sink Npy: each leaf a .npy file that grows by a row for each lane of each record.
//
// The header's first extent is rewritten in place after the rows that it counts are in the file, at
// the end of each batch: np.load reads the file at any time, also after a crash, and rows that the
// header does not count yet are written over. Where there is room for a part of a batch alone, the
// files have the same first rows of it. A file is written by one sink at a time (sinks/file.h).
// dtypes that NumPy lacks are widened (npy_descr).
//
// A leaf in a program over several devices has a second file beside it, "loss.shard.npy" beside
// "loss.npy", with a row for each of its shards: which part of the whole array it is, and where it
// comes from (ShardRow).
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

// A row of what is known of a leaf of a shard, as a structured type of NumPy's.
struct ShardRow {
  // NumPy's name of the type, for arrays of a rank.
  static std::string descr(std::size_t rank);

  // The row's bytes.
  static std::string of(const Record& record, const LeafPart& part, std::int64_t process);
};

// One file. Rows wait in memory until the batch ends or they are many.
class NpyColumn {
 public:
  // For a leaf, by its name (leaves.h), of which `view` is a lane.
  NpyColumn(std::string name, const ArrayView& view, const std::string& path, FileMode mode);

  // A column of rows of any type of NumPy's: its name, a row's extents and bytes.
  NpyColumn(std::string name, const std::string& descr, const std::vector<std::int64_t>& row,
            std::size_t row_bytes, const std::string& path, FileMode mode);

  // Throws Error unless the leaf fits this file.
  void check(const std::string& name, const ArrayView& view) const {
    check(name, npy_descr(view.dtype), view.shape());
  }
  void check(const std::string& name, const std::string& descr,
             std::span<const std::int64_t> row) const;

  // A batch begins: rows are counted from here.
  void begin();

  // Where it throws, the column is as it was.
  void append(const ArrayView& view);

  void append(std::string_view row);

  // Takes the last row back, which has not been written.
  void take_back() noexcept;

  // Writes what waits, as far as there is room: whole rows.
  void write_rows();

  // The rows of the batch.
  std::uint64_t offered() const noexcept { return offered_; }
  std::uint64_t written() const noexcept { return header_.rows - start_; }

  // Cuts the batch's rows down to the first `count`.
  void keep(std::uint64_t count);

  // After the rows, the header that counts them.
  void count_rows();

  void close() { file_.close(); }

 private:
  static constexpr std::size_t kManyBytes = std::size_t{1} << 20;  // larger writes gain nothing

  void start(const std::string& descr, const std::vector<std::int64_t>& row);

  // Goes on after the rows that the file counts and has; what a crash left behind them is cut off.
  void resume(const std::string& descr, const std::vector<std::int64_t>& row);

  // The number of rows in the file.
  std::uint64_t end() const noexcept { return header_.bytes + header_.rows * row_bytes_; }

  void write_header();

  std::string name_;
  File file_;
  NpyHeader header_;
  std::size_t row_bytes_ = 0;
  std::uint64_t counted_ = 0;  // rows, by the header in the file
  std::uint64_t start_ = 0;    // rows before the batch
  std::uint64_t offered_ = 0;  // rows that the batch brought
  int error_ = 0;              // why not all of them could be written; 0
  std::string rows_;           // not yet in the file
};

class NpySink final : public Sink {
 public:
  // `path` may hold "{name}", which is replaced by the leaf's name (leaves.h) with '_' for what
  // does not belong into a file's name; without it there is one leaf, and a second one is an error.
  // With kAppend, files that exist grow on. After close(), further records open the files again. A
  // record whose dtype or shape is not the file's is refused: it is taken whole or not at all.
  // `process` is the index of this one among those of its program.
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

  // The leaves of a record have rows in step: where one found no room, the others give theirs up.
  void align(const std::vector<NpyColumn*>& columns);

  void write() override;

  std::string path_;
  FileMode mode_;
  const std::int64_t process_;
  // How a file is opened next; nothing for one that was another's when it was to be made.
  std::map<std::string, std::optional<FileMode>> modes_;
  std::map<std::string, std::unique_ptr<NpyColumn>> columns_;  // by path
  NamedSources sources_;
  std::unordered_map<std::uint64_t, std::vector<NpyColumn*>> rows_;  // columns, by Source::id
};

}  // namespace callgate
