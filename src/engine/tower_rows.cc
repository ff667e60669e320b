#include "engine/tower_rows.h"

#include <chrono>
#include <cstring>
#include <limits>
#include <utility>

namespace freshet::engine {
namespace {

constexpr size_t kMostNames = size_t{1} << 16;

std::array<int32_t, 8> words_of(const media::ContentHash& hash) {
  std::array<int32_t, 8> words;
  static_assert(sizeof words == sizeof hash);
  std::memcpy(words.data(), hash.data(), sizeof words);
  return words;
}

}  // namespace

int32_t TowerCache::name_of(const media::ContentHash& hash) {
  if (const auto known = names_.find(hash); known != names_.end()) {
    name_order_.splice(name_order_.end(), name_order_, known->second.used);
    return known->second.name;
  }
  if (names_.size() >= kMostNames) {
    names_.erase(name_order_.front());
    name_order_.pop_front();
  }
  const int32_t name = next_name_--;
  // Far more contents than any cache holds blocks: the first names are free again.
  if (next_name_ == std::numeric_limits<int32_t>::min()) next_name_ = scheduler::kFirstPictureName;
  names_[hash] = {name, name_order_.insert(name_order_.end(), hash)};
  return name;
}

Status TowerCache::reserve(std::span<const std::shared_ptr<const media::ImageInput>> pictures) {
  for (const auto& picture : pictures) {
    const VisionInput input = runtime::vision_input(*picture, tower_->spec());
    FRESHET_RETURN_IF_ERROR(tower_->reserve(VisionTower::positions(tower_->spec(), input)));
  }
  return {};
}

void TowerCache::forget_oldest() {
  const auto oldest = rows_.find(order_.front());
  bytes_ -= oldest->second.bytes;
  rows_.erase(oldest);
  order_.pop_front();
}

Result<TowerRows> TowerCache::rows_of(const media::ImageInput& picture,
                                      EngineStats::Pictures& counted, FunctionRef<bool()> between) {
  if (const auto known = rows_.find(picture.hash); known != rows_.end()) {
    order_.splice(order_.end(), order_, known->second.used);
    ++counted.cached;
    return known->second.rows;
  }
  const auto from = std::chrono::steady_clock::now();
  const VisionInput input = runtime::vision_input(picture, tower_->spec());
  FRESHET_RETURN_IF_ERROR(tower_->reserve(VisionTower::positions(tower_->spec(), input)));
  std::chrono::steady_clock::duration elsewhere{};
  std::optional<VisionRows> made = tower_->run(input, [&] {
    const auto left = std::chrono::steady_clock::now();
    const bool goes_on = between();
    elsewhere += std::chrono::steady_clock::now() - left;
    return goes_on;
  });
  if (!made) return TowerRows();
  auto rows = std::make_shared<const VisionRows>(*std::move(made));
  ++counted.computed;
  counted.seconds +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - from - elsewhere).count();
  const size_t bytes = rows->values.size() * sizeof(float);
  if (bytes <= budget_ && !rows_.contains(picture.hash)) {
    while (bytes_ + bytes > budget_) forget_oldest();
    rows_[picture.hash] = {rows, bytes, order_.insert(order_.end(), picture.hash)};
    bytes_ += bytes;
  }
  counted.cache_bytes = static_cast<int64_t>(bytes_);
  return rows;
}

Result<runtime::PicturePrompt> place_request(const Request& request, const ModelSpec& spec) {
  std::vector<runtime::PictureLayout> layouts;
  for (const auto& picture : request.pictures)
    layouts.push_back(runtime::picture_layout(*picture, *spec.vision));
  return runtime::place_pictures(spec, request.prompt, layouts);
}

int64_t cross_rows_of(const Request& request, const ModelSpec& spec) {
  int64_t rows = 0;
  for (const auto& picture : request.pictures)
    rows += runtime::picture_layout(*picture, *spec.vision).rows;
  return rows;
}

int64_t most_cross_rows(const ModelSpec& spec) {
  for (const LayerSpec& layer : spec.layers) {
    if (const CrossAttentionSpec* cross = layer.find<CrossAttentionSpec>())
      return cross->encoder_length;
  }
  return 0;
}

void announce_pictures(const Request& request, const runtime::PicturePrompt& prompt,
                       const ModelSpec& spec, TowerCache& cache, scheduler::NewRequest& order) {
  if (spec.vision->cross) {
    order.encoder_tokens = static_cast<int32_t>(cross_rows_of(request, spec));
    for (const auto& picture : request.pictures) {
      order.salt += '\0';
      order.salt.append(picture->hash.begin(), picture->hash.end());
      order.encoder_content.append(picture->hash.begin(), picture->hash.end());
    }
    return;
  }
  const bool both_ways = sees_whole_pictures(spec);
  for (const runtime::PicturePlace& place : prompt.places) {
    const media::ContentHash& hash = request.pictures[static_cast<size_t>(place.picture)]->hash;
    order.pictures.push_back(
        {place.token, place.count, cache.name_of(hash), words_of(hash), both_ways});
  }
}

}  // namespace freshet::engine
