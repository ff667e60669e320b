// --speculative-config: which drafter proposes tokens, and how they are accepted.
//
// The keys are vLLM's (SpeculativeConfig) where it has them, with its defaults; `exit_layer` and
// `tree_*` are ours. A key that is not known here is an error that lists the known ones: nothing is
// ignored. Plain data.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "speculative/acceptance.h"
#include "speculative/draft_tree.h"

namespace freshet::speculative {

struct Config {
  std::string method;  // a name of registry.h
  // Further methods, which look drafts up: combined with `method` (combined.h).
  std::vector<std::string> lookups;
  std::string model;  // folder or file; empty where the method needs none
  // Most drafts of a sequence in a step; 0: chosen from step to step by the cost model.
  int num_speculative_tokens = 0;
  AcceptanceOptions acceptance;

  // ngram
  int prompt_lookup_min = 0;  // 0: not given; parse_config() sets both
  int prompt_lookup_max = 0;
  // suffix
  int suffix_decoding_max_tree_depth = 24;
  int suffix_decoding_max_cached_requests = 10000;
  double suffix_decoding_max_spec_factor = 1.0;
  double suffix_decoding_min_token_prob = 0.1;
  // draft_model
  bool use_heterogeneous_vocab = false;
  bool parallel_drafting = false;  // all drafts in one pass (PARD)
  bool greedy_drafts = false;      // draft_sample_method: "greedy" instead of "probabilistic"
  // early_exit
  int exit_layer = 0;  // 0: a quarter of the layers

  // Draft trees: speculative_token_tree, tree_nodes, tree_top_k, tree_max_batch; or a static tree
  // that is made from tree_acceptance_rates.
  TreeOptions tree;
  std::vector<double> tree_acceptance_rates;

  int limit() const;  // most drafts of a sequence in a step, whichever way it is chosen
};

// `text`: a JSON object. The method may be left out where the model or the other keys imply it.
// random_weights: drafters have no files, so that "model" names a folder with config.json, if any.
Result<Config> parse_config(std::string_view text, bool random_weights = false);

}  // namespace freshet::speculative
