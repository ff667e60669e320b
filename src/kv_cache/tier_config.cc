#include "kv_cache/tier_config.h"

#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "ops/attention.h"

namespace freshet::kv_cache {
namespace {

constexpr std::string_view kTransfer = "--kv-transfer-config";

using ReadField = std::function<Status(const json::Value&)>;
using FieldTable = std::vector<std::pair<std::string_view, ReadField>>;

// Every field of the object must be in the table.
Status read_fields(const json::Value& object, std::string_view where, const FieldTable& table) {
  if (!object.is_object())
    return invalid_argument("{}: {} must be a JSON object", kTransfer, where);
  for (const auto& [name, value] : object.as_object()) {
    const ReadField* read = nullptr;
    for (const auto& [known, function] : table) {
      if (known == name) read = &function;
    }
    if (read == nullptr)
      return unsupported("{}: {} has the field '{}', which is not supported here", kTransfer, where,
                         name);
    FRESHET_RETURN_IF_ERROR((*read)(value));
  }
  return {};
}

// A field that may have only these values.
ReadField one_of(std::string_view name, std::vector<json::Value> values, std::string_view advice) {
  return [name, values = std::move(values), advice](const json::Value& v) -> Status {
    for (const json::Value& allowed : values) {
      if (v == allowed) return {};
    }
    return unsupported("{}: '{}' is {}: {}", kTransfer, name, json::write(v), advice);
  };
}

Status read_bytes_field(const json::Value& v, std::string_view name, size_t& to) {
  const auto number = v.is_number() ? v.as_int64() : std::nullopt;
  if (!number || *number < 1)
    return invalid_argument("{}: '{}' must be a number of bytes above 0", kTransfer, name);
  to = static_cast<size_t>(*number);
  return {};
}

Status read_file_tier(const json::Value& tier, TierConfig& config) {
  const json::Value* const type = tier.is_object() ? tier.find("type") : nullptr;
  if (type == nullptr || *type != json::Value("fs")) {
    return unsupported("{}: the 'type' of a secondary tier must be fs: a folder of this machine",
                       kTransfer);
  }
  if (tier.find("root_dir") == nullptr)
    return invalid_argument("{}: a tier of type fs needs 'root_dir'", kTransfer);
  return read_fields(
      tier, "a secondary tier",
      {{"type", [](const json::Value&) { return Status(); }},
       {"root_dir",
        [&](const json::Value& v) -> Status {
          if (!v.is_string() || v.as_string().empty())
            return invalid_argument("{}: 'root_dir' must be a folder", kTransfer);
          if (!config.folder.empty() && config.folder != v.as_string()) {
            return invalid_argument("{}: 'root_dir' is {}, but --kv-cache-dir is {}", kTransfer,
                                    v.as_string(), config.folder);
          }
          config.folder = v.as_string();
          return {};
        }},
       {"n_read_threads",
        [&](const json::Value& v) -> Status {
          const auto number = v.is_number() ? v.as_int64() : std::nullopt;
          if (!number || *number < 1 || *number > 64)
            return invalid_argument("{}: 'n_read_threads' must be 1 to 64", kTransfer);
          config.readers = static_cast<int>(*number);
          return {};
        }},
       {"n_write_threads", one_of("n_write_threads", {1}, "a log has one writer: leave it out")}});
}

Status read_extra(const json::Value& extra, TierConfig& config) {
  return read_fields(
      extra, "'kv_connector_extra_config'",
      {{"spec_name", one_of("spec_name", {"CPUOffloadingSpec", "TieringOffloadingSpec"},
                            "must be CPUOffloadingSpec or TieringOffloadingSpec")},
       {"cpu_bytes_to_use",
        [&](const json::Value& v) {
          return read_bytes_field(v, "cpu_bytes_to_use", config.host_bytes);
        }},
       {"block_size", one_of("block_size", {ops::kBlockTokens}, "blocks have 16 tokens")},
       {"blocks_per_chunk", one_of("blocks_per_chunk", {1}, "leave it out or send 1")},
       {"store_threshold",
        one_of("store_threshold", {0}, "blocks are stored at once: leave it out or send 0")},
       {"eviction_policy",
        [&](const json::Value& v) -> Status {
          if (!v.is_string() || (v.as_string() != "lru" && v.as_string() != "arc"))
            return invalid_argument("{}: 'eviction_policy' must be lru or arc", kTransfer);
          config.policy = v.as_string();
          return {};
        }},
       {"offload_prompt_only",
        [&](const json::Value& v) -> Status {
          if (!v.is_bool())
            return invalid_argument("{}: 'offload_prompt_only' must be true or false", kTransfer);
          config.prompt_only = v.as_bool();
          return {};
        }},
       {"secondary_tiers", [&](const json::Value& v) -> Status {
          if (!v.is_array() || v.as_array().size() > 1)
            return unsupported("{}: 'secondary_tiers' must be a list of at most one tier",
                               kTransfer);
          for (const json::Value& tier : v.as_array())
            FRESHET_RETURN_IF_ERROR(read_file_tier(tier, config));
          return {};
        }}});
}

}  // namespace

Status read_transfer_config(const std::string& text, TierConfig& config) {
  auto parsed = json::parse(text);
  if (!parsed.ok()) return parsed.status().with_context(kTransfer);
  config.prompt_only = true;  // the default of vLLM
  const json::Value* extra = nullptr;
  bool named = false;
  FRESHET_RETURN_IF_ERROR(read_fields(
      *parsed, "the value",
      {{"kv_connector",
        [&](const json::Value& v) {
          named = true;
          return one_of("kv_connector", {"OffloadingConnector"}, "must be OffloadingConnector")(v);
        }},
       {"kv_role", one_of("kv_role", {"kv_both"}, "must be kv_both")},
       {"kv_connector_extra_config", [&](const json::Value& v) {
          extra = &v;
          return Status();
        }}}));
  if (!named)
    return invalid_argument("{} needs \"kv_connector\": \"OffloadingConnector\"", kTransfer);
  if (extra != nullptr) FRESHET_RETURN_IF_ERROR(read_extra(*extra, config));
  if (config.host_bytes == 0) {
    return invalid_argument("{} needs 'cpu_bytes_to_use' in 'kv_connector_extra_config'",
                            kTransfer);
  }
  return {};
}

}  // namespace freshet::kv_cache
