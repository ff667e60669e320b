#include "tokenizer/chat_renderer.h"

#include <fstream>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tokenizer/tokenizer_parts.h"

namespace freshet::tokenizer {
namespace {

using testing::HasSubstr;

json::Value parse(const std::string& text) {
  auto value = json::parse(text);
  EXPECT_TRUE(value.ok()) << value.status().message();
  return std::move(value).value();
}

// A model with one token and these special tokens and templates.
Tokenizer model(const std::string& special_tokens,
                const std::vector<std::pair<std::string, std::string>>& templates = {}) {
  auto parts = std::make_shared<TokenizerParts>();
  parts->vocab.set(0, "a");
  parts->special_tokens = parse(special_tokens).as_object();
  for (const auto& [name, text] : templates) parts->set_template(name, text);
  EXPECT_TRUE(finish_parts(*parts).ok());
  return Tokenizer(parts);
}

ChatRenderer renderer(const Tokenizer& tokenizer, const std::string& source = "") {
  auto made = ChatRenderer::make(tokenizer, source);
  EXPECT_TRUE(made.ok()) << made.status().message();
  return std::move(made).value();
}

Conversation conversation(const std::string& messages) {
  Conversation c;
  c.messages = parse(messages).as_array();
  return c;
}

std::string rendered(const ChatRenderer& renderer, const Conversation& c) {
  const auto text = renderer.render(c);
  return text.ok() ? *text : "error: " + text.status().message();
}

// Continued messages, contents as parts and calls as text, with every published template.
TEST(ChatRenderer, EqualsTransformers) {
  const auto golden = json::parse_file(FRESHET_UNPACKED_DATA "/templates/golden_chats.json");
  ASSERT_TRUE(golden.ok());
  const Tokenizer tokenizer = model(json::write(*golden->find("tokens")));
  size_t compared = 0;
  for (const auto& [path, cases] : golden->find("templates")->as_object()) {
    std::ifstream in(FRESHET_SOURCE_DIR "/tests/data/templates/" + path, std::ios::binary);
    std::ostringstream source;
    source << in.rdbuf();
    const ChatRenderer r = renderer(tokenizer, source.str());
    for (const json::Value& one : cases.as_array()) {
      Conversation c;
      c.messages = one.find("messages")->as_array();
      SCOPED_TRACE(path + " " + json::write(json::Value(c.messages)));
      if (const json::Value* tools = one.find("tools")) c.tools = *tools;
      c.continue_final_message = one.get_bool("continue", false);
      c.add_generation_prompt = !c.continue_final_message;
      EXPECT_EQ(rendered(r, c), one.get_string("text", ""));
      ++compared;
    }
  }
  EXPECT_GE(compared, 400);
}

TEST(ChatRenderer, ToolsHaveATemplateOfTheirOwn) {
  const Tokenizer tokenizer =
      model("{}", {{"default", "plain"}, {"tool_use", "{{ tools | length }} tools"}, {"rag", "r"}});
  const ChatRenderer r = renderer(tokenizer);
  Conversation c = conversation(R"([{"role": "user", "content": "x"}])");
  EXPECT_EQ(rendered(r, c), "plain");
  EXPECT_EQ(r.source(true), "{{ tools | length }} tools");
  c.tools = parse(R"([{"type": "function", "function": {"name": "f"}}])");
  EXPECT_EQ(rendered(r, c), "1 tools");
  EXPECT_EQ(rendered(renderer(tokenizer, "mine"), c), "mine");

  const ChatRenderer only = renderer(model("{}", {{"tool_use", "tools"}, {"rag", "r"}}));
  EXPECT_FALSE(only.empty());
  EXPECT_EQ(rendered(only, c), "tools");
  c.tools = nullptr;
  EXPECT_THAT(rendered(only, c), HasSubstr("no default chat template, only tool_use, rag"));
  EXPECT_TRUE(renderer(model("{}")).empty());
}

TEST(ChatRenderer, BindsTheSpecialTokensAndNoOthers) {
  const Tokenizer tokenizer = model(
      R"({"pad_token": "<pad>", "mask_token": "<mask>", "additional_special_tokens": ["<x>", "<y>"],
          "image_token": "<image>"})");
  const auto text = [&](const std::string& source, const char* variables = "{}") {
    Conversation c = conversation(R"([{"role": "user", "content": "x"}])");
    c.variables = parse(variables).as_object();
    return rendered(renderer(tokenizer, source), c);
  };
  EXPECT_EQ(text("{{ pad_token + mask_token + image_token }}"), "<pad><mask><image>");
  EXPECT_EQ(text("{{ additional_special_tokens | join('|') }}"), "<x>|<y>");
  EXPECT_EQ(text("{{ unk_token is defined }} {{ sep_token is defined }} {{ bos_token }}|"),
            "False False |");
  EXPECT_EQ(text("{{ pad_token }}", R"({"pad_token": "mine"})"), "mine");
  EXPECT_EQ(text("{{ messages[0].content }}", R"({"messages": []})"), "x");
  EXPECT_EQ(text("{{ tools is none and documents is none }}"), "True");
}

TEST(ChatRenderer, GivesContentsInTheShapeThatTheTemplateTakes) {
  const Tokenizer tokenizer = model("{}");
  const char* kString = R"([{"role": "user", "content": " a"}])";
  const char* kParts = R"([{"role": "user", "content": [{"type": "text", "text": " a"},
                                                        {"type": "text", "text": " b"}]}])";
  const auto both = [&](const std::string& source) {
    const ChatRenderer r = renderer(tokenizer, source);
    return rendered(r, conversation(kString)) + "|" + rendered(r, conversation(kParts));
  };
  const std::string each =
      "{% for p in m.content %}{% if p.type == 'text' %}[{{ p.text }}]{% endif %}{% endfor %}";
  const auto loop = [](const std::string& body) {
    return "{% for m in messages %}" + body + "{% endfor %}";
  };
  EXPECT_EQ(both(loop(each)), "[ a]|[ a][ b]");
  EXPECT_EQ(both(loop("{{ m.content }}")), " a| a b");
  EXPECT_EQ(both(loop("{{ m.content | trim }}")), "a|a b");
  EXPECT_EQ(both(loop("{{ m.content | tojson }}")), "\" a\"|\" a b\"");
  EXPECT_EQ(
      both(loop("{% if m.content is string %}{{ m.content }}{% else %}" + each + "{% endif %}")),
      " a|[ a][ b]");
  EXPECT_EQ(both(loop("{{ m.content[0]['text'] }}")), " a| a");
  EXPECT_EQ(both(loop("{{ m['role'] + m['content'] }}")), "user a|user a b");
  // Parts for one role, a string for the other.
  const ChatRenderer mixed = renderer(
      tokenizer, loop("{% if m.role == 'user' %}" + each + "{% else %}{{ m.content }}{% endif %}"));
  EXPECT_EQ(rendered(mixed, conversation(R"([{"role": "system", "content": "s"},
      {"role": "user", "content": "u"}, {"role": "assistant", "content":
      [{"type": "text", "text": "v"}]}])")),
            "s[u]v");
}

