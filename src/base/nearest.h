// "Did you mean": the candidate that a misspelt word is closest to. Thread-safe.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace freshet {

// The number of letters to insert, remove, replace or swap with their neighbour.
size_t edit_distance(std::string_view a, std::string_view b);

// The closest candidate, or "" if none is close: at most a third of the letters may differ (but one
// always), or the word is the beginning of a candidate. Ties go to the first.
std::string nearest(std::string_view word, std::span<const std::string> candidates);

}  // namespace freshet
