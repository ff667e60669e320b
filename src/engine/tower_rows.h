// What the vision tower makes of pictures, and where in prompts it goes.
//
// Rows are kept by the picture's content within a budget of bytes, least recently used first out;
// a request holds the rows that it is about to read, whatever the budget. Since a tower's result
// depends on the picture alone, a hit changes no bit. Used by the step thread only.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "freshet/engine.h"
#include "layers/vision_tower.h"
#include "media/image_input.h"
#include "runtime/picture_prompt.h"
#include "scheduler/scheduler.h"

namespace freshet::engine {

using TowerRows = std::shared_ptr<const VisionRows>;

// The pictures of a request that runs.
struct LivePictures {
  runtime::PicturePrompt prompt;
  std::vector<TowerRows> rows;  // [pictures]; nullptr: not needed, or not there
  // Of models that read by cross-attention: what is written to the cache in the first step.
  std::vector<float> cross;  // [cross_rows, width]
  int64_t cross_rows = 0;    // of all pictures together
};

class TowerCache {
 public:
  // `tower` may be nullptr: then no request has pictures. It must outlive the cache.
  TowerCache(VisionTower* tower, size_t budget) : tower_(tower), budget_(budget) {}

  // The name of the content in the prefix cache's keys (scheduler/pictures.h). A content that was
  // not seen for long gets a new name: its blocks are then not found, and no others are.
  int32_t name_of(const media::ContentHash& hash);
  // Takes the memory that the pictures need in the tower. Errors: there is too little.
  Status reserve(std::span<const std::shared_ptr<const media::ImageInput>> pictures);
  // Runs the tower if it must, which takes its memory. `between` is called between its layers on
  // hosts; nullptr: it ended the run (VisionTower::run).
  Result<TowerRows> rows_of(const media::ImageInput& picture, EngineStats::Pictures& counted,
                            FunctionRef<bool()> between);

 private:
  struct Entry {
    TowerRows rows;
    size_t bytes = 0;
    std::list<media::ContentHash>::iterator used;
  };
  struct Name {
    int32_t name = 0;
    std::list<media::ContentHash>::iterator used;
  };
  void forget_oldest();

  VisionTower* const tower_;
  const size_t budget_;
  size_t bytes_ = 0;
  std::list<media::ContentHash> order_;  // of rows_, oldest use first
  std::map<media::ContentHash, Entry> rows_;
  std::list<media::ContentHash> name_order_;  // of names_, oldest use first
  std::map<media::ContentHash, Name> names_;
  int32_t next_name_ = scheduler::kFirstPictureName;
};

// An error if the prompt's image tokens do not fit the pictures.
Result<runtime::PicturePrompt> place_request(const Request& request, const ModelSpec& spec);

// Rows of all pictures of the request, and how many the cache has room for, of models that read by
// cross-attention.
int64_t cross_rows_of(const Request& request, const ModelSpec& spec);
int64_t most_cross_rows(const ModelSpec& spec);

// Tells the scheduler where the pictures of the request are, and what they are. With
// cross-attention all tokens depend on all pictures, also those in front of them: prefixes are then
// shared between prompts with the same pictures only.
void announce_pictures(const Request& request, const runtime::PicturePrompt& prompt,
                       const ModelSpec& spec, TowerCache& cache, scheduler::NewRequest& order);

}  // namespace freshet::engine