TEST(ChatRenderer, KeepsArgumentsAsTheyCame) {
  const Tokenizer tokenizer = model("{}");
  const std::string head =
      "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}";
  const std::string tail = "{% endfor %}{% endfor %}";
  const auto text = [&](const std::string& body, const std::string& arguments) {
    Conversation c = conversation(
        R"([{"role": "user", "content": "x"}, {"role": "assistant", "content": null, "tool_calls":
            [{"id": "1", "type": "function", "function": {"name": "f", "arguments": )" +
        arguments + "}}]}]");
    return rendered(renderer(tokenizer, head + body + tail), c);
  };
  const std::string odd = R"("{ \"a\":1,\n\"b\": \"\\u00e9\" }")";
  const std::string plain = parse(odd).as_string();
  EXPECT_EQ(text("{{ c.function.arguments }}", odd), "f" + plain);
  EXPECT_EQ(text("{{ c.function.arguments }}", R"({"a": 1})"), R"(f{"a": 1})");
  EXPECT_EQ(text("{{ c.function.arguments | tojson }}", odd), "f{\"a\": 1, \"b\": \"\u00E9\"}");
  EXPECT_EQ(text("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}", odd),
            "fa=1;b=\u00E9;");
  EXPECT_EQ(text("{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
                 "{{ c.function.arguments | tojson }}{% endif %}",
                 odd),
            "f" + plain);
  EXPECT_EQ(text("{{ c.function.arguments }}", "\"\""), "f{}");
  EXPECT_EQ(text("{{ c.function.arguments | tojson }}", "\"no JSON\""), "f\"no JSON\"");
}

TEST(ChatRenderer, ContinuesTheLastMessage) {
  const Tokenizer tokenizer = model("{}");
  const auto text = [&](const std::string& source, const std::string& content) {
    Conversation c = conversation(R"([{"role": "user", "content": "q"}, {"role": "assistant",
                                       "content": )" +
                                  content + "}]");
    c.continue_final_message = true;
    c.add_generation_prompt = false;
    return rendered(renderer(tokenizer, source), c);
  };
  const std::string kept = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}";
  const std::string trimmed =
      "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}";
  const std::string turn = "<user>q<end><assistant>";
  for (const char* content : {"The answer is ", "e", "end", "<end>", "", "user", " a\n\n"}) {
    SCOPED_TRACE(content);
    const std::string written = json::write(json::Value(content));
    EXPECT_EQ(text(kept, written), turn + content);
    const size_t begin = std::string(content).find_first_not_of(" \n");
    const size_t end = std::string(content).find_last_not_of(" \n");
    EXPECT_EQ(text(trimmed, written),
              turn + (*content == '\0' ? "" : std::string(content).substr(begin, end + 1 - begin)));
  }
  EXPECT_EQ(text(kept, "null"), turn);
  EXPECT_EQ(text(kept, R"([{"type": "text", "text": "a "}, {"type": "text", "text": "b "}])"),
            turn + "a b ");
  EXPECT_THAT(text("{{ messages[0].content }}", "\"x\""), HasSubstr("cannot be continued"));
}

