// Windows of token ids for calibration, from a text, from JSON lines or from lists of ids.
//
// A plain text is one stream of tokens, cut into windows of a fixed length; the rest is left out.
// Lines of JSON are texts of their own: {"text": ...}, {"messages": [...]}, which the model's chat
// template renders, or {"input_ids": [...]}; each is cut to the length. A JSON list of lists of ids
// is taken as it is. Windows of text begin with the BOS token if the model has one. The first
// windows are used, so the same file gives the same windows. Errors name the file and the line.
#pragma once

#include <string>

#include "quantizer/calibration/part_runner.h"

namespace freshet::quantizer {

struct WindowOptions {
  int64_t samples = 128;       // the most windows
  int64_t length = 512;        // tokens of a window
  bool parse_special = false;  // "<s>" in a text is a token
};

struct CalibrationWindows {
  Windows windows;
  int64_t tokens = 0;
  std::string hash;  // of all ids, in hexadecimal
};

// `model`: the folder whose vocabulary and template are used.
Result<CalibrationWindows> read_windows(const std::string& file, const std::string& model,
                                        int64_t vocab, const WindowOptions& options);

}  // namespace freshet::quantizer
