// How many columns text takes on a terminal.
//
// East Asian wide characters and emoji take two columns, combining characters none (Unicode 15, by
// utf8proc). Ambiguous characters take one. Pure functions; texts are valid UTF-8.
#pragma once

#include <string>
#include <string_view>

namespace freshet::cli {

// `grapheme`: one extended grapheme cluster, such as a letter with its combining marks.
int grapheme_width(std::string_view grapheme);
int text_width(std::string_view text);

// Whether the cluster is closing punctuation, such as an ideographic full stop, which must not
// begin a line.
bool closes_a_phrase(std::string_view grapheme);

// Removes control characters, which could move the cursor or change the terminal's state; keeps
// line breaks and tabs. Invalid UTF-8 becomes U+FFFD.
std::string without_controls(std::string_view text);

}  // namespace freshet::cli
