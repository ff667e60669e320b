// Reads weights from a checkpoint: finds them by role, checks their shapes, rearranges them if the
// file has another layout, and packs them.
//
// Every error names the tensor. Row pointers lead into the mapped file if its layout allows it;
// only transposed matrices are copied. Pages are released after packing, so that a loaded model is
// not resident twice. One thread.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "layers/model.h"
#include "layers/weights.h"
#include "models/architecture.h"
#include "models/weight_cache.h"

namespace freshet::models {

// Rows of a matrix in a stored format.
struct Rows {
  quant::Format format = quant::Format::kF32;
  int64_t cols = 0;
  std::vector<const uint8_t*> rows;
  std::vector<Buffer> owned;    // memory of rows that are not in the file
  std::vector<int32_t> inputs;  // as in ops::Weight
  // Columns that have other numbers, in 16 bits, for ops::OutlierColumns.
  struct Outliers {
    std::vector<int32_t> columns;
    quant::Format format = quant::Format::kBF16;
    std::vector<const uint8_t*> rows;  // in the file
  };
  Outliers outliers;

  // Without contents, for a reader of weights that are packed already.
  static Rows shape(quant::Format format, int64_t rows, int64_t cols) {
    return {format, cols, std::vector<const uint8_t*>(static_cast<size_t>(rows)), {}, {}, {}};
  }
  // Decodes row r: the numbers that a product sees, in the order of `cols`.
  void decode(size_t r, float* out) const;
};

enum class Layout { kRows, kTransposed };  // [out, in] or [in, out]
// Whether Rows may have `inputs` and `outliers`.
enum class Inputs { kInOrder, kAnyOrder };

// A tensor by a name of Llama's kind, also where a base model or a multimodal one is saved under
// fewer or more first names. nullptr: absent.
const loader::TensorSource* find_tensor(const loader::Checkpoint& checkpoint,
                                        const std::string& name);
// The numbers behind a stem, plain or packed.
const loader::TensorSource* find_weight(const loader::Checkpoint& checkpoint,
                                        const std::string& stem);

class WeightReader {
 public:
  // `packed`: weights come from there. `copy`: weights go there instead of to memory.
  WeightReader(const loader::Checkpoint& checkpoint, const Architecture& architecture,
               ops::Ops& ops, const Progress& progress, WeightCache* packed = nullptr,
               WeightCacheWriter* copy = nullptr);

  // Whether pack() reads only the shape and the `inputs` of rows.
  bool shapes_suffice() const { return packed_ != nullptr; }
  bool is_gguf() const { return is_gguf_; }
  const json::Value& config() const { return checkpoint_.config(); }
  // A number or a list of numbers of GGUF's metadata; nullopt: absent.
  std::optional<std::vector<float>> metadata(const std::string& key) const;
  const Architecture& architecture() const { return architecture_; }
  ops::Ops& ops() const { return ops_; }

  // From now on, tensors of a layer may have the names of any of these layers, and linear() packs
  // each once for all of them. Empty: neither. `use`: which of their adapters is read.
  void set_shared(std::span<const int> layers, int use);
  int shared_use() const { return shared_use_; }

  // suffix: ".weight", ".bias" or "". nullptr when absent. A weight may lack its ".weight".
  const loader::TensorSource* find(Role role, std::string_view suffix, int layer = -1,
                                   int expert = -1) const;
  const loader::TensorSource* find_name(const std::string& name) const;
  Result<const loader::TensorSource*> require(Role role, std::string_view suffix, int layer = -1,
                                              int expert = -1) const;
  std::string stem(Role role, int layer = -1, int expert = -1) const {
    return names_.stem(role, layer, expert);
  }

  // The matrix [rows, cols] in `source`; or matrix `index` of `count` in a tensor of three
  // dimensions.
  Result<Rows> rows(const loader::TensorSource& source, int64_t rows, int64_t cols,
                    Layout layout = Layout::kRows, Inputs inputs = Inputs::kInOrder) const;
  Result<Rows> rows_of(const loader::TensorSource& source, int64_t index, int64_t count,
                       int64_t rows, int64_t cols, Layout layout,
                       Inputs inputs = Inputs::kInOrder) const;
  // All of a tensor as F32; `count` numbers.
  Result<std::vector<float>> values(const loader::TensorSource& source, int64_t count) const;

  // Packs the rows; `order` (empty: all, in order) picks and orders them. `name` is for errors.
  Status pack(ops::Weight& out, const std::string& name, const Rows& rows,
              std::span<const int64_t> order = {}, ops::Use use = ops::Use::kProducts);
  Status store(Vector& out, std::span<const float> values);
  // A matrix given as F32, in `format` (one that we encode).
  Result<Rows> encode(std::span<const float> values, int64_t cols, quant::Format format) const;

  // A linear layer with its bias if it has one: the whole of a role's tensors.
  Status linear(Linear& out, Role role, int layer, int64_t rows, int64_t cols, bool bias,
                std::span<const int64_t> order = {}, int expert = -1);
  // The same without a bias, of the rows of two roles: `second` behind `first`. Outlier columns
  // stay apart if both have the same.
  Status joined(Linear& out, Role first, int64_t first_rows, Role second, int64_t second_rows,
                int layer, int64_t cols);
  // Weight and bias times `factor`.
  Status norm(NormWeights& out, Role role, const NormSpec& spec, int layer, int64_t size,
              float factor = 1);
  // A vector of a role: each number plus `offset`, times `factor`.
  Status vector(Vector& out, Role role, std::string_view suffix, int layer, int64_t size,
                float offset = 0, float factor = 1);

  void release(const loader::TensorSource& source);
  std::vector<Model::WeightInfo> take_infos() { return std::move(infos_); }

 private:
  const loader::TensorSource* find_stem(const std::string& name, std::string_view suffix) const;
  void note(const std::string& name, ops::Weight& weight);  // and tells it who it is
  Status pack_one(ops::Weight& out, const std::string& name, quant::Format format, int64_t cols,
                  std::span<const uint8_t* const> rows, ops::Use use);

  const loader::Checkpoint& checkpoint_;
  const Architecture& architecture_;
  ops::Ops& ops_;
  const Progress& progress_;
  WeightCache* packed_;
  WeightCacheWriter* copy_;
  bool is_gguf_;
  WeightNames names_;
  std::vector<Model::WeightInfo> infos_;
  size_t done_ = 0;
  std::span<const int> shared_layers_;
  int shared_use_ = 0;
  // By the tensor's name and the first row of the order.
  std::map<std::pair<std::string, int64_t>, ops::Weight> shared_;
};

}  // namespace freshet::models
