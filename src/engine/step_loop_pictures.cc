// StepLoop: pictures of requests, from their arrival to the steps that read them.
#include <algorithm>
#include <utility>

#include "engine/step_loop.h"
#include "layers/encoder_pass.h"

namespace freshet::engine {
namespace {

constexpr int64_t kLongestSlice = 50'000;  // microseconds, plus what is left of a branch

bool reads(const scheduler::StepItem& item, const runtime::PicturePlace& place) {
  return place.token < item.first + item.count && place.token + place.count > item.first;
}

}  // namespace

Status StepLoop::begin_pictures(LiveRequest& live, scheduler::NewRequest& order) {
  const Request& r = live.request;
  if (r.pictures.empty()) return {};
  order.prepares = prepares_;
  if (!prepares_) FRESHET_RETURN_IF_ERROR(tower_.reserve(r.pictures));
  live.pictures = std::make_unique<LivePictures>();
  FRESHET_ASSIGN_OR_RETURN(live.pictures->prompt, place_request(r, spec_));
  live.pictures->rows.resize(r.pictures.size());
  if (spec_.vision->cross) live.pictures->cross_rows = cross_rows_of(r, spec_);
  announce_pictures(r, live.pictures->prompt, spec_, tower_, order);
  return {};
}

// Gets the rows of the pictures that the step reads. A request keeps them from chunk to chunk, so
// that a picture is not computed again even without a cache. Most are there (prepare_next); others
// were expected in a prefix that was evicted.
void StepLoop::find_rows(StepInFlight& step) {
  const auto each = [&](auto visit) {
    for (size_t i = 0; i < step.plan.items.size(); ++i) {
      if (step.requests[i]->pictures) visit(step.plan.items[i], *step.requests[i]);
    }
  };
  each([](const scheduler::StepItem& item, LiveRequest& live) {
    LivePictures& pictures = *live.pictures;
    const auto& places = pictures.prompt.places;
    const auto is_done = [&](const auto& p) { return p.token + p.count <= item.first; };
    if (!places.empty() && std::ranges::all_of(places, is_done))
      pictures.rows.assign(pictures.rows.size(), nullptr);
  });
  each([&](const scheduler::StepItem& item, LiveRequest& live) {
    for (const runtime::PicturePlace& place : live.pictures->prompt.places) {
      if (!reads(item, place)) continue;
      const auto at = static_cast<size_t>(place.picture);
      TowerRows& rows = live.pictures->rows[at];
      if (!rows) rows = rows_now(*live.request.pictures[at]);
      step.pictures.push_back(rows);
    }
  });
  if (spec_.vision == nullptr || !spec_.vision->cross) return;
  each([&](const scheduler::StepItem& item, LiveRequest& live) {
    LivePictures& pictures = *live.pictures;
    pictures.cross = {};
    if (!item.encodes) return;
    std::vector<const VisionRows*> all;
    for (size_t i = 0; i < pictures.rows.size(); ++i) {
      if (!pictures.rows[i]) pictures.rows[i] = rows_now(*live.request.pictures[i]);
      all.push_back(pictures.rows[i].get());
    }
    pictures.cross = runtime::cross_rows(all);
    pictures.rows.assign(pictures.rows.size(), nullptr);
  });
}

// REQUIRES: the tower has memory for the picture.
TowerRows StepLoop::rows_now(const media::ImageInput& picture) {
  auto rows = tower_.rows_of(picture, counted_.pictures, [] { return true; });
  FRESHET_CHECK(rows.ok(), "{}", rows.status().message());
  return *std::move(rows);
}

// What the step's item writes to the cache before its tokens run.
EncoderInput StepLoop::encoder_input(const LiveRequest& live) const {
  EncoderInput input;
  if (!live.encoded.empty()) {
    input.states = live.encoded.data();
    input.state_rows = std::ssize(live.encoded) / spec_.encoder->hidden_size;
    return input;
  }
  if (live.pictures) {
    input.states = live.pictures->cross.data();
    input.state_rows = live.pictures->cross_rows;
    return input;
  }
  input.ids = live.request.encoder_ids;
  input.features = live.request.features.data();
  input.frames = live.request.frames;
  return input;
}

// ---- ahead of the steps ----------------------------------------------------------------------

// Makes the request that starts next ready: runs the tower or the encoder for it. Between their
// layers, steps of other requests run. Returns false if there is nothing to do.
bool StepLoop::prepare_next() {
  const scheduler::Sequence* const next = scheduler_->next_unready();
  if (next == nullptr) return false;
  const uint64_t id = next->request->id;
  other_since_ = now_us();
  last_step_us_ = 0;
  const bool ready = scheduler_->has_encoder_output(*next->request) ||
                     (live_.at(id)->pictures ? prepare_pictures(*next) : encode_ahead(id));
  if (ready) scheduler_->set_ready(id);
  return true;
}

// Computes the rows that are not in front of the cached prefix. Returns false if the request has
// ended, or another picture came between: then it is tried again.
bool StepLoop::prepare_pictures(const scheduler::Sequence& next) {
  const uint64_t id = next.request->id;
  const LiveRequest& live = *live_.at(id);
  const std::vector<std::shared_ptr<const media::ImageInput>> pictures = live.request.pictures;
  std::vector<bool> needed(pictures.size(), spec_.vision->cross);
  const int32_t cached = scheduler_->cached_prefix(next);
  for (const runtime::PicturePlace& place : live.pictures->prompt.places) {
    if (place.token + place.count > cached) needed[static_cast<size_t>(place.picture)] = true;
  }
  for (size_t i = 0; i < pictures.size(); ++i) {
    if (!needed[i] || live_.at(id)->pictures->rows[i]) continue;
    auto rows = tower_.rows_of(*pictures[i], counted_.pictures, [&] { return step_between(id); });
    if (!rows.ok()) end_request(id, FinishReason::kError, rows.status());
    const auto still = live_.find(id);
    if (still == live_.end() || *rows == nullptr) return false;
    still->second->pictures->rows[i] = *std::move(rows);
  }
  return true;
}

bool StepLoop::encode_ahead(uint64_t id) {
  const EncoderInput input = encoder_input(*live_.at(id));
  std::vector<float> states;
  const bool done = model_.encoder()->run(
      {&input, 1},
      [&](size_t, const ForwardBatch&, const Matrix& out) {
        states.assign(out.data, out.data + out.rows * out.cols);
      },
      [&] { return step_between(id); });
  const auto still = live_.find(id);
  if (!done || still == live_.end()) return false;
  still->second->encoded = std::move(states);
  return true;
}

// Takes orders, and lets a step run if the tower or the encoder has run for as long as the step
// before, or for kLongestSlice. Returns false if the request `id` has ended, or the engine ends.
bool StepLoop::step_between(uint64_t id) {
  {
    const std::lock_guard lock(mutex_);
    if (stop_) return false;
  }
  empty_inbox();
  if (!live_.contains(id)) return false;
  const int64_t from = now_us();
  if (from - other_since_ < std::min(last_step_us_, kLongestSlice)) return true;
  if (step()) {
    ++counted_.encoder.steps_between;
    publish();
  }
  other_since_ = now_us();
  last_step_us_ = other_since_ - from;
  return live_.contains(id);
}

ModelRunner::Pictures StepLoop::pictures_of(const LiveRequest& live) {
  if (!live.pictures) return {};
  shown_.clear();
  for (const TowerRows& rows : live.pictures->rows) shown_.push_back(rows.get());
  return {&live.pictures->prompt, shown_};
}

}  // namespace freshet::engine
