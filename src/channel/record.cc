// See the header.
#include "channel/record.h"

namespace callgate {

std::span<const ArrayView> RecordViews::whole(const Record& record) {
  const Source& source = *record.source;
  KeptArrays::One kept;
  if (source.kept != nullptr) kept = source.kept->at(record.handle());
  for (std::size_t i = 0; i < source.leaves.size(); ++i) {
    const LeafType& leaf = source.leaves[i];
    // Views have no const form; consumers do not write.
    void* data = const_cast<char*>(record.data(leaf));
    if (source.kept != nullptr && i < source.value_leaves)
      data = i < kept.data.size() ? kept.data[i] : nullptr;
    views_[i] =
        ArrayView{data, leaf.dims.data(), static_cast<std::int32_t>(leaf.dims.size()), leaf.dtype};
  }
  return views_;
}

bool RecordViews::select(const Source& source, std::int64_t lane) {
  if (source.lanes.empty()) {
    lane_ = views_;
  } else {
    source.lanes.select_operands(lane, views_, lane_);
  }
  if (!source.has_where) return true;
  return *static_cast<const char*>(lane_[source.value_leaves].data) != 0;
}

}  // namespace callgate
