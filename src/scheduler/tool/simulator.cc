#include "scheduler/simulator.h"

#include <algorithm>

#include "scheduler/tool/simulation.h"

namespace freshet::scheduler {

// ---- the world -------------------------------------------------------------------------------

void Simulation::configure() {
  options_.max_model_len = random_.in(8, 160);
  options_.max_num_batched_tokens = random_.one_of({1, 4, 16, 33, 64, 512});
  options_.max_chunk = random_.one_of({0, 0, 1, 16, 20});
  options_.max_num_seqs = random_.one_of({1, 2, 5, 16});
  options_.max_logit_rows = random_.one_of({1, 4, 16, 64});
  options_.ageing_us = random_.one_of<int64_t>({0, 1'000, 100'000});
  options_.fair_share = random_.chance(50);
  options_.look_ahead = random_.chance(50);
  options_.max_queued_requests = random_.one_of({0, 0, 4});
  options_.max_queued_tokens = random_.one_of<int64_t>({0, 0, 200});
  options_.batching.kind = random_.one_of({BatchingKind::kContinuous, BatchingKind::kContinuous,
                                           BatchingKind::kStatic, BatchingKind::kDynamic});
  options_.batching.max_batch_size = random_.in(1, 8);
  options_.batching.max_wait_us = random_.in(0, 5'000);
  options_.batching.max_tokens_per_batch = random_.in(1, 300);
  options_.batching.instances = random_.in(1, 3);
  if (random_.chance(50))
    options_.batching.preferred_batch_sizes = {options_.batching.max_batch_size};
  clock_jumps_ = random_.chance(30);

  const int32_t chunk = options_.max_num_batched_tokens;
  const int groups = random_.in(1, 3);
  const bool full = random_.chance(80);  // some models have windows only
  const bool two_full = random_.chance(20);
  for (int g = 0; g < groups; ++g) {
    kv_cache::GroupConfig group;
    group.window =
        full && (g == 0 || (g == 1 && two_full)) ? 0 : random_.one_of({1, 7, 16, 24, 40});
    cache_options_.groups.push_back(group);
  }
  if (states_) {
    cache_options_.groups.push_back({.kind = KvKind::kState});
    options_.checkpoint_interval = random_.one_of({1, 16, 48, 512});
    if (random_.chance(25))
      cache_options_.groups.erase(cache_options_.groups.begin(), cache_options_.groups.end() - 1);
  }
  cache_options_.share_prefixes = random_.chance(80);
  cache_options_.hash_seed = static_cast<uint64_t>(random_.in(0, 1 << 20));
  for (kv_cache::GroupConfig& group : cache_options_.groups) {
    const int32_t least =
        group.kind == KvKind::kState
            ? 1
            : BlockCache::most_blocks(group.window, options_.max_model_len, chunk);
    group.blocks = least + random_.one_of({0, 1, 3, 10, 60});
  }
  cache_.emplace(cache_options_);
  for (const kv_cache::GroupConfig& group : cache_options_.groups) {
    contents_.emplace_back(static_cast<size_t>(group.blocks) * kBlockTokens, 0);
  }
  for (int i = random_.in(1, 4); i > 0; --i) {
    std::vector<int32_t>& family = families_.emplace_back();
    for (int n = random_.in(0, options_.max_model_len); n > 0; --n)
      family.push_back(random_.in(0, kVocab - 1));
  }
}

// Of its own random numbers, so that the other choices of a seed stay. States are not stored.
void Simulation::add_store() {
  if (states_ || encoders_) return;
  Random random(seed_ ^ 0x5704E);
  if (!random.chance(50)) return;
  store_ = std::make_unique<SimulatedStore>(
      seed_, cache_->groups(), random.one_of({1, 4, 20, 200}),
      [this](int group, int32_t block) { return slots(group, block); });
  scheduler_->set_store(*store_, random.chance(30));
}

void Simulation::add_encoder() {
  if (!encoders_) return;
  options_.encoder_blocks = encoders_->one_of({4, 5, 12, 40});
  options_.share_encoders = encoders_->chance(90);
  encoded_.assign(static_cast<size_t>(options_.encoder_blocks), 0);
}

// Of few inputs, which differ in length. Returns what the encoder makes of it.
uint64_t Simulation::add_input(NewRequest& request) {
  const int32_t which = encoders_->in(0, 5);
  request.encoder_tokens = 1 + which * 12;
  if (encoders_->chance(90)) request.encoder_content = std::string(1, static_cast<char>(which));
  return mix(static_cast<uint64_t>(which) * 2 + (request.salt.empty() ? 0 : 1) + 77);
}

// All rows of all pictures have the same id: only their contents differ. They stand at few places,
// so that prompts that part in a picture are frequent.
void Simulation::add_pictures(NewRequest& request) {
  const auto prompt = static_cast<int32_t>(request.prompt.size());
  const int32_t chunk = options_.max_chunk > 0
                            ? std::min(options_.max_chunk, options_.max_num_batched_tokens)
                            : options_.max_num_batched_tokens;
  const bool both_ways = seed_ % 10 == 1;
  int32_t longest = 40;
  if (both_ways) longest = std::min({longest, chunk, options_.max_logit_rows});
  for (int32_t at = pictures_->in(0, 2) * 5; at < prompt; at += pictures_->in(0, 3) * 5) {
    PictureSpan p;
    p.first = at;
    p.count = std::min({pictures_->one_of({1, 3, 20, 40}), longest, prompt - at});
    p.name = kFirstPictureName - pictures_->in(0, 2);
    p.hash.fill(p.name);
    p.both_ways = both_ways;
    std::fill_n(request.prompt.begin() + p.first, p.count, 0);
    request.pictures.push_back(p);
    at = p.end();
  }
}

void Simulation::evict(const Eviction& e) {
  for (const auto& left : e.left) left->layers = e.scores->layers;
  for (size_t g = 0; g < e.before.size(); ++g) {
    if (e.before[g].empty()) continue;
    const auto slot = [&](const std::vector<int32_t>& ids, int32_t i) -> uint64_t& {
      const int32_t block = ids[static_cast<size_t>(i / kBlockTokens)];
      return slots(static_cast<int>(g), block)[i % kBlockTokens];
    };
    std::vector<uint64_t> contents;
    for (int32_t i = 0; i < e.slots[g]; ++i) contents.push_back(slot(e.before[g], i));
    const kv_cache::EvictionSchedule& schedule = *scheduler_->request(e.request)->eviction;
    const int32_t parts = schedule.rules.recodes ? schedule.parts[g] : 1;
    std::vector<uint64_t> sums;  // of the coarse tokens that are there
    for (int32_t i = 0; i * parts < e.coarse_slots[g]; ++i)
      sums.push_back(slot(e.coarse_before[g], i));
    int32_t to = 0;
    const std::vector<int32_t> kept = kept_slots(contents, e.kept[g]);
    for (const int32_t i : kept) slot(e.after[g], to++) = contents[static_cast<size_t>(i)];
    ++report_.evictions;
    if (!schedule.rules.recodes) continue;
    auto token = static_cast<size_t>(e.coarse_slots[g]);
    for (const uint64_t hash : dropped_contents(contents, kept)) {
      sums.resize(std::max(sums.size(), token / static_cast<size_t>(parts) + 1));
      sums[token / static_cast<size_t>(parts)] += hash * (2 * token + 1);
      ++token;
    }
    // Full blocks stay as they are: others may hold them, too.
    for (int32_t i = e.coarse_slots[g] / (parts * kBlockTokens) * kBlockTokens;
         i < std::ssize(sums); ++i)
      slot(e.coarse_after[g], i) = sums[static_cast<size_t>(i)];
  }
}

void Simulation::arrive() {
  Client client;
  NewRequest request;
  request.id = next_request_++;
  const std::vector<int32_t>& family =
      families_[static_cast<size_t>(random_.in(0, static_cast<int32_t>(families_.size()) - 1))];
  const int32_t longest = options_.max_model_len - 1;
  const int32_t shared =
      std::min<int32_t>(random_.in(0, static_cast<int32_t>(family.size())), longest);
  request.prompt.assign(family.begin(), family.begin() + shared);
  for (int n = random_.in(0, std::min(24, longest - shared)); n > 0 || request.prompt.empty();
       --n) {
    request.prompt.push_back(random_.in(0, kVocab - 1));
  }
  const auto prompt = static_cast<int32_t>(request.prompt.size());
  request.max_tokens = random_.in(1, std::min(30, options_.max_model_len - prompt));
  request.samples = random_.chance(25) ? random_.in(1, std::min(4, options_.max_num_seqs)) : 1;
  request.priority = random_.chance(40) ? random_.in(-2, 2) : 0;
  request.tenant = static_cast<uint64_t>(random_.in(0, 2));
  request.salt = random_.chance(80) ? "" : "other";
  if (random_.chance(10)) request.deadline = now_ + random_.in(0, 20'000);
  if (random_.chance(10)) request.logits_from = random_.in(0, prompt - 1);
  if (random_.chance(20)) request.pin_tokens = random_.in(0, shared);
  if (random_.chance(5)) request.compute_all = true;
  if (pictures_ && pictures_->chance(70)) add_pictures(request);
  if (encoders_) {
    client.encoded = add_input(request);
    request.prepares = encoders_->chance(50);
  }
  client.pictures = request.pictures;
  client.prompt = request.prompt;
  client.max_tokens = request.max_tokens;
  client.samples = request.samples;
  client.beams = request.samples > 1 && random_.chance(40);
  client.drafts = !client.beams && random_.chance(30);
  if (client.pictures.empty() && !client.beams)
    request.eviction = random_eviction(random_, *cache_);
  client.arrival_step = static_cast<uint64_t>(report_.steps);
  const RequestId id = request.id;
  const bool recodes = request.eviction != nullptr && request.eviction->rules.recodes;
  const auto sequence = scheduler_->submit(std::move(request), now_);
  if (!sequence.ok()) {
    // The first coarse tokens take a block that the smallest pools don't have.
    const bool too_long = recodes && sequence.status().code() == StatusCode::kInvalidArgument;
    if (sequence.status().code() != StatusCode::kResourceExhausted && !too_long)
      fail(sequence.status().message());
    return;
  }
  client.stream[*sequence] = 0;
  clients_[id] = std::move(client);
  ++report_.requests;
}

// Lets time pass, cancels requests and sets drafts.
void Simulation::meddle() {
  now_ += random_.in(0, 2'000);
  if (clock_jumps_ && random_.chance(5)) now_ += random_.in(-3'000'000, 3'000'000);
  if (!clients_.empty() && random_.chance(4)) {
    auto it = clients_.begin();
    std::advance(it, random_.in(0, static_cast<int32_t>(clients_.size()) - 1));
    if (!scheduler_->cancel(it->first)) fail("a live request could not be cancelled");
    clients_.erase(it);
    ++report_.cancelled;
  }
  for (auto& [id, client] : clients_) {
    if (!client.drafts || (client.samples > 1 && !client.split)) continue;
    for (const auto& [sequence, stream] : client.stream) {
      const Sequence& s = scheduler_->sequence(sequence);
      if (s.state != State::kRunning || s.size() - s.computed != 1 || random_.chance(40)) continue;
      const auto grow = [&](std::vector<int32_t> path, int32_t right) {
        for (int n = random_.in(0, 5); n > 0; --n) {
          path.push_back(random_.chance(right) ? next_token(s, stream, path)
                                               : random_.in(0, kVocab - 1));
        }
        return path;
      };
      std::vector<int32_t> draft = grow({}, 80);  // right more often than not
      std::vector<std::vector<int32_t>> branches;
      const bool tree = !states_ && random_.chance(60);
      for (int b = tree ? random_.in(0, 4) : 0; b > 0; --b) {
        const int32_t shared = random_.in(0, static_cast<int32_t>(draft.size()));
        branches.push_back(grow({draft.begin(), draft.begin() + shared}, 70));
      }
      scheduler_->set_draft(sequence, std::move(draft), std::move(branches));
    }
  }
}

// Takes blocks away or gives them back, like another user of the cache.
void Simulation::rob() {
  if (!thief_.empty() && random_.chance(30)) {
    cache_->release(thief_.back());
    thief_.pop_back();
  }
  if (thief_.size() < 3 && random_.chance(5)) {
    BlockTable table;
    std::vector<kv_cache::BlockCopy> copies;
    cache_->begin(table, "thief", {}, copies);
    if (cache_->reserve(table, 0, random_.in(1, options_.max_model_len), copies)) {
      thief_.push_back(std::move(table));
    } else {
      cache_->release(table);
    }
  }
}

// ---- what the engine would do ----------------------------------------------------------------

bool Simulation::end_sequence(SequenceId id, const Client& client) {
  const Sequence& s = scheduler_->sequence(id);
  if (!client.beams) {  // the result must be what the model says, whatever happened on the way
    uint64_t hash = 0;
    const uint64_t stream = client.stream.at(id);
    const std::vector<int32_t> read = what_is_read(s);
    for (int32_t p = 0; p < s.size(); ++p) {
      const int32_t token = s.tokens[static_cast<size_t>(p)];
      if (p < s.prompt_tokens
              ? token != client.prompt[static_cast<size_t>(p)]
              : token != static_cast<int32_t>(mix(hash ^ (stream * 0x9E3779B9)) % kVocab)) {
        return fail(fmt::format("sequence {} has a wrong token at {}", id, p));
      }
      hash = extend(hash, read[static_cast<size_t>(p)]);
    }
  }
  report_.digest = mix(report_.digest ^ id ^ (static_cast<uint64_t>(s.size()) << 32));
  scheduler_->finish(id);
  return true;
}

bool Simulation::advance_beams(Client& client, RequestId id) {
  for (const auto& [sequence, stream] : client.stream) {
    const Sequence& s = scheduler_->sequence(sequence);
    if (!s.awaits_token() && s.state != State::kSuspended) return true;  // not all are there yet
  }
  const int32_t length = scheduler_->sequence(client.stream.begin()->first).size();
  if (length - static_cast<int32_t>(client.prompt.size()) >= client.max_tokens) {
    while (!client.stream.empty()) {
      const SequenceId beam = client.stream.begin()->first;
      if (!end_sequence(beam, client)) return false;
      client.stream.erase(beam);
    }
    clients_.erase(id);
    ++report_.finished;
    return true;
  }
  std::vector<SequenceId> parents;
  for (const auto& [sequence, stream] : client.stream) parents.push_back(sequence);
  std::vector<SequenceId> chosen;
  for (int32_t beam = 0; beam < client.samples; ++beam) {
    chosen.push_back(
        parents[static_cast<size_t>(random_.in(0, static_cast<int32_t>(parents.size()) - 1))]);
  }
  for (const SequenceId parent : parents) {
    if (std::ranges::find(chosen, parent) == chosen.end()) scheduler_->finish(parent);
  }
  std::set<SequenceId> kept;
  std::vector<std::pair<SequenceId, int32_t>> next;
  for (const SequenceId parent : chosen) {
    next.emplace_back(kept.insert(parent).second ? parent : scheduler_->fork(parent),
                      random_.in(0, kVocab - 1));
  }
  client.stream.clear();
  for (const auto& [sequence, token] : next) {
    scheduler_->commit(sequence, {&token, 1});
    client.stream[sequence] = 0;
  }
  return true;
}

// The tokens that the paths of a step give.
std::vector<int32_t> Simulation::follow(const Sequence& q, const StepItem& item, uint64_t stream,
                                        int32_t room) {
  std::vector<int32_t> tokens;
  const auto begins = [&](const std::vector<int32_t>& path) {
    return path.size() >= tokens.size() && std::equal(tokens.begin(), tokens.end(), path.begin());
  };
  while (static_cast<int32_t>(tokens.size()) < room) {
    if (!begins(q.draft)) {
      const auto b = std::ranges::find_if(
          q.branches, [&](const Branch& x) { return x.item >= 0 && begins(x.draft); });
      if (b == q.branches.end()) break;
      if (std::ssize(tokens) <= b->shared) fail("a branch lacks a row of logits");
      ++report_.branch_tokens;
    }
    if (!tokens.empty()) ++report_.accepted_drafts;
    if (!tokens.empty() && q.draft_scores != nullptr) ++report_.scored_drafts;
    tokens.push_back(next_token(q, stream, tokens));
  }
  if (std::ssize(q.draft) > item.draft) fail("drafts that did not run were kept");
  return tokens;
}

bool Simulation::advance(const StepItem& item) {
  if (item.branch >= 0) return true;
  if (!scheduler_->has(item.sequence)) return true;  // ended with its request in this step
  const Sequence& s = scheduler_->sequence(item.sequence);
  const RequestId id = s.request->id;
  Client& client = clients_.at(id);
  if (!s.awaits_token()) return true;
  if (item.logits < 1 + item.draft) return fail("a finished item has no logits");
  if (client.beams) return advance_beams(client, id);

  std::vector<SequenceId> sequences{item.sequence};
  if (!client.split) {
    client.split = true;
    for (int32_t i = 1; i < client.samples; ++i) {
      const SequenceId fork = scheduler_->fork(item.sequence);
      client.stream[fork] = static_cast<uint64_t>(i);
      sequences.push_back(fork);
    }
  }
  for (const SequenceId sequence : sequences) {
    const Sequence& q = scheduler_->sequence(sequence);
    const uint64_t stream = client.stream.at(sequence);
    const int32_t room = client.max_tokens - (q.size() - q.prompt_tokens);
    const std::vector<int32_t> tokens = follow(q, item, stream, room);
    scheduler_->commit(sequence, tokens);
    if (q.size() - q.prompt_tokens < client.max_tokens) continue;
    if (!end_sequence(sequence, client)) return false;
    client.stream.erase(sequence);
  }
  if (client.stream.empty()) {
    clients_.erase(id);
    ++report_.finished;
  }
  return true;
}

// ---- a step ----------------------------------------------------------------------------------

// With strict priorities no request may overtake one with a better priority; within a tenant none
// may overtake at all.
bool Simulation::check_admissions(const std::vector<std::pair<SequenceId, Rank>>& waiting_before,
                                  const Step& step) {
  for (const StepItem& item : step.items) {
    const auto fresh =
        std::ranges::find(waiting_before, item.sequence, &std::pair<SequenceId, Rank>::first);
    if (fresh == waiting_before.end()) continue;
    const Request& admitted = *scheduler_->sequence(item.sequence).request;
    for (const auto& [id, rank] : waiting_before) {
      if (!scheduler_->has(id) || scheduler_->sequence(id).started) continue;
      if (scheduler_->sequence(id).state == State::kLoading) continue;  // others go on meanwhile
      const Request& other = *scheduler_->sequence(id).request;
      const bool same_tenant = !options_.fair_share || admitted.tenant == other.tenant;
      if (same_tenant && rank < fresh->second)
        return fail("a request was passed by a later one of its tenant");
      if (options_.ageing_us == 0 && other.priority < admitted.priority)
        return fail("a priority was not held");
    }
  }
  return true;
}

bool Simulation::step() {
  std::vector<std::pair<SequenceId, Rank>> waiting;
  for (const auto& [id, client] : clients_) {
    for (const auto& [sequence, stream] : client.stream) {
      const Sequence& s = scheduler_->sequence(sequence);
      if (!s.started) waiting.emplace_back(sequence, s.rank);
    }
  }
  if (const Sequence* s = scheduler_->next_unready(); s != nullptr && encoders_->chance(60))
    scheduler_->set_ready(s->request->id);
  const Step step = scheduler_->schedule(now_);
  ++report_.steps;
  for (const RequestId id : step.expired) {
    if (clients_.erase(id) != 1) return fail("an unknown request expired");
    ++report_.expired;
  }
  for (const Eviction& e : step.evictions) evict(e);
  for (const kv_cache::BlockCopy& copy : step.copies) {
    std::copy_n(slots(copy.group, copy.from), kBlockTokens, slots(copy.group, copy.to));
    ++report_.copies;
  }
  report_.digest = mix(report_.digest + step.items.size() * 1000003 + step.copies.size());
  report_.preemptions += static_cast<int64_t>(step.preempted.size());
  if (!check_admissions(waiting, step)) return false;
  for (const StepItem& item : step.items) {
    if (!run_item(item)) return false;
  }
  if (!check_step(step)) return false;
  scheduler_->ran(step);
  if (!std::ranges::all_of(step.items, [&](const StepItem& i) { return advance(i); })) return false;
  std::vector<const BlockTable*> stolen;
  for (const BlockTable& table : thief_) stolen.push_back(&table);
  if (const Status books = scheduler_->check(stolen); !books.ok()) return fail(books.message());
  if (!step.items.empty() || clients_.empty()) {
    idle_steps_ = 0;
    return true;
  }
  if (step.wake_at > now_) now_ = step.wake_at;  // a policy waits, and says how long
  if (!thief_.empty()) ++report_.refused_while_robbed;
  if (thief_.empty() && ++idle_steps_ > 50) {
    std::string who;
    for (const auto& [id, client] : clients_) {
      for (const auto& [sequence, stream] : client.stream) {
        const Sequence& s = scheduler_->sequence(sequence);
        who +=
            fmt::format(" [request {}{} sequence {}: {} of {}, state {}, {} forks, waits for {}]",
                        id, client.beams ? " beam" : "", s.id, s.computed, s.size(),
                        static_cast<int>(s.state), s.pending_forks, name_of(s.waits_for));
      }
    }
    return fail("nothing runs though requests wait:" + who);
  }
  return true;
}

// Loads of sequences that have ended must end, too, and give their blocks back.
void Simulation::end_store() {
  for (int i = 0; i < 8; ++i) scheduler_->schedule(now_);
  if (store_->busy()) fail("a load never ends");
  if (const Status books = store_->check(); !books.ok()) fail(books.message());
  report_.tier_stored = store_->stored();
  report_.tier_swapped = store_->swapped();
  report_.tier_loaded = store_->loaded();
  report_.tier_failed = store_->failed();
  report_.tier_hits = scheduler_->stats().tier_hits;
}

SimulationReport Simulation::run() {
  configure();
  add_encoder();
  auto scheduler = Scheduler::create(options_, *cache_);
  if (!scheduler.ok()) {
    fail(scheduler.status().message());
    return report_;
  }
  scheduler_ = std::move(*scheduler);
  add_store();
  const int32_t rounds = random_.in(5, 60);
  const int32_t rate = random_.in(5, 95);
  for (int32_t i = 0; i < rounds && report_.failure.empty(); ++i) {
    while (random_.chance(rate) && clients_.size() < 40) arrive();
    meddle();
    rob();
    if (!step()) return report_;
  }
  // No arrivals any more: everything must come to its end, in as many steps as there is work, with
  // each request computed again for every other one at worst.
  for (BlockTable& table : thief_) cache_->release(table);
  thief_.clear();
  int64_t work = 1000;
  for (const auto& [id, client] : clients_) {
    const int64_t tokens = static_cast<int64_t>(client.prompt.size()) + client.max_tokens;
    work += client.samples * tokens * (client.beams ? client.max_tokens : 2) * 4;
  }
  while (!clients_.empty() && report_.failure.empty()) {
    now_ += 500;
    if (work-- <= 0) fail(fmt::format("{} requests starve", clients_.size()));
    if (report_.failure.empty()) step();
  }
  if (!report_.failure.empty()) return report_;
  report_.cached_tokens = scheduler_->stats().cached_tokens;
  if (states_) report_.cached_with_states = report_.cached_tokens;
  report_.encoder_hits = scheduler_->stats().encoder_hits;
  if (!scheduler_->idle()) fail("the scheduler keeps sequences that have ended");
  if (store_) end_store();
  scheduler_->unpin_all();
  cache_->drop_idle();
  for (int g = 0; g < cache_->groups(); ++g) {
    if (cache_->pool(g).free() != cache_->pool(g).size())
      fail(fmt::format("group {} lost blocks", g));
  }
  return report_;
}

SimulationReport simulate(uint64_t seed) {
  return Simulation(seed).run();
}

}  // namespace freshet::scheduler
