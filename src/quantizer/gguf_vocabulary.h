// A Hugging Face vocabulary as GGUF metadata.
//
// Reads tokenizer.json and its companion files in a model's folder: byte-level BPE and
// SentencePiece-like BPE with byte fallback. The GGUF file holds all the information of the folder,
// in three groups of keys: tokenizer.ggml.* and tokenizer.chat_template*, which every reader of
// GGUF knows, as far as they suffice; freshet.tokenizer.* for the ends of texts and generations and
// for the special tokens of templates; and tokenizer.huggingface.json, the folder's whole file, if
// GGUF has no keys for a normaliser, a prefix or a rule of an added token. Freshet reads all three,
// so the folder and the file tokenize identically; `warn` gets one line for each feature that other
// readers will miss. A tokenizer that has no name in tokenizer.ggml.pre or .model is an error; the
// name is never guessed.
#pragma once

#include <functional>
#include <string>

#include "base/status.h"
#include "loader/gguf_writer.h"

namespace freshet::quantizer {

// `vocab_size`: rows of the embedding; ids without a token get a filler. A folder without a
// vocabulary gives a file without one, and a warning.
Status add_vocabulary(const std::string& folder, int vocab_size, loader::GgufWriter& out,
                      const std::function<void(const std::string&)>& warn);

}  // namespace freshet::quantizer
