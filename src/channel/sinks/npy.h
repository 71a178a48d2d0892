// The sink Npy: each leaf a .npy file that grows by a row for each lane of each record.
//
// The header's first extent is rewritten in place after the rows that it counts are in the file, at
// the end of each batch: np.load reads the file at any time, also after a crash, and rows that the
// header does not count yet are written over. Where there is room for a part of a batch alone, the
// files have the same first rows of it. A file is written by one sink at a time (FileLock).
// dtypes that NumPy lacks are widened (npy_descr).
//
// Runs on its channel's thread, without the GIL; other threads may use it as well.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "channel/consumer.h"
#include "channel/sinks/file.h"
#include "channel/sinks/leaves.h"
#include "channel/sinks/npy_header.h"
#include "core/error.h"

namespace callgate {

// What a column holds a row of each lane of: a leaf, by its name (leaves.h), of a tap.
struct NpyLeaf {
  std::string name, tap;
  DType dtype;
  std::span<const std::int64_t> row;
};

// One file. Rows wait in memory until the batch ends or they are many.
class NpyColumn {
 public:
  NpyColumn(const NpyLeaf& leaf, const std::string& path, FileMode mode)
      : name_(leaf.name), tap_(leaf.tap), file_("the sink Npy", path, {.mode = mode}) {
    if (!file_.regular()) throw Error("the sink Npy", "a regular file", "'" + path + "'");
    header_.descr = npy_descr(leaf.dtype);
    header_.row.assign(leaf.row.begin(), leaf.row.end());
    row_bytes_ = std::stoul(header_.descr.substr(2));
    for (std::int64_t extent : leaf.row) row_bytes_ *= static_cast<std::size_t>(extent);
    file_.claim();
    if (file_.size() != 0) {
      resume(leaf);
    } else {
      header_.bytes = header_.text().size();
      FirstError error;
      if (!error.survives([&] { write_header(); })) file_.cut(0);  // half of it is no beginning
      error.rethrow();
    }
  }

  // Throws Error unless the leaf fits this file.
  void check(const NpyLeaf& leaf) const {
    auto refuse = [&](const std::string& expected, const std::string& got) {
      throw Error("the sink Npy writes '" + file_.path() + "'", expected, got);
    };
    const std::string quoted = "'" + leaf.name + "'";
    if (leaf.name != name_)
      refuse("the leaf '" + name_ + "' alone, or a path with {name} for a file each",
             quoted + " as well");
    if (leaf.tap != tap_)  // {"b": x} of the tap 'a', and the tap 'a/b'
      refuse(quoted + " of the tap '" + tap_ + "'", "that of the tap '" + leaf.tap + "'");
    const std::string have = "rows of " + type_text(header_.descr, header_.row);
    const std::string got = "rows of " + type_text(npy_descr(leaf.dtype), leaf.row);
    if (have != got) refuse(quoted + " to be " + have, got);
  }

  // A batch begins: rows are counted from here.
  void begin() {
    file_.claim();
    start_ = header_.rows;
    offered_ = 0;
    error_ = 0;
  }

  // Where it throws, the column is as it was.
  void append(const ArrayView& view) {
    if (error_ == 0) {  // else it would be behind rows that found no room
      append_whole(rows_, [&] { append_row(rows_, view); });
      ++waiting_;
    }
    ++offered_;
  }

  // Takes the last row back, which has not been written.
  void take_back() noexcept {
    --offered_;
    if (error_ != 0) return;
    --waiting_;
    rows_.resize(rows_.size() - row_bytes_);
  }

  bool has_many() const noexcept { return rows_.size() >= kManyBytes; }

  // Writes what waits, as far as there is room: whole rows.
  void write_rows() {
    const std::string rows = std::exchange(rows_, {});
    const std::uint64_t count = std::exchange(waiting_, 0);
    const Transfer done = file_.write_at(header_.bytes + header_.rows * row_bytes_, rows);
    header_.rows += row_bytes_ == 0 ? count : done.bytes / row_bytes_;
    if (done.error != 0) error_ = done.error;
  }

