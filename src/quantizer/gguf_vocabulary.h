// A Hugging Face vocabulary as GGUF metadata (tokenizer.ggml.*).
//
// Reads tokenizer.json and its companions in a model's folder: byte-level BPE and
// SentencePiece-like BPE with byte fallback. What GGUF has no name for is an error, never a guess.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "loader/gguf_writer.h"

namespace freshet::quantizer {

// `vocab_size`: rows of the embedding; ids without a token get a filler. A folder without a
// tokenizer.json gives a file without a vocabulary.
Status add_vocabulary(const std::string& folder, int vocab_size, loader::GgufWriter& out);

}  // namespace freshet::quantizer
