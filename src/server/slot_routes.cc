// llama-server's POST /slots/{id}?action=save, restore and erase.
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "server/app.h"

namespace freshet::server {
namespace {

constexpr std::string_view kSlotPath = "/slots/";

std::optional<int> slot_of(std::string_view path) {
  const std::string_view digits = path.substr(kSlotPath.size());
  int slot = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), slot);
  if (error != std::errc() || end != digits.data() + digits.size() || slot < 0 ||
      slot >= SlotTexts::kSlots)
    return std::nullopt;
  return slot;
}

// The value of action in "a=b&action=save".
std::string action_of(std::string_view query) {
  constexpr std::string_view kName = "action=";
  while (!query.empty()) {
    const size_t end = std::min(query.find('&'), query.size());
    if (query.starts_with(kName))
      return std::string(query.substr(kName.size(), end - kName.size()));
    query.remove_prefix(std::min(end + 1, query.size()));
  }
  return {};
}

// A name without folders, so that nothing outside of the folder is read or written.
bool is_plain_name(const std::string& name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == '.';
  };
  return !name.empty() && name.size() <= 200 && name.front() != '.' && name.back() != '.' &&
         std::ranges::all_of(name, allowed);
}

struct SlotRequest {
  int slot = 0;
  std::string filename;
  std::string path;
  std::string salt;  // of the caller
};

int64_t count_of(const PrefixFile& file) {
  return static_cast<int64_t>(file.tokens.size());
}

json::Object slot_answer(const SlotRequest& r) {
  json::Object o;
  o["id_slot"] = r.slot;
  if (!r.filename.empty()) o["filename"] = r.filename;
  return o;
}

json::Object time_of(const char* name, Clock::time_point begin) {
  json::Object o;
  o[name] = seconds_between(begin, Clock::now()) * 1e3;
  return o;
}

// The text that the slot remembers, if it was cached for this caller.
std::optional<SlotTexts::Text> text_of_slot(App& app, const SlotRequest& r) {
  SlotTexts::Text text = app.slots().get(r.slot);
  if (text.tokens.empty() || text.salt != r.salt) return std::nullopt;
  return text;
}

ApiError empty_slot(int slot) {
  return bad_request("id_slot", fmt::format("slot {} has no text: send a request with \"id_slot\": "
                                            "{} before",
                                            slot, slot));
}

void save_slot(App& app, const App::Exchanges& exchange, const SlotRequest& r) {
  const auto text = text_of_slot(app, r);
  if (!text) return send_error(exchange, empty_slot(r.slot));
  const Clock::time_point begin = Clock::now();
  const auto saved = app.engine().save_prefix(text->tokens, text->salt, r.path);
  if (!saved.ok()) return send_error(exchange, from_status(saved.status(), "filename"));
  json::Object o = slot_answer(r);
  o["n_saved"] = count_of(*saved);
  o["n_written"] = saved->bytes;
  o["timings"] = time_of("save_ms", begin);
  send_json(exchange, o);
}

void restore_slot(App& app, const App::Exchanges& exchange, const SlotRequest& r) {
  const Clock::time_point begin = Clock::now();
  const auto restored = app.engine().restore_prefix(r.path, r.salt);
  if (!restored.ok()) return send_error(exchange, from_status(restored.status(), "filename"));
  app.slots().set(r.slot, restored->tokens, r.salt);
  json::Object o = slot_answer(r);
  o["n_restored"] = count_of(*restored);
  o["n_read"] = restored->bytes;
  o["timings"] = time_of("restore_ms", begin);
  send_json(exchange, o);
}

void erase_slot(App& app, const App::Exchanges& exchange, const SlotRequest& r) {
  const auto text = text_of_slot(app, r);
  json::Object o = slot_answer(r);
  o["n_erased"] = text ? app.engine().erase_prefix(text->tokens, text->salt) : 0;
  if (text) app.slots().set(r.slot, {}, {});
  send_json(exchange, o);
}

void act_on_slot(App& app, App::Exchanges exchange, const json::Value& body) {
  const HttpRequest& request = exchange->request();
  const auto slot = slot_of(request.path);
  if (!slot) {
    return send_error(exchange,
                      bad_request("id_slot", fmt::format("a slot is a number from 0 to {}",
                                                         SlotTexts::kSlots - 1)));
  }
  const std::string action = action_of(request.query);
  if (action != "save" && action != "restore" && action != "erase")
    return send_error(exchange, bad_request("action", "'action' must be save, restore or erase"));
  SlotRequest r;
  r.slot = *slot;
  r.salt = app.salt_of(request, body.get_string("cache_salt", ""));
  const std::string& folder = app.options().slot_save_path;
  if (folder.empty()) {
    return send_error(exchange,
                      {501, "this server keeps no slots: start it with --slot-save-path", ""});
  }
  if (action != "erase") {
    r.filename = body.get_string("filename", "");
    if (!is_plain_name(r.filename)) {
      return send_error(exchange, bad_request("filename",
                                              "'filename' must be a name of letters, "
                                              "digits, '-', '_' and '.'"));
    }
    r.path = (std::filesystem::path(folder) / r.filename).string();
  }
  // Files may be large: on a thread that handlers do not block.
  app.post([&app, exchange = std::move(exchange), r = std::move(r), action] {
    if (action == "save") return save_slot(app, exchange, r);
    if (action == "restore") return restore_slot(app, exchange, r);
    erase_slot(app, exchange, r);
  });
}

}  // namespace

void add_slot_routes(App& app, std::vector<App::Route>& routes) {
  routes.push_back(
      {"POST", std::string(kSlotPath), false,
       [&app](App::Exchanges x, const json::Value& body) { act_on_slot(app, std::move(x), body); },
       true});
}

}  // namespace freshet::server