TEST(ChatRenderer, SharesThoughtsUnderTheNamesThatTemplatesRead) {
  const Tokenizer tokenizer = model("{}");
  const ChatRenderer r = renderer(
      tokenizer,
      "{% set m = messages[1] %}{{ m.reasoning }}|{{ m.reasoning_content }}|{{ m.thinking }}");
  for (const std::string name : {"reasoning", "reasoning_content", "thinking"}) {
    const Conversation c = conversation(
        R"([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", ")" + name +
        R"(": "t"}])");
    EXPECT_EQ(rendered(r, c), "t|t|t");
  }
}

// The expected texts are what transformers renders.
TEST(ChatRenderer, PicturesStandWhereTheTemplateWritesThem) {
  const Tokenizer tokenizer = model(R"({"bos_token": "<s>", "eos_token": "</s>"})");
  Conversation c = conversation(R"([{"role": "user", "content": [
      {"type": "image"}, {"type": "text", "text": "What is this?"},
      {"type": "image"}, {"type": "text", "text": "And this?"}]}])");
  c.picture_marker = "<picture>";
  const auto published = [&](const std::string& name) {
    std::ifstream in(FRESHET_SOURCE_DIR "/tests/data/templates/" + name, std::ios::binary);
    std::ostringstream source;
    source << in.rdbuf();
    return rendered(renderer(tokenizer, source.str()), c);
  };
  const std::string qwen = "<|vision_start|><|image_pad|><|vision_end|>";
  EXPECT_THAT(published("Qwen3.5-4B.jinja"),
              HasSubstr("user\n" + qwen + "What is this?" + qwen + "And this?<|im_end|>"));
  EXPECT_THAT(published("Mistral-Small-3.2-24B-Instruct-2506.jinja"),
              HasSubstr("[INST][IMG]What is this?[IMG]And this?[/INST]"));
  EXPECT_THAT(published("google-gemma-4-31B-it.jinja"),
              HasSubstr("user\n<|image|>What is this?<|image|>And this?<turn|>"));
  // Templates that read texts alone, and one that leaves pictures out.
  const std::string text = "<picture>\nWhat is this?<picture>\nAnd this?";
  EXPECT_EQ(rendered(renderer(tokenizer, "{{ messages[0].content | trim }}"), c), text);
  EXPECT_EQ(rendered(renderer(tokenizer,
                              "{% for p in messages[0].content %}{% if p.type == 'text' %}"
                              "{{ p.text }}{% endif %}{% endfor %}"),
                     c),
            text);
}

}  // namespace
}  // namespace freshet::tokenizer
