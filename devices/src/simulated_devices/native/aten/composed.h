// Ops that the CPU has no kernel for, or not the one that is meant, composed of plain ops on the device.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

namespace simulated {
namespace {

// The CPU's kernel takes its random numbers from the CPU's default generator, so the mask is made here.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor mask = at::empty(input.sizes(), input.options().dtype(at::kBool));
  if (train && !*train) return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p, std::nullopt);
  return {p == 1 ? input.mul(0) : input.mul(mask).mul_(1 / (1 - p)), mask};
}

// --- The parts of a batch norm over several ranks. Statistics of halves are floats. ---

using MaybeTensor = std::optional<at::Tensor>;

bool is_given(const MaybeTensor& tensor) { return tensor && tensor->defined(); }

at::Tensor in_floats(const at::Tensor& tensor) { return tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat); }

// A number for each channel, in the shape that spreads it over an input.
at::Tensor by_channel(const at::Tensor& numbers, const at::Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = -1;
  return in_floats(numbers).view(shape);
}

// All dimensions but that of the channels.
std::vector<int64_t> within_channels(const at::Tensor& input) {
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < input.dim(); ++dim)
    if (dim != 1) dims.push_back(dim);
  return dims;
}

std::tuple<at::Tensor, at::Tensor> batch_norm_stats(const at::Tensor& input, double eps) {
  at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor values = in_floats(input);
  const auto dims = within_channels(input);
  return {values.mean(dims), values.var(dims, /*unbiased=*/false).add(eps).rsqrt()};
}

at::Tensor batch_norm_elemt(const at::Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                            const at::Tensor& mean, const at::Tensor& invstd, double) {
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor out = (in_floats(input) - by_channel(mean, input)) * by_channel(invstd, input);
  if (is_given(weight)) out = out * by_channel(*weight, input);
  if (is_given(bias)) out = out + by_channel(*bias, input);
  return out.to(input.scalar_type());
}

// Each rank's statistics weigh as much as it has values. The running variance is the unbiased one.
std::tuple<at::Tensor, at::Tensor> batch_norm_gather_stats_with_counts(
    const at::Tensor&, const at::Tensor& means, const at::Tensor& invstds, const MaybeTensor& running_mean,
    const MaybeTensor& running_var, double momentum, double eps, const at::Tensor& counts) {
  at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor weights = in_floats(counts).view({-1, 1}), total = weights.sum();
  const at::Tensor mean = (in_floats(means) * weights).sum(0) / total;
  const at::Tensor variances = in_floats(invstds).pow(-2) - eps;
  const at::Tensor squares = ((variances + (in_floats(means) - mean).pow(2)) * weights).sum(0);
  if (is_given(running_mean)) running_mean->mul_(1 - momentum).add_(mean.to(running_mean->scalar_type()), momentum);
  if (is_given(running_var))
    running_var->mul_(1 - momentum).add_((squares / (total - 1)).to(running_var->scalar_type()), momentum);
  return {mean, (squares / total + eps).rsqrt()};
}

std::tuple<at::Tensor, at::Tensor> batch_norm_gather_stats(
    const at::Tensor& input, const at::Tensor& means, const at::Tensor& invstds, const MaybeTensor& running_mean,
    const MaybeTensor& running_var, double momentum, double eps, int64_t count) {
  at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor counts = at::empty({means.size(0)}, means.options()).fill_(count);
  return simulated::batch_norm_gather_stats_with_counts(input, means, invstds, running_mean, running_var, momentum, eps, counts);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> batch_norm_backward_reduce(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& invstd,
    const MaybeTensor& weight, bool for_input, bool for_weight, bool for_bias) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto dims = within_channels(input);
  const at::Tensor sum = in_floats(grad).sum(dims);
  const at::Tensor product = (in_floats(grad) * (in_floats(input) - by_channel(mean, input))).sum(dims);
  const auto dtype = is_given(weight) ? weight->scalar_type() : sum.scalar_type();
  return {for_input ? sum : at::Tensor(), for_input ? product : at::Tensor(),
          for_weight ? (product * in_floats(invstd)).to(dtype) : at::Tensor(),
          for_bias ? sum.to(dtype, /*non_blocking=*/false, /*copy=*/true) : at::Tensor()};
}

at::Tensor batch_norm_backward_elemt(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean,
                                     const at::Tensor& invstd, const MaybeTensor& weight, const at::Tensor& sum,
                                     const at::Tensor& product, const at::Tensor& counts) {
  at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor total = in_floats(counts).sum(), scale = in_floats(invstd);
  const at::Tensor slope = in_floats(product) / total * scale.pow(2);
  at::Tensor out = in_floats(grad) - by_channel(in_floats(sum) / total, input);
  out = out - (in_floats(input) - by_channel(mean, input)) * by_channel(slope, input);
  out = out * by_channel(is_given(weight) ? scale * in_floats(*weight) : scale, input);
  return out.to(input.scalar_type());
}

// --- Fused kernels, above autograd, which then knows their derivatives ---

// Fused attention, which a function that is not dispatched chooses: products and a softmax instead.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
                     bool grouped) {
  return std::get<0>(
      at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, causal, std::nullopt, scale, grouped));
}

at::Tensor plus(const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                                         const at::Tensor& cell,
                                                         const std::optional<at::Tensor>& input_bias,
                                                         const std::optional<at::Tensor>& hidden_bias) {
  at::Tensor gates = plus(input_gates, input_bias) + plus(hidden_gates, hidden_bias);
  auto parts = gates.chunk(4, 1);
  at::Tensor next = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * next.tanh(), next, gates};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                            const at::Tensor& hidden, const std::optional<at::Tensor>& input_bias,
                                            const std::optional<at::Tensor>& hidden_bias) {
  auto of_input = plus(input_gates, input_bias).chunk(3, 1), of_hidden = plus(hidden_gates, hidden_bias).chunk(3, 1);
  at::Tensor reset = (of_input[0] + of_hidden[0]).sigmoid(), update = (of_input[1] + of_hidden[1]).sigmoid();
  at::Tensor candidate = (of_input[2] + reset * of_hidden[2]).tanh();
  return {(hidden - candidate) * update + candidate, input_gates};
}

void add_composed(torch::Library& below_autograd, torch::Library& above_autograd) {
  below_autograd.impl("native_dropout", TORCH_FN(native_dropout));
  below_autograd.impl("batch_norm_stats", TORCH_FN(batch_norm_stats));
  below_autograd.impl("batch_norm_elemt", TORCH_FN(batch_norm_elemt));
  below_autograd.impl("batch_norm_gather_stats", TORCH_FN(batch_norm_gather_stats));
  below_autograd.impl("batch_norm_gather_stats_with_counts", TORCH_FN(batch_norm_gather_stats_with_counts));
  below_autograd.impl("batch_norm_backward_reduce", TORCH_FN(batch_norm_backward_reduce));
  below_autograd.impl("batch_norm_backward_elemt", TORCH_FN(batch_norm_backward_elemt));
  for (torch::Library* library : {&below_autograd, &above_autograd}) {
    library->impl("scaled_dot_product_attention", TORCH_FN(attention));
    library->impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
    library->impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  }
}

}  // namespace
}  // namespace simulated
