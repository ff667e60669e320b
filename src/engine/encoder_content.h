// What the encoder of a request reads, as a key by which its output is shared.
//
// Texts stand for themselves; sound is a SipHash-2-4 of 128 bits under a secret key, so that
// clients cannot make two inputs collide. Pure and safe to call from many threads.
#pragma once

#include <string>

#include "freshet/engine.h"
#include "kv_cache/block_key.h"

namespace freshet::engine {

// "": the encoder reads nothing that is given apart from the prompt.
std::string encoder_content(const Request& request, const kv_cache::BlockSecret& secret);

kv_cache::BlockSecret random_secret();

}  // namespace freshet::engine
