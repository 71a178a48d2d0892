// SPDX-License-Identifier: Apache-2.0
// Parts of arrays in records, as consumers see them.
#include "channel/consumer.h"

#include <algorithm>

namespace callgate {
namespace {

// Copies `count` elements from one position to another; packed elements fill a byte from its low
// bits.
void copy_elements(const char* from, std::int64_t at, char* to, std::int64_t to_at,
                   std::int64_t count, std::int64_t width) {
  if (width >= 8) {
    std::memcpy(to + to_at * width / 8, from + at * width / 8,
                static_cast<std::size_t>(count * width / 8));
    return;
  }
  for (std::int64_t i = 0; i < count * width; ++i) {
    const std::int64_t read = at * width + i, write = to_at * width + i;
    const int bit = from[read / 8] >> (read % 8) & 1;
    to[write / 8] = static_cast<char>(to[write / 8] | bit << (write % 8));
  }
}

// Copies the first `dims` of each axis, in row-major order, to zeroed memory.
void copy_corner(const ArrayView& from, std::span<const std::int64_t> dims, char* to) {
  const std::size_t last = dims.size() - 1;
  std::vector<std::int64_t> index(dims.size(), 0);
  for (std::int64_t done = 0;; done += dims[last]) {
    std::int64_t position = 0;
    for (std::size_t axis = 0; axis <= last; ++axis)
      position = position * from.dims[axis] + index[axis];
    copy_elements(static_cast<const char*>(from.data), position, to, done, dims[last],
                  bits(from.dtype));
    std::size_t axis = last;
    while (axis > 0 && ++index[axis - 1] == dims[axis - 1]) index[--axis] = 0;
    if (axis == 0) return;
  }
}

}  // namespace

std::span<const ArrayView> RecordViews::whole(const Record& record) {
  const Source& source = *record.source;
  KeptArrays::One kept;
  if (source.kept != nullptr) kept = source.kept->at(record.handle());
  for (std::size_t i = 0; i < source.leaves.size(); ++i) {
    const LeafType& leaf = source.leaves[i];
    // Views have no const form; consumers don't write.
    void* data = const_cast<char*>(record.data(leaf));
    if (source.kept != nullptr && i < source.value_leaves)
      data = i < kept.data.size() ? kept.data[i] : nullptr;
    views_[i] = {data, leaf.dims.data(), static_cast<std::int32_t>(leaf.dims.size()), leaf.dtype};
  }
  return views_;
}

std::int64_t RecordViews::number_of(const Source& source) const noexcept {
  std::int32_t number = 0;
  if (source.lanes.has_numbered())
    std::memcpy(&number, views_[source.value_leaves + (source.has_where ? 1 : 0)].data,
                sizeof(number));
  return number;
}

void RecordViews::cut(const Record& record, std::size_t i) {
  const Source& source = *record.source;
  const Padded& padded = source.padded[i];
  const ArrayView& sizes = lane_[source.values() + i];
  ArrayView& leaf = lane_[padded.leaf];
  // Sizes of several lanes at once come with records of all lanes, which stay whole.
  if (sizes.rank != 1 || sizes.dims[0] > leaf.rank) return;
  const auto count = static_cast<std::size_t>(sizes.dims[0]);
  const std::size_t lead = static_cast<std::size_t>(leaf.rank) - count;
  const std::int64_t shard = record.shard();
  const bool split = shard >= 0 && static_cast<std::size_t>(shard) < padded.starts.size();
  Cut& cut = cuts_[i];
  cut.dims.assign(leaf.dims, leaf.dims + leaf.rank);
  bool whole = true;
  for (std::size_t axis = 0; axis < count; ++axis) {
    const std::int64_t have = cut.dims[lead + axis], most = split ? padded.whole[axis] : have;
    const std::int64_t size = static_cast<const std::int32_t*>(sizes.data)[axis];
    if (size < 0 || size > most) {
      throw Error("tap '" + source.name + "': logical_shape" + source.leaves[padded.leaf].path +
                      ", dimension " + std::to_string(axis),
                  "a size from 0 to " + std::to_string(most), std::to_string(size));
    }
    const std::int64_t start = split ? padded.starts[static_cast<std::size_t>(shard)][axis] : 0;
    cut.dims[lead + axis] = std::clamp<std::int64_t>(size - start, 0, have);
    whole = whole && cut.dims[lead + axis] == have;
  }
  if (whole) return;
  const ArrayView kept{nullptr, cut.dims.data(), leaf.rank, leaf.dtype};
  cut.data.assign(std::max<std::size_t>(kept.nbytes(), 1), 0);
  if (kept.nbytes() != 0) copy_corner(leaf, cut.dims, cut.data.data());
  leaf = ArrayView{cut.data.data(), cut.dims.data(), leaf.rank, leaf.dtype};
}

void Sink::consume(std::span<const Record> records) {
  std::lock_guard lock(mutex_);
  if (errors_.survives([&] { begin(); })) {
    for (const Record& record : records)
      if (!errors_.survives([&] { take(record); })) lose(1);
    write_now();
  } else {
    lose(records.size());
  }
  errors_.rethrow();
}

}  // namespace callgate
