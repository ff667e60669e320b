// The kinds of request: one file each, which describes its kind.
#pragma once

#include <memory>

#include "engine/outputs/request_output.h"

namespace freshet::engine {

std::unique_ptr<RequestOutput> make_sampled(LiveRequest& request, const OutputServices& services);
std::unique_ptr<RequestOutput> make_beams(LiveRequest& request, const OutputServices& services);
std::unique_ptr<RequestOutput> make_embedding(LiveRequest& request, const OutputServices& services);
std::unique_ptr<RequestOutput> make_prompt_logprobs(LiveRequest& request,
                                                    const OutputServices& services);

}  // namespace freshet::engine
