// The answer to a request for vectors: embeddings, scores, classes.
//
// Runs one engine request for each input. The engine's callbacks only store their results; the
// last one posts a task to a worker, which formats and sends the answer. If the client leaves or an
// input fails, the rest is cancelled.
#pragma once

#include <functional>
#include <vector>

#include "server/app.h"

namespace freshet::server {

struct PooledInput {
  std::vector<int32_t> prompt;
  std::vector<int32_t> token_types;
};

// Makes the body of the answer from the vectors of all inputs, in their order.
using PooledFormat =
    std::function<json::Value(std::vector<std::vector<float>>& vectors, const Usage& usage)>;

// `request`: what all engine requests have in common. `field`: the name of the inputs in errors.
void answer_pooled(App& app, App::Exchanges exchange, Request request,
                   std::vector<PooledInput> inputs, const char* field, PooledFormat format);

// The fields that all routes of this kind share; the caller checks fields.error().
void read_pooled_fields(Fields& fields, CommonRequest& common);
// The engine request of such a route; its pooling is still to be set.
Request pooled_request(App& app, const App::Exchanges& exchange, const CommonRequest& common);

}  // namespace freshet::server
