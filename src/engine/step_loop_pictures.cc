// StepLoop: pictures of requests, from their arrival to the steps that read them.
#include <algorithm>
#include <utility>

#include "engine/step_loop.h"

namespace freshet::engine {
namespace {

bool reads(const scheduler::StepItem& item, const runtime::PicturePlace& place) {
  return place.token < item.first + item.count && place.token + place.count > item.first;
}

}  // namespace

Status StepLoop::begin_pictures(LiveRequest& live, scheduler::NewRequest& order) {
  const Request& r = live.request;
  if (r.pictures.empty()) return {};
  FRESHET_RETURN_IF_ERROR(tower_.reserve(r.pictures));
  live.pictures = std::make_unique<LivePictures>();
  FRESHET_ASSIGN_OR_RETURN(live.pictures->prompt, place_request(r, spec_));
  live.pictures->rows.resize(r.pictures.size());
  if (spec_.vision->cross) live.pictures->cross_rows = cross_rows_of(r, spec_);
  announce_pictures(r, live.pictures->prompt, spec_, tower_, order);
  return {};
}

// Gets the rows of the pictures that the step reads. A request keeps them from chunk to chunk, so
// that a picture is not computed again even without a cache.
void StepLoop::find_rows(StepInFlight& step) {
  const auto each = [&](auto visit) {
    for (size_t i = 0; i < step.plan.items.size(); ++i) {
      if (step.requests[i]->pictures) visit(step.plan.items[i], *step.requests[i]);
    }
  };
  each([](const scheduler::StepItem& item, LiveRequest& live) {
    LivePictures& pictures = *live.pictures;
    const auto& places = pictures.prompt.places;
    if (std::ranges::none_of(places, [&](const auto& place) { return reads(item, place); }))
      pictures.rows.assign(pictures.rows.size(), nullptr);
  });
  each([&](const scheduler::StepItem& item, LiveRequest& live) {
    for (const runtime::PicturePlace& place : live.pictures->prompt.places) {
      if (!reads(item, place)) continue;
      const auto at = static_cast<size_t>(place.picture);
      TowerRows& rows = live.pictures->rows[at];
      if (!rows) rows = tower_.rows_of(*live.request.pictures[at], counted_.pictures);
      step.pictures.push_back(rows);
    }
  });
  if (spec_.vision == nullptr || !spec_.vision->cross) return;
  each([&](const scheduler::StepItem& item, LiveRequest& live) {
    LivePictures& pictures = *live.pictures;
    pictures.cross = {};
    if (!item.encodes) return;
    std::vector<TowerRows> rows;
    std::vector<const VisionRows*> all;
    for (const auto& picture : live.request.pictures) {
      rows.push_back(tower_.rows_of(*picture, counted_.pictures));
      all.push_back(rows.back().get());
    }
    pictures.cross = runtime::cross_rows(all);
  });
}

// What the step's item writes to the cache before its tokens run.
EncoderInput StepLoop::encoder_input(const LiveRequest& live) {
  EncoderInput input;
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

ModelRunner::Pictures StepLoop::pictures_of(const LiveRequest& live) {
  if (!live.pictures) return {};
  shown_.clear();
  for (const TowerRows& rows : live.pictures->rows) shown_.push_back(rows.get());
  return {&live.pictures->prompt, shown_};
}

}  // namespace freshet::engine
