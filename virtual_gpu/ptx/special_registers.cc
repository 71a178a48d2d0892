// SPDX-License-Identifier: Apache-2.0
// Special registers by name. %clock and %globaltimer are read by mov, each time.
#include <map>

#include "decoder.h"

namespace vgpu::ptx {

std::optional<SpecialKind> special_named(std::string_view name) {
  using Kind = SpecialKind;
  static const auto* names = new std::map<std::string_view, SpecialKind>{
      {"%tid.x", Kind::kTidX},
      {"%tid.y", Kind::kTidY},
      {"%tid.z", Kind::kTidZ},
      {"%ntid.x", Kind::kNtidX},
      {"%ntid.y", Kind::kNtidY},
      {"%ntid.z", Kind::kNtidZ},
      {"%ctaid.x", Kind::kCtaidX},
      {"%ctaid.y", Kind::kCtaidY},
      {"%ctaid.z", Kind::kCtaidZ},
      {"%nctaid.x", Kind::kNctaidX},
      {"%nctaid.y", Kind::kNctaidY},
      {"%nctaid.z", Kind::kNctaidZ},
      {"%laneid", Kind::kLaneId},
      {"%warpid", Kind::kWarpId},
      {"%nwarpid", Kind::kNwarpId},
      {"%smid", Kind::kSmId},
      {"%nsmid", Kind::kNsmId},
      {"%gridid", Kind::kGridId},
      {"%lanemask_eq", Kind::kLanemaskEq},
      {"%lanemask_le", Kind::kLanemaskLe},
      {"%lanemask_lt", Kind::kLanemaskLt},
      {"%lanemask_ge", Kind::kLanemaskGe},
      {"%lanemask_gt", Kind::kLanemaskGt},
      {"%clusterid.x", Kind::kClusterIdX},
      {"%clusterid.y", Kind::kClusterIdY},
      {"%clusterid.z", Kind::kClusterIdZ},
      {"%nclusterid.x", Kind::kNclusterIdX},
      {"%nclusterid.y", Kind::kNclusterIdY},
      {"%nclusterid.z", Kind::kNclusterIdZ},
      {"%cluster_ctaid.x", Kind::kClusterCtaIdX},
      {"%cluster_ctaid.y", Kind::kClusterCtaIdY},
      {"%cluster_ctaid.z", Kind::kClusterCtaIdZ},
      {"%cluster_nctaid.x", Kind::kClusterNctaIdX},
      {"%cluster_nctaid.y", Kind::kClusterNctaIdY},
      {"%cluster_nctaid.z", Kind::kClusterNctaIdZ},
      {"%cluster_ctarank", Kind::kClusterCtaRank},
      {"%cluster_nctarank", Kind::kClusterNctaRank},
      {"%dynamic_smem_size", Kind::kDynamicSharedSize},
      {"%total_smem_size", Kind::kTotalSharedSize},
      {"%aggr_smem_size", Kind::kAggregateSharedSize},
      {"%is_explicit_cluster", Kind::kZero},
      {"%current_graph_exec", Kind::kZero},
  };
  auto found = names->find(name);
  if (found == names->end()) return std::nullopt;
  return found->second;
}

}  // namespace vgpu::ptx