  // Of the batch.
  std::uint64_t offered() const noexcept { return offered_; }
  std::uint64_t written() const noexcept { return header_.rows - start_; }

  // Cuts the batch's rows down to the first `count`.
  void keep(std::uint64_t count) {
    header_.rows = start_ + std::min(count, written());
    file_.truncate(header_.bytes + header_.rows * row_bytes_);
  }

  // After the rows, the header that counts them.
  void count_rows() {
    if (counted_ != header_.rows) write_header();
    counted_ = header_.rows;
    if (error_ != 0) file_.fail("write to", error_);
  }

  void close() { file_.close(); }

 private:
  static constexpr std::size_t kManyBytes = std::size_t{1} << 20;  // larger writes gain nothing

  // The elements as the file holds them.
  static void append_row(std::string& out, const ArrayView& view) {
    auto append = [&](auto value) {
      out.append(reinterpret_cast<const char*>(&value), sizeof(value));
    };
    if (npy_stores_as_is(view.dtype)) {
      out.append(static_cast<const char*>(view.data), view.nbytes());
      return;
    }
    each_element(view, [&](auto value) {
      using T = decltype(value);
      if constexpr (std::is_same_v<T, float>) append(value);
      if constexpr (std::is_same_v<T, std::int64_t>) append(static_cast<std::int8_t>(value));
      if constexpr (std::is_same_v<T, std::uint64_t>) append(static_cast<std::uint8_t>(value));
    });
  }

  // Goes on after the rows that the file counts and has; what a crash left behind them is cut off.
  void resume(const NpyLeaf& leaf) {
    header_ = NpyHeader::parse(file_.read_at(0, NpyHeader::kLimit), file_.path());
    check(leaf);
    const std::uint64_t bytes = file_.size() - header_.bytes;
    counted_ = header_.rows;
    if (row_bytes_ != 0) header_.rows = std::min(header_.rows, bytes / row_bytes_);
    file_.truncate(header_.bytes + header_.rows * row_bytes_);
  }

  void write_header() {
    const Transfer done = file_.write_at(0, header_.text());
    if (done.error != 0) file_.fail("write to", done.error);
  }

  std::string name_, tap_;
  File file_;
  NpyHeader header_;
  std::size_t row_bytes_ = 0;
  std::uint64_t counted_ = 0;  // rows, by the header in the file
  std::uint64_t waiting_ = 0;  // rows in rows_
  std::uint64_t start_ = 0;    // rows before the batch
  std::uint64_t offered_ = 0;  // rows that the batch brought
  int error_ = 0;              // why not all of them could be written; 0
  std::string rows_;
};

class NpySink final : public Consumer {
 public:
  // `path` may hold "{name}", which is replaced by the leaf's name (leaves.h) with '_' for what
  // does not belong into a file's name; without it there is one leaf, and a second one is an error.
  // With kAppend, files that exist grow on. After close(), further records open the files again.
  NpySink(std::string path, FileMode mode) : path_(std::move(path)), mode_(mode) {}

  // Throws Error for a leaf whose dtype or shape is not the file's; a record is taken whole or not
  // at all.
  void consume(std::span<const Record> records) override {
    std::lock_guard lock(mutex_);
    auto begin = [&] {
      for (auto& [path, column] : columns_) column->begin();
    };
    auto take = [&](const Record& record) { add(record); };
    consume_each(*this, records, begin, take, [&] { write_out(); });
  }

  void close() override {
    std::lock_guard lock(mutex_);
    layouts_.clear();
    auto columns = std::exchange(columns_, {});
    for (auto& [path, column] : columns) column->close();
  }

  std::string description() const override { return "Npy('" + path_ + "')"; }

 private:
  // The columns of the leaves of one source, and its views.
  struct Layout {
    explicit Layout(const Source& source) : views(source) { check_names("Npy", source); }
    RecordViews views;
    std::vector<NpyColumn*> columns;
  };

