// csrc/math.h, element by element: each function takes arrays and loops. tests/conftest.py compiles it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <array>
#include <vector>

#include "math.h"

namespace py = pybind11;
using namespace fusedaccum;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

// Calls `element(i)` for each i and returns the results as an array.
template <typename Out, typename Element>
py::array_t<Out> mapped(py::ssize_t n, const Element& element) {
  py::array_t<Out> result(n);
  Out* const out = result.mutable_data();
  for (py::ssize_t i = 0; i < n; ++i) out[i] = element(i);
  return result;
}

// Floats go in and out as their bits: a float on its way through Python could lose a NaN's payload.
template <typename Narrow>
py::array_t<uint32_t> widened(const Array<uint16_t>& bits) {
  const uint16_t* const in = bits.data();
  return mapped<uint32_t>(bits.size(), [&](py::ssize_t i) { return bits_of(to_float(Narrow{in[i]})); });
}

template <typename Narrow>
py::array_t<uint16_t> rounded(const Array<uint32_t>& bits) {
  const uint32_t* const in = bits.data();
  return mapped<uint16_t>(bits.size(), [&](py::ssize_t i) {
    Narrow out;
    round_to(out, float_of(in[i]));
    return out.bits;
  });
}

py::array_t<float> scaled_all(const Array<float>& grad, float scale) {
  return mapped<float>(grad.size(), [&](py::ssize_t i) { return scaled(grad.data()[i], scale); });
}

py::array_t<float> accumulated_all(const Array<float>& acc, const Array<float>& grad, float scale) {
  return mapped<float>(grad.size(), [&](py::ssize_t i) { return accumulated(acc.data()[i], grad.data()[i], scale); });
}

// A row of `hyper` or `scalars` as the struct it stands for, and back.
template <typename Struct, typename Value>
Struct as_struct(const Array<Value>& row) {
  if (row.size() * sizeof(Value) != sizeof(Struct)) throw std::invalid_argument("a row has another length");
  Struct result;
  std::memcpy(&result, row.data(), sizeof result);
  return result;
}

template <typename Struct>
py::array_t<float> as_row(const Struct& scalars) {
  py::array_t<float> result(sizeof(Struct) / sizeof(float));
  std::memcpy(result.mutable_data(), &scalars, sizeof scalars);
  return result;
}

// Rows of state, (n, kColumns), through `update`, one call a row.
template <size_t kColumns, typename State, typename Update>
py::array_t<float> updated(const Array<float>& states, const Update& update) {
  static_assert(sizeof(State) == kColumns * sizeof(float), "a state is a row of floats");
  const py::ssize_t n = states.size() / kColumns;
  py::array_t<float> result(std::vector<py::ssize_t>{n, kColumns});
  for (py::ssize_t i = 0; i < n; ++i) {
    State state;
    std::memcpy(&state, states.data() + i * kColumns, sizeof state);
    state = update(state, i);
    std::memcpy(result.mutable_data() + i * kColumns, &state, sizeof state);
  }
  return result;
}

py::array_t<float> adam_update_all(const Array<float>& states, const Array<float>& acc, const Array<float>& scalars,
                                   bool amsgrad) {
  const AdamScalars c = as_struct<AdamScalars>(scalars);
  return updated<4, AdamState>(states, [&](const AdamState& s, py::ssize_t i) {
    return amsgrad ? adam_update<true>(s, acc.data()[i], c) : adam_update<false>(s, acc.data()[i], c);
  });
}

py::array_t<float> sgd_update_all(const Array<float>& states, const Array<float>& acc, const Array<float>& scalars,
                                  bool momentum) {
  const SgdScalars c = as_struct<SgdScalars>(scalars);
  return updated<2, SgdState>(states, [&](const SgdState& s, py::ssize_t i) {
    return momentum ? sgd_update<true>(s, acc.data()[i], c) : sgd_update<false>(s, acc.data()[i], c);
  });
}

// Calls `change` on a copy of a row of `window`, and returns the copy.
template <typename Change>
py::array_t<double> changed_window(const Array<double>& window, const Change& change) {
  if (window.size() != kWindow) throw std::invalid_argument("a window has another length");
  py::array_t<double> result(window.size(), window.data());
  change(result.mutable_data());
  return result;
}

}  // namespace

PYBIND11_MODULE(math_module, m) {
  m.def("bf16_to_float", &widened<bf16>);
  m.def("fp16_to_float", &widened<fp16>);
  m.def("round_to_bf16", &rounded<bf16>);
  m.def("round_to_fp16", &rounded<fp16>);
  m.def("scaled", &scaled_all);
  m.def("accumulated", &accumulated_all);
  m.def("adam_update", &adam_update_all);
  m.def("sgd_update", &sgd_update_all);
  m.def("adam_scalars", [](const Array<double>& hyper, double multiplier, double step) {
    return as_row(adam_scalars(as_struct<AdamHyper>(hyper), multiplier, step));
  });
  m.def("sgd_scalars", [](const Array<double>& hyper, double multiplier, double step) {
    return as_row(sgd_scalars(as_struct<SgdHyper>(hyper), multiplier, step));
  });
  m.def("integer_power", [](double base, int64_t exponent) { return integer_power(base, exponent); });
  m.def("clip_coefficient", [](double norm, double max_norm) { return clip_coefficient(norm, max_norm); });
  m.def("effective_scale", [](double scale, const Array<double>& factor) {
    return effective_scale(scale, factor.size() == 0 ? nullptr : factor.data());
  });
  m.def("update_loss_scale", [](const Array<double>& window, bool found_inf) {
    return changed_window(window, [&](double* row) { update_loss_scale(row, found_inf); });
  });
  m.def("update_noise",
        [](const Array<double>& window, double norm, double micro_norm, double weight, double weight_sq) {
          return changed_window(window, [&](double* row) { update_noise(row, norm, micro_norm, weight, weight_sq); });
        });
  m.def("boundary", [](const Array<double>& window, double sum_sq, double micro_sum_sq, double numerator, double weight,
                       double weight_sq, double max_norm) {
    py::array_t<double> control(kControl);
    const Boundary b = boundary(window.data(), sum_sq, micro_sum_sq, numerator, weight, weight_sq, max_norm);
    write_control(control.mutable_data(), b, sum_sq, micro_sum_sq);
    return control;
  });
}
