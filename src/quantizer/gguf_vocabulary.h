// A Hugging Face vocabulary as GGUF metadata.
//
// Reads tokenizer.json and its companions in a model's folder: byte-level BPE and
// SentencePiece-like BPE with byte fallback. The file says all that the folder says, in one of
// three ways: tokenizer.ggml.* and tokenizer.chat_template*, which every reader of GGUF knows, as
// far as they go; freshet.tokenizer.* for the ends of texts and generations and for the special
// tokens of templates; and tokenizer.huggingface.json, the whole of the folder's file, where GGUF
// has no keys for a normaliser, a prefix or a rule of an added token. Freshet reads all three, so
// that folder and file are one language; `warn` gets a line about what others will miss. What has
// no name at all in tokenizer.ggml.pre or .model is an error, never a guess.
#pragma once

#include <functional>
#include <string>

#include "base/status.h"
#include "loader/gguf_writer.h"

namespace freshet::quantizer {

// `vocab_size`: rows of the embedding; ids without a token get a filler. A folder without any
// vocabulary gives a file without one, and a warning.
Status add_vocabulary(const std::string& folder, int vocab_size, loader::GgufWriter& out,
                      const std::function<void(const std::string&)>& warn);

}  // namespace freshet::quantizer