  // The path for a leaf's name.
  std::string file_of(std::string part) const {
    constexpr std::string_view kPlaceholder = "{name}", kOdd = "/\\:*?\"<>|";
    for (char& c : part)
      if (static_cast<unsigned char>(c) < 0x20 || kOdd.find(c) != std::string_view::npos) c = '_';
    if (part.starts_with('.')) part.front() = '_';
    std::string file = path_;
    for (std::size_t at = file.find(kPlaceholder); at != std::string::npos;
         at = file.find(kPlaceholder, at + part.size()))
      file.replace(at, kPlaceholder.size(), part);
    return file;
  }

  NpyColumn& column(const NpyLeaf& leaf) {
    const std::string file = file_of(leaf.name);
    auto found = columns_.find(file);
    if (found == columns_.end()) found = columns_.emplace(file, new_column(leaf, file)).first;
    found->second->check(leaf);
    return *found->second;
  }

  std::unique_ptr<NpyColumn> new_column(const NpyLeaf& leaf, const std::string& file) {
    if (refused_.contains(file))
      throw Error(ErrorCode::kAlreadyExists, "the sink Npy, '" + file + "'",
                  "a file that nobody else writes to",
                  "one that another sink wrote when the first row came; it is not begun anew");
    const FileMode mode = made_.contains(file) ? FileMode::kAppend : mode_;
    try {
      auto column = std::make_unique<NpyColumn>(leaf, file, mode);
      column->begin();
      made_.insert(file);
      return column;
    } catch (const Error& error) {
      if (mode == FileMode::kCreate && error.code() == ErrorCode::kAlreadyExists)
        refused_.insert(file);
      throw;
    }
  }

  // Finds all columns before any of them gets a row. `leaves`: those of one lane.
  void resolve(Layout& layout, const Source& source, std::span<const ArrayView> leaves) {
    std::vector<NpyColumn*> columns;
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      std::string name = column_name(source, source.leaves[i]);
      columns.push_back(
          &column({std::move(name), source.name, leaves[i].dtype, leaves[i].shape()}));
    }
    layout.columns = std::move(columns);
  }

  void add(const Record& record) {
    Layout& layout = layouts_.try_emplace(record.source->id, *record.source).first->second;
    visit_lanes(*this, layout.views, record, [&](std::int64_t, std::span<const ArrayView> leaves) {
      // Of padded arrays each record may have another shape.
      if (layout.columns.empty() || !record.source->padded.empty())
        resolve(layout, *record.source, leaves);
      std::size_t done = 0;
      try {
        for (; done < leaves.size(); ++done) layout.columns[done]->append(leaves[done]);
      } catch (...) {  // the columns stay in step
        while (done-- > 0) layout.columns[done]->take_back();
        throw;
      }
      for (NpyColumn* column : layout.columns)
        if (column->has_many()) column->write_rows();
    });
  }

  // The leaves of a record have rows in step: where one found no room, the others give theirs up.
  void align(const std::vector<NpyColumn*>& columns) {
    if (columns.empty()) return;
    std::uint64_t offered = 0, written = columns.front()->written();
    bool in_step = true;
    for (const NpyColumn* column : columns) {
      in_step = in_step && (offered == 0 || offered == column->offered());
      offered = std::max(offered, column->offered());
      written = std::min(written, column->written());
    }
    if (written >= offered) return;
    if (in_step)
      for (NpyColumn* column : columns) column->keep(written);
    lose(offered - written);
  }

  void write_out() {
    for (auto& [path, column] : columns_) column->write_rows();
    std::set<std::vector<NpyColumn*>> seen;  // taps that are traced again share their columns
    for (auto& [id, layout] : layouts_)
      if (seen.insert(layout.columns).second) align(layout.columns);
    FirstError errors;
    for (auto& [path, column] : columns_) errors.survives([&] { column->count_rows(); });
    errors.rethrow();
  }

  std::mutex mutex_;  // guards what follows: Python may write and close beside a channel
  std::string path_;
  FileMode mode_;
  std::set<std::string> made_;     // by this sink: opened again they grow on
  std::set<std::string> refused_;  // another's when they were to be made
  std::map<std::string, std::unique_ptr<NpyColumn>> columns_;  // by path
  std::unordered_map<std::uint64_t, Layout> layouts_;          // by Source::id
};

}  // namespace callgate
