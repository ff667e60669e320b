// The vocabulary of a server, through its /tokenize and /detokenize. Used on the thread of the
// io_context.
#pragma once

#include <string>

#include "bench_client/dataset.h"
#include "http/client.h"

namespace freshet::bench_client {

class ServerVocabulary final : public Vocabulary {
 public:
  // `size`: ids are below it; 0: unknown. Keeps a reference to `client`.
  ServerVocabulary(http::Client& client, std::string model, int size)
      : client_(client), model_(std::move(model)), size_(size) {}

  Result<Ids> encode(const std::string& text) override;
  Result<std::string> decode(const Ids& ids) override;
  Result<Ids> usable_ids() override;

 private:
  http::Client& client_;
  const std::string model_;
  const int size_;
};

}  // namespace freshet::bench_client
