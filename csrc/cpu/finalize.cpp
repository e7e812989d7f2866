// finalize_: from the partials to the control block, the window and the scalars of every slot.
#include "../checks.h"
#include "../math.h"
#include "ops.h"

namespace fusedaccum {
namespace {

// The fixed tree over chunks: lane = chunk index modulo kLanes, then halving. Chunks of inactive slots count as
// zero, so that a chunk's place in the tree never depends on which parameters took part.
double active_sum(const double* partials, const SlotTable& table, const uint8_t* active) {
  double lanes[kLanes] = {};
  for (int64_t slot = 0; slot < table.size(); ++slot) {
    if (!active[slot]) continue;
    const Slot& row = table.at(slot, "active", static_cast<size_t>(slot));
    const int64_t end = row.first_chunk + n_chunks(row.n_elems);
    for (int64_t chunk = row.first_chunk; chunk < end; ++chunk) lanes[chunk % kLanes] += partials[chunk];
  }
  for (int64_t stride = kLanes / 2; stride > 0; stride /= 2) {
    for (int64_t i = 0; i < stride; ++i) lanes[i] += lanes[i + stride];
  }
  return lanes[0];
}

// Neighbouring slots mostly share group and step, and the powers in the bias corrections are the cost here.
template <typename Hyper, typename Scalars, typename Formula>
void write_scalars(const SlotTable& table, const uint8_t* active, const Tensor& hyper, float* steps, Tensor& scalars,
                   double grad_multiplier, const Formula& formula) {
  const Hyper* const groups = static_cast<const Hyper*>(hyper.const_data_ptr());
  Scalars* const rows = static_cast<Scalars*>(scalars.mutable_data_ptr());
  int64_t last = -1;
  for (int64_t slot = 0; slot < table.size(); ++slot) {
    if (!active[slot]) continue;
    steps[slot] += 1.0f;
    const int64_t group = table.rows()[slot].group;
    if (last >= 0 && table.rows()[last].group == group && steps[last] == steps[slot]) {
      rows[slot] = rows[last];
    } else {
      rows[slot] = formula(groups[group], grad_multiplier, static_cast<double>(steps[slot]));
    }
    last = slot;
  }
}

}  // namespace

void finalize_cpu(Tensor control, Tensor scalars, Tensor steps, Tensor window, Tensor partials,
                  std::optional<Tensor> micro_partials, Tensor table, Tensor hyper, Tensor active, int64_t rule,
                  double numerator, double weight, double weight_sq, double max_norm, std::optional<Tensor> extra,
                  bool advance) {
  const char* op = "finalize_";
  check_finalize(op, control, scalars, steps, window, partials, micro_partials, table, hyper, active, rule, extra);
  const int64_t n_slots = table.size(0);
  const SlotTable slot_table(op, table, -1, partials.numel());
  const uint8_t* const mask = static_cast<const uint8_t*>(active.const_data_ptr());
  for (int64_t slot = 0; slot < n_slots; ++slot) {
    const int64_t group = slot_table.rows()[slot].group;
    FA_CHECK(!mask[slot] || (group >= 0 && group < hyper.size(0)), op, ": table[", slot, "] has group ", group,
             "; accepted: 0 to ", hyper.size(0) - 1);
  }
  double sum_sq = active_sum(static_cast<const double*>(partials.const_data_ptr()), slot_table, mask);
  const bool has_micro = micro_partials.has_value();
  double micro_sum_sq = has_micro ? active_sum(optional_doubles(micro_partials), slot_table, mask) : 0.0;
  if (extra.has_value()) {
    sum_sq += optional_doubles(extra)[0];
    micro_sum_sq += optional_doubles(extra)[1];
  }

  double* const window_data = static_cast<double*>(window.mutable_data_ptr());
  const Boundary b = boundary(window_data, sum_sq, micro_sum_sq, numerator, weight, weight_sq, max_norm);
  write_control(static_cast<double*>(control.mutable_data_ptr()), b, sum_sq, micro_sum_sq);
  if (!advance) return;
  advance_window(window_data, b, weight, weight_sq, has_micro);
  if (b.skipped != 0.0) return;

  float* const counts = static_cast<float*>(steps.mutable_data_ptr());
  if (rule == kAdam) {
    write_scalars<AdamHyper, AdamScalars>(
        slot_table, mask, hyper, counts, scalars, b.grad_multiplier,
        [](const AdamHyper& h, double multiplier, double step) { return adam_scalars(h, multiplier, step); });
  } else if (rule == kSgd) {
    write_scalars<SgdHyper, SgdScalars>(
        slot_table, mask, hyper, counts, scalars, b.grad_multiplier,
        [](const SgdHyper& h, double multiplier, double step) { return sgd_scalars(h, multiplier, step); });
  }
}

}  // namespace fusedaccum
