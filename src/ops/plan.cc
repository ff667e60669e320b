// Selects the kernel rows that an Ops uses.
#include <algorithm>

#include "ops/ops_impl.h"

namespace freshet::ops {
namespace {

constexpr std::string_view kKinds = "matmul, attention, vector";

struct Forced {
  std::string_view kind;
  std::string_view name;
};

Result<std::vector<Forced>> parse(const std::vector<std::string>& force_kernels) {
  std::vector<Forced> all;
  for (const std::string& text : force_kernels) {
    const size_t equals = text.find('=');
    const Forced f{std::string_view(text).substr(0, equals),
                   equals == std::string::npos ? "" : std::string_view(text).substr(equals + 1)};
    if (f.name.empty() || (f.kind != "matmul" && f.kind != "attention" && f.kind != "vector")) {
      return invalid_argument("cannot force kernel \"{}\": write KIND=NAME with a KIND of {}", text,
                              kKinds);
    }
    all.push_back(f);
  }
  return all;
}

// The row with this name in either table; an error if there is none or the processor cannot run it.
template <class Row>
Result<const Row*> find_forced(const Forced& f, std::span<const Row> backend,
                               std::span<const Row> reference, const Capabilities& capabilities) {
  std::string known;
  for (const auto rows : {backend, reference}) {
    for (const Row& row : rows) {
      if (f.name == row.name) {
        if (capabilities.has(row.isa)) return &row;
        return unsupported("cannot force kernel {}={}: it needs {}, this processor offers {}",
                           f.kind, f.name, name_of(row.isa), name_of(capabilities.isa));
      }
      known += known.empty() ? row.name : fmt::format(" {}", row.name);
    }
  }
  return not_found("cannot force kernel {}={}: no such row; known: {}", f.kind, f.name, known);
}

struct Tables {
  const KernelTable& backend;
  const KernelTable& reference;
  const Capabilities& capabilities;
  const std::vector<Forced>& forced;
};

Status plan_matmul(const Tables& t, std::vector<const MatmulKernel*>& planned) {
  for (const quant::FormatInfo& format : quant::all_formats()) {
    const MatmulKernel* best = nullptr;
    for (const auto rows : {t.backend.matmul, t.reference.matmul}) {
      for (const MatmulKernel& row : rows) {
        const bool fits = row.format == format.format && t.capabilities.has(row.isa);
        if (best == nullptr && fits) best = &row;
      }
    }
    planned.push_back(best);
  }
  for (const Forced& f : t.forced) {
    if (f.kind != "matmul") continue;
    FRESHET_ASSIGN_OR_RETURN(const MatmulKernel* row,
                             find_forced(f, t.backend.matmul, t.reference.matmul, t.capabilities));
    planned[static_cast<size_t>(row->format)] = row;
  }
  return {};
}

Status plan_attention(const Tables& t, std::vector<const AttentionKernel*>& planned) {
  for (const auto rows : {t.backend.attention, t.reference.attention}) {
    for (const AttentionKernel& row : rows) {
      if (t.capabilities.has(row.isa)) planned.push_back(&row);
    }
  }
  for (const Forced& f : t.forced) {
    if (f.kind != "attention") continue;
    FRESHET_ASSIGN_OR_RETURN(
        const AttentionKernel* row,
        find_forced(f, t.backend.attention, t.reference.attention, t.capabilities));
    planned = {row};
  }
  return {};
}

Status plan_vector(const Tables& t, const VectorKernels*& planned) {
  for (const auto rows : {t.backend.vector, t.reference.vector}) {
    for (const VectorKernels& row : rows) {
      if (planned == nullptr && t.capabilities.has(row.isa)) planned = &row;
    }
  }
  for (const Forced& f : t.forced) {
    if (f.kind != "vector") continue;
    FRESHET_ASSIGN_OR_RETURN(planned,
                             find_forced(f, t.backend.vector, t.reference.vector, t.capabilities));
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Ops>> Ops::create(ThreadPool& pool, const KernelTable& backend,
                                         const Capabilities& capabilities,
                                         const OpsOptions& options) {
  FRESHET_ASSIGN_OR_RETURN(const std::vector<Forced> forced, parse(options.force_kernels));
  auto impl = std::make_unique<Impl>(pool, capabilities);
  impl->reference = options.reference;
  const KernelTable none{};
  // Another table of plain kernels, such as that of a simulation, goes before the reference.
  const KernelTable& reference = reference_kernels();
  const bool plain = backend.backend == reference.backend && &backend != &reference;
  const Tables tables{options.reference && !plain ? none : backend, reference, capabilities,
                      forced};
  FRESHET_RETURN_IF_ERROR(plan_matmul(tables, impl->matmul));
  impl->exact_f32 = impl->matmul[static_cast<size_t>(quant::Format::kF32)];
  for (const MatmulKernel& row : backend.matmul) {
    if (!impl->exact_f32->always_fine) break;
    if (row.format == quant::Format::kF32 && capabilities.has(row.isa) && !row.always_fine)
      impl->exact_f32 = &row;
  }
  FRESHET_RETURN_IF_ERROR(plan_attention(tables, impl->attention));
  FRESHET_RETURN_IF_ERROR(plan_vector(tables, impl->vector));
  for (const auto rows : {tables.backend.scores, tables.reference.scores}) {
    for (const ScoreKernel& row : rows) {
      if (impl->scores == nullptr && capabilities.has(row.isa)) impl->scores = &row;
    }
  }
  for (const ActEncoder& e : backend.encoders) {
    const ActEncoder*& slot = impl->encoders[static_cast<size_t>(e.kind)];
    if (slot == nullptr && capabilities.has(e.isa)) slot = &e;
  }
  for (const MatmulKernel* row : impl->matmul) {
    FRESHET_CHECK(row->act == ActKind::kF32 || impl->encoders[static_cast<size_t>(row->act)],
                  "table {} lacks the encoder that {} needs", backend.backend, row->name);
  }
  auto ops = std::unique_ptr<Ops>(new Ops(std::move(impl)));
  FRESHET_RETURN_IF_ERROR(ops->set_scratch(options.scratch_bytes));
  return ops;
}

const AttentionKernel& Ops::Impl::attention_for(const KvShape& shape) const {
  for (const AttentionKernel* row : attention) {
    if (row->supports(shape, {})) return *row;
  }
  check_failed("a row supports the shape", __FILE__, __LINE__,
               fmt::format("attention row {} cannot do kv_heads={} key_dim={} value_dim={} type={}",
                           attention.front()->name, shape.kv_heads, shape.key_dim, shape.value_dim,
                           name_of(shape.type)));
}

std::string_view Ops::matmul_row(quant::Format format) const {
  if (Device* d = device()) {
    const MatmulKernel* row = d->matmul_row(format);
    return row != nullptr ? row->name : "none";
  }
  return impl_->matmul[static_cast<size_t>(format)]->name;
}
std::string Ops::kernel_names(const Weight& weight) const {
  return device() != nullptr ? device()->kernel_names(weight) : weight.kernel->name;
}
std::string_view Ops::attention_row(const KvShape& shape) const {
  if (Device* d = device()) return d->supports(shape).ok() ? "attention.cuda" : "none";
  return impl_->attention_for(shape).name;
}
std::string_view Ops::vector_row() const {
  if (device() != nullptr) return "vector.cuda";
  return impl_->vector->name;
}

}  // namespace freshet::ops
