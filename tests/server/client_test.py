"""The official OpenAI client against `freshet serve`.

usage: client_test.py [Class[.test] ...]    needs FRESHET, FRESHET_SOURCE_DIR and PyPI's openai
"""
import json
import math
import os
import re
import struct
import sys
import typing
import unittest

try:
    import jsonschema
    import openai
    import pydantic
except ImportError:
    print("the openai client is not installed here")
    sys.exit(77)

from serving import Case, GOLDEN, PATIENCE, Server

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather of a city",
    "parameters": {"type": "object",
                   "properties": {"city": {"type": "string", "maxLength": 20},
                                  "unit": {"enum": ["C", "F"]}},
                   "required": ["city", "unit"], "additionalProperties": False}}}
CLOCK = {"type": "function", "function": {
    "name": "get_time", "parameters": {"type": "object",
                                       "properties": {"zone": {"enum": ["UTC", "CET"]}},
                                       "required": ["zone"], "additionalProperties": False}}}
HELLO = [{"role": "user", "content": "Hello there"}]


class ClientCase(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.client = openai.OpenAI(base_url=cls.server.url + "/v1", api_key="none", max_retries=0,
                                   timeout=PATIENCE)

    def chat(self, messages=None, **options):
        options.setdefault("max_tokens", 12)
        extra = options.pop("extra", {})
        return self.client.chat.completions.create(
            model="default", messages=messages or HELLO, extra_body=extra, **options)

    def completion(self, prompt="Once upon a time", **options):
        options.setdefault("max_tokens", 12)
        extra = options.pop("extra", {})
        return self.client.completions.create(model="default", prompt=prompt, extra_body=extra,
                                              **options)


class Chat(ClientCase):
    def test_answer(self):
        answer = self.chat(temperature=0)
        self.assertTrue(answer.id.startswith("chatcmpl-"))
        self.assertEqual(answer.object, "chat.completion")
        self.assertEqual(answer.model, "default")
        choice = answer.choices[0]
        self.assertEqual(choice.message.role, "assistant")
        self.assertTrue(choice.message.content)
        self.assertIn(choice.finish_reason, ("stop", "length"))
        self.assertIsNone(choice.message.tool_calls)
        usage = answer.usage
        self.assertEqual(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)

    def test_prompt_is_the_template(self):
        """The same text through /v1/completions gives the same answer."""
        answer = self.chat(temperature=0, extra={"return_token_ids": True})
        plain = self.completion("user: Hello there\nassistant:", temperature=0,
                                extra={"add_special_tokens": False, "return_token_ids": True})
        self.assertEqual(answer.prompt_token_ids, plain.choices[0].prompt_token_ids)
        self.assertEqual(answer.choices[0].message.content, plain.choices[0].text)

    def test_text_parts_are_joined(self):
        parts = [{"role": "user", "content": [{"type": "text", "text": "Hello "},
                                              {"type": "text", "text": "there"}]}]
        self.assertEqual(self.chat(parts, temperature=0).choices[0].message.content,
                         self.chat(temperature=0).choices[0].message.content)

    def test_n_and_seed(self):
        first = self.chat(n=3, seed=7, temperature=1.5)
        again = self.chat(n=3, seed=7, temperature=1.5)
        other = self.chat(n=3, seed=8, temperature=1.5)
        texts = [c.message.content for c in first.choices]
        self.assertEqual([c.index for c in first.choices], [0, 1, 2])
        self.assertEqual(texts, [c.message.content for c in again.choices])
        self.assertNotEqual(texts, [c.message.content for c in other.choices])
        self.assertEqual(len(set(texts)), 3)
        # The first sample equals the one for n = 1: samples do not depend on each other.
        self.assertEqual(texts[0], self.chat(seed=7, temperature=1.5).choices[0].message.content)

    def test_stop(self):
        whole = self.chat(temperature=0, max_tokens=30).choices[0].message.content
        word = whole.split()[3]
        cut = self.chat(temperature=0, max_tokens=30, stop=[word, "\0never"]).choices[0]
        self.assertEqual(cut.message.content, whole[:whole.index(word)])
        self.assertEqual(cut.finish_reason, "stop")
        self.assertEqual(cut.stop_reason, word)

    def test_max_completion_tokens(self):
        answer = self.chat(max_tokens=openai.NOT_GIVEN, max_completion_tokens=3, temperature=0,
                           extra={"ignore_eos": True})
        self.assertEqual(answer.usage.completion_tokens, 3)
        self.assertEqual(answer.choices[0].finish_reason, "length")

    def test_continue_final_message(self):
        messages = HELLO + [{"role": "assistant", "content": "Once upon a"}]
        answer = self.chat(messages, temperature=0, extra={
            "continue_final_message": True, "add_generation_prompt": False,
            "return_token_ids": True})
        plain = self.completion("user: Hello there\nassistant: Once upon a", temperature=0,
                                extra={"add_special_tokens": False})
        self.assertEqual(answer.choices[0].message.content, plain.choices[0].text)

    def test_errors(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(temperature=-1)
        self.assertEqual(caught.exception.param, "temperature")
        with self.assertRaises(openai.NotFoundError):
            self.client.chat.completions.create(model="other", messages=HELLO)
        with self.assertRaises(openai.BadRequestError):
            self.chat([{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "data:,"}}]}])


class Stream(ClientCase):
    def test_pieces_make_the_whole(self):
        whole = self.chat(temperature=0, max_tokens=40).choices[0]
        chunks = list(self.chat(temperature=0, max_tokens=40, stream=True))
        self.assertEqual(len({c.id for c in chunks}), 1)
        self.assertTrue(all(c.object == "chat.completion.chunk" for c in chunks))
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        self.assertEqual(text, whole.message.content)
        self.assertEqual([c.choices[0].finish_reason for c in chunks if
                          c.choices[0].finish_reason], [whole.finish_reason])
        self.assertTrue(all(c.usage is None for c in chunks))
        self.assertGreater(len(chunks), 10)

    def test_usage(self):
        whole = self.chat(temperature=0)
        chunks = list(self.chat(temperature=0, stream=True, stream_options={"include_usage": True}))
        last = chunks[-1]
        self.assertEqual(last.choices, [])
        self.assertEqual(last.usage.prompt_tokens, whole.usage.prompt_tokens)
        self.assertEqual(last.usage.completion_tokens, whole.usage.completion_tokens)

    def test_continuous_usage(self):
        chunks = list(self.chat(temperature=0, stream=True, stream_options={
            "include_usage": True, "continuous_usage_stats": True}))
        counts = [c.usage.completion_tokens for c in chunks]
        self.assertEqual(counts, sorted(counts))
        self.assertEqual(counts[0], 0)

    def test_n(self):
        whole = self.chat(n=3, seed=7, max_tokens=20)
        texts = ["", "", ""]
        for chunk in self.chat(n=3, seed=7, max_tokens=20, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        self.assertEqual(texts, [c.message.content for c in whole.choices])

    def test_completion(self):
        whole = self.completion(["One", "Two"], temperature=0)
        texts = ["", ""]
        for chunk in self.completion(["One", "Two"], temperature=0, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        self.assertEqual(texts, [c.text for c in whole.choices])

    def test_leaving_ends_the_request(self):
        stream = self.completion(max_tokens=1900, stream=True, extra={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        self.assertTrue(self.server.becomes_idle())
        self.assertLess(self.server.metric("vllm:generation_tokens_total"), 1900)


class Tools(ClientCase):
    def check(self, call, tools=(WEATHER, CLOCK)):
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in tools}
        self.assertIn(call.function.name, schemas)
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
        self.assertTrue(call.id)
        self.assertEqual(call.type, "function")

    def test_required(self):
        for seed in range(5):
            answer = self.chat(tools=[WEATHER, CLOCK], tool_choice="required", max_tokens=200,
                               seed=seed).choices[0]
            self.assertEqual(answer.finish_reason, "tool_calls")
            self.assertIsNone(answer.message.content)
            self.assertEqual(len(answer.message.tool_calls), 1)
            self.check(answer.message.tool_calls[0])

    def test_named(self):
        for name in ("get_weather", "get_time"):
            answer = self.chat(tools=[WEATHER, CLOCK], max_tokens=200, seed=1, tool_choice={
                "type": "function", "function": {"name": name}}).choices[0]
            self.assertEqual(answer.message.tool_calls[0].function.name, name)
            self.check(answer.message.tool_calls[0])

    def test_streamed(self):
        options = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200, "seed": 3}
        whole = self.chat(**options).choices[0].message.tool_calls[0]
        arguments, names, ids, reasons = "", [], [], []
        for chunk in self.chat(stream=True, **options):
            choice = chunk.choices[0]
            self.assertFalse(choice.delta.content)
            reasons.append(choice.finish_reason)
            for call in choice.delta.tool_calls or []:
                self.assertEqual(call.index, 0)
                arguments += call.function.arguments or ""
                names += [call.function.name] if call.function.name else []
                ids += [call.id] if call.id else []
        self.assertEqual((names, arguments), (["get_weather"], whole.function.arguments))
        self.assertEqual(len(ids), 1)
        self.assertEqual([r for r in reasons if r], ["tool_calls"])

    def test_stream_helper(self):
        """The client's own accumulator, which checks the order and shape of the events."""
        with self.client.chat.completions.stream(
                model="default", messages=HELLO, tools=[WEATHER], tool_choice="required",
                max_tokens=200, seed=3) as stream:
            for _ in stream:
                pass
            message = stream.get_final_completion().choices[0].message
        self.check(message.tool_calls[0])

    def test_auto_and_none(self):
        for choice in ("auto", "none", openai.NOT_GIVEN):
            answer = self.chat(tools=[WEATHER], tool_choice=choice, temperature=0).choices[0]
            self.assertTrue(answer.message.content or answer.message.tool_calls)
        none = self.chat(tools=[WEATHER], tool_choice="none", temperature=0).choices[0]
        self.assertIsNone(none.message.tool_calls)

    def test_model_calls_by_itself(self):
        """With auto, output in the model's dialect becomes a call: here a grammar forces the
        output."""
        text = '<tool_call>{"name": "get_time", "arguments": {"zone": "UTC"}}</tool_call>'
        answer = self.chat(tools=[CLOCK], tool_choice="auto", max_tokens=100, extra={
            "structured_outputs": {"choice": [text]}}).choices[0]
        self.assertEqual(answer.finish_reason, "tool_calls")
        self.check(answer.message.tool_calls[0])
        none = self.chat(tools=[CLOCK], tool_choice="none", max_tokens=100, extra={
            "structured_outputs": {"choice": [text]}}).choices[0]
        self.assertEqual(none.message.content, text)

    def test_conversation_goes_on(self):
        call = self.chat(tools=[CLOCK], tool_choice="required", max_tokens=100,
                         seed=1).choices[0].message
        answer = self.chat(HELLO + [call, {"role": "tool", "tool_call_id": call.tool_calls[0].id,
                                           "content": "12:00"}], tools=[CLOCK], temperature=0)
        self.assertTrue(answer.choices[0].message.content or answer.choices[0].message.tool_calls)

    def test_refusals(self):
        for options in ({"tool_choice": "required"},
                        {"tools": [CLOCK], "tool_choice": {"type": "function",
                                                           "function": {"name": "other"}}},
                        {"tools": [{"type": "function", "function": {}}]},
                        {"tools": [{"type": "function", "function": {"name": "f",
                                                                     "parameters": "x"}}]},
                        {"tools": [CLOCK], "tool_choice": "sometimes"},
                        {"tools": [CLOCK], "tool_choice": "required",
                         "response_format": {"type": "json_object"}}):
            with self.assertRaises(openai.BadRequestError):
                self.chat(**options)


class Dialect(ClientCase):
    """The other two dialects, by flag; the shape of forced calls follows."""
    flags = ("--tool-call-parser", "mistral")

    def test_forced(self):
        for options in ({"stream": False}, {"stream": True}):
            if options["stream"]:
                calls = [c for chunk in self.chat(tools=[WEATHER], tool_choice="required", seed=2,
                                                  max_tokens=200, stream=True)
                         for c in chunk.choices[0].delta.tool_calls or []]
            else:
                calls = self.chat(tools=[WEATHER], tool_choice="required", seed=2,
                                  max_tokens=200).choices[0].message.tool_calls
            self.assertEqual(len(calls), 1)
            self.assertEqual(calls[0].function.name, "get_weather")
            jsonschema.validate(json.loads(calls[0].function.arguments),
                                WEATHER["function"]["parameters"])


class LlamaDialect(Dialect):
    flags = ("--tool-call-parser", "llama3_json")


class Reasoning(ClientCase):
    """A template that makes the model think; small models never end the thought."""
    flags = ("--reasoning-parser", "qwen3")
    options = {"template": os.path.join(os.path.dirname(__file__), "think.jinja")}
    SAME = {"temperature": 0, "max_tokens": 20, "extra": {"ignore_eos": True}}

    def plain(self, prompt):
        return self.completion(prompt, temperature=0, max_tokens=20, extra={
            "ignore_eos": True, "add_special_tokens": False}).choices[0].text

    def test_thought(self):
        message = self.chat(**self.SAME).choices[0].message
        text = self.plain("user: Hello there\nassistant: <think>\n")
        self.assertEqual((message.content, message.reasoning), (None, text.strip()))
        self.assertEqual(message.reasoning_content, message.reasoning)
        thought = ""
        for chunk in self.chat(stream=True, **self.SAME):
            self.assertFalse(chunk.choices[0].delta.content)
            thought += getattr(chunk.choices[0].delta, "reasoning", "")
        self.assertEqual(thought, message.reasoning)
        without = self.chat(temperature=0, max_tokens=20, extra={
            "ignore_eos": True, "include_reasoning": False}).choices[0].message
        self.assertFalse(without.content or hasattr(without, "reasoning"))

    def test_answer_alone(self):
        extra = {"ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False}}
        message = self.chat(temperature=0, max_tokens=20, extra=extra).choices[0].message
        self.assertEqual(message.content,
                         self.plain("user: Hello there\nassistant: <think></think>"))
        self.assertFalse(hasattr(message, "reasoning"))

    def ending(self, **options):
        """Makes a thought from the tokens of the closing tag; it ends when they come in order."""
        _, pieces = self.server.post("/tokenize", {"prompt": "</think>", "add_special_tokens": False})
        bias = {str(i): 100 for i in pieces["tokens"]}
        return {"temperature": 5, "max_tokens": 1900, "logit_bias": bias, **options}

    JSON = {"response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": WEATHER["function"]["parameters"]}}}

    def test_structure_follows_the_thought(self):
        for seed in (0, 2, 4):  # seeds that do not end the thought at once
            options = self.ending(seed=seed, logprobs=True, n=2)
            answer = self.chat(**self.JSON, **options)
            thoughts = [c.message.reasoning for c in answer.choices]
            self.assertNotEqual(*thoughts)
            for choice in answer.choices:
                self.assertEqual(choice.finish_reason, "stop")
                self.assertEqual(choice.message.reasoning_content, choice.message.reasoning)
                self.assertNotIn("</think>", choice.message.reasoning)
                jsonschema.validate(json.loads(choice.message.content),
                                    WEATHER["function"]["parameters"])
            self.assertEqual(sum(len(c.logprobs.content) for c in answer.choices),
                             answer.usage.completion_tokens)
            streamed = [["", ""], ["", ""]]
            for chunk in self.chat(stream=True, **self.JSON, **options):
                delta = chunk.choices[0].delta
                streamed[chunk.choices[0].index][0] += getattr(delta, "reasoning", "")
                streamed[chunk.choices[0].index][1] += delta.content or ""
            self.assertEqual(streamed, [[c.message.reasoning, c.message.content]
                                        for c in answer.choices])
            if seed == 0:  # without a structure nothing ends the answer
                free = self.chat(**options)
                self.assertEqual([c.message.reasoning for c in free.choices], thoughts)

    def test_forced_call_follows_the_thought(self):
        choice = self.chat(tools=[WEATHER], tool_choice="required",
                           **self.ending(seed=2)).choices[0]
        self.assertEqual((choice.finish_reason, choice.message.content), ("tool_calls", None))
        self.assertTrue(choice.message.reasoning)
        (call,) = choice.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])

    def test_structure_without_a_thought(self):
        """Thoughts that the template has closed, that do not end, and that are not allowed."""
        def ask(**options):
            extra = {"structured_outputs": {"choice": ["Yes."]}, **options.pop("extra", {})}
            choice = self.chat(temperature=0, max_tokens=20, extra=extra, **options).choices[0]
            return (choice.message.content, hasattr(choice.message, "reasoning"),
                    choice.finish_reason)
        closed = {"chat_template_kwargs": {"enable_thinking": False}}
        unopened = {"add_generation_prompt": False}
        self.assertEqual(ask(extra=closed), ("Yes.", False, "stop"))
        self.assertEqual(ask(), (None, True, "length"))
        self.assertEqual(ask(extra=unopened), ("Yes.", False, "stop"))
        _, first = self.server.post("/tokenize", {"prompt": "<", "add_special_tokens": False})
        self.assertEqual(ask(extra=unopened, logit_bias={str(first["tokens"][-1]): 100}),
                         (None, True, "length"))

    def test_messages_that_go_on(self):
        """Continued in the thought, or in the answer, which does not start a new thought."""
        _, first = self.server.post("/tokenize", {"prompt": "<", "add_special_tokens": False})
        def ask(begun, **extra):
            message = self.chat([*HELLO, {"role": "assistant", "content": begun}], temperature=0,
                                logit_bias={str(first["tokens"][-1]): 100}, extra={
                                    "continue_final_message": True, "add_generation_prompt": False,
                                    **extra}).choices[0].message
            return message.content, getattr(message, "reasoning", None)
        choice = {"structured_outputs": {"choice": ["Yes."]}}
        for extra in ({}, choice):
            self.assertEqual(ask("<think>I was", **extra), (None, "<" * 12))
        self.assertEqual(ask("<think>So.</think>Well, "), ("<" * 12, None))
        for begun in (" ", "Well, ", "<think>So.</think>Well, ", "Is <think> a tag? "):
            self.assertEqual(ask(begun, **choice), ("Yes.", None))

    def test_earlier_thoughts(self):
        """Templates get them under the name that they read, whichever name the client uses."""
        prompts = []
        for name in ("reasoning", "reasoning_content"):
            status, answer = self.server.post("/apply-template", {"messages": [
                *HELLO, {"role": "assistant", "content": "Hi.", name: "Be polite."}, *HELLO]})
            self.assertEqual(status, 200, answer)
            prompts.append(answer["prompt"])
        self.assertIn("assistant: <think>Be polite.</think>Hi.\n", prompts[0])
        self.assertEqual(*prompts)

    def test_names(self):
        with self.assertRaisesRegex(RuntimeError, "deepseek_r1, .*qwen3"):
            Server("--reasoning-parser", "thinker")


class Person(pydantic.BaseModel):
    model_config = {"extra": "forbid"}
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)
    # Bounded, so that every answer fits max_tokens whatever a small model generates.
    tags: list[typing.Annotated[str, pydantic.Field(max_length=12)]] = pydantic.Field(max_length=3)


class Structured(ClientCase):
    SCHEMA = {"type": "object", "properties": {
        "kind": {"enum": ["a", "b"]}, "size": {"type": "integer", "minimum": 10, "maximum": 99},
        "parts": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"type": "boolean"}]}},
        "required": ["kind", "size", "parts", "next"], "additionalProperties": False}

    def structured(self, kind, value, seed):
        return self.completion("Value:", max_tokens=300, seed=seed,
                               extra={"structured_outputs": {kind: value}}).choices[0]

    def test_parse_with_pydantic(self):
        for seed in range(5):
            answer = self.client.chat.completions.parse(
                model="default", messages=HELLO, response_format=Person, max_tokens=400, seed=seed)
            self.assertIsInstance(answer.choices[0].message.parsed, Person)

    def test_json_schema(self):
        for seed in range(5):
            answer = self.chat(max_tokens=400, seed=seed, response_format={
                "type": "json_schema", "json_schema": {"name": "x", "schema": self.SCHEMA}})
            jsonschema.validate(json.loads(answer.choices[0].message.content), self.SCHEMA)
            other = self.structured("json", self.SCHEMA, seed)
            jsonschema.validate(json.loads(other.text), self.SCHEMA)

    def test_schema_as_text(self):
        """vLLM's clients may send the schema as a string of JSON."""
        text = self.structured("json", json.dumps(self.SCHEMA), 1).text
        jsonschema.validate(json.loads(text), self.SCHEMA)

    def test_json_object(self):
        done = 0
        for seed in range(6):
            choice = self.chat(max_tokens=300, seed=seed, temperature=0.3,
                               response_format={"type": "json_object"}).choices[0]
            self.assertTrue(choice.message.content.lstrip().startswith("{"))
            if choice.finish_reason == "stop":
                self.assertIsInstance(json.loads(choice.message.content), dict)
                done += 1
        self.assertGreater(done, 0)

    def test_regex(self):
        pattern = r"(19|20)\d\d-[a-f]{2,4}(x|yz)?"
        texts = {self.structured("regex", pattern, seed).text for seed in range(8)}
        self.assertTrue(all(re.fullmatch(pattern, t) for t in texts), texts)
        self.assertGreater(len(texts), 1)

    def test_choice(self):
        choices = ["red", "green", "blue", "grün"]
        texts = {self.structured("choice", choices, seed).text for seed in range(10)}
        self.assertLessEqual(texts, set(choices))
        self.assertGreater(len(texts), 1)

    def test_older_names(self):
        """vLLM's fields from before structured_outputs."""
        for name, value in (("guided_choice", ["red", "blue"]), ("guided_regex", "red|blue"),
                            ("guided_grammar", 'root ::= "red" | "blue"'),
                            ("guided_json", {"enum": ["red", "blue"]})):
            choice = self.completion("Colour:", max_tokens=20, extra={name: value}).choices[0]
            self.assertIn(choice.text.strip(' \n\t"'), ("red", "blue"), name)

    def test_grammar(self):
        grammar = 'root ::= item ("," item)* ";"\nitem ::= [a-c] [0-9]{2} | "(" item ")"\n'
        for seed in range(6):
            choice = self.structured("grammar", grammar, seed)
            if choice.finish_reason != "stop":
                continue
            flat = choice.text.replace("(", "").replace(")", "")
            self.assertRegex(flat, r"\A[a-c]\d\d(,[a-c]\d\d)*;\Z")
            self.assertEqual(choice.text.count("("), choice.text.count(")"))

    def test_with_everything_else(self):
        """Penalties, a bias, logprobs, n and streaming do not lead out of the grammar."""
        answer = self.completion("Value:", max_tokens=60, seed=3, n=3, logprobs=2, extra={
            "structured_outputs": {"regex": "[0-9]{5}"}, "repetition_penalty": 1.3})
        for choice in answer.choices:
            self.assertRegex(choice.text, r"\A\d{5}\Z")
        text = "".join(c.choices[0].text for c in self.completion(
            "Value:", max_tokens=60, stream=True, extra={
                "structured_outputs": {"regex": "[0-9]{5}"}}))
        self.assertRegex(text, r"\A\d{5}\Z")

    def test_refusals(self):
        for wrong in ({"regex": "(unclosed"}, {"grammar": "root ::= other"}, {"choice": []},
                      {"json": {"type": "nonsense"}}, {"regex": "a", "choice": ["b"]}, {}):
            with self.assertRaises(openai.BadRequestError, msg=wrong):
                self.completion(extra={"structured_outputs": wrong})
        with self.assertRaises(openai.BadRequestError):
            self.chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}})


class Logprobs(ClientCase):
    def test_chat(self):
        answer = self.chat(temperature=0, logprobs=True, top_logprobs=3).choices[0]
        content = answer.logprobs.content
        self.assertEqual(b"".join(bytes(t.bytes) for t in content).decode(),
                         answer.message.content)
        for t in content:
            self.assertEqual(len(t.top_logprobs), 3)
            values = [p.logprob for p in t.top_logprobs]
            self.assertEqual(values, sorted(values, reverse=True))
            self.assertAlmostEqual(t.logprob, values[0], places=5)  # greedy: the best
            self.assertLess(sum(math.exp(v) for v in values), 1.0001)

    def test_without_top(self):
        answer = self.chat(temperature=0, logprobs=True).choices[0]
        self.assertTrue(all(t.top_logprobs == [] for t in answer.logprobs.content))

    def test_streamed(self):
        whole = self.chat(temperature=0, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        pieces = [t for c in self.chat(temperature=0, logprobs=True, top_logprobs=2, stream=True)
                  if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
        self.assertEqual([t.model_dump() for t in pieces], [t.model_dump() for t in whole])

    def test_completion(self):
        choice = self.completion(temperature=0, logprobs=2).choices[0]
        p = choice.logprobs
        self.assertEqual("".join(p.tokens), choice.text)
        self.assertEqual(p.text_offset[0], 0)
        self.assertEqual(len(p.token_logprobs), len(p.tokens))
        for token, value, top in zip(p.tokens, p.token_logprobs, p.top_logprobs):
            self.assertAlmostEqual(top[token], value, places=5)

    def test_offsets_count_characters(self):
        """As with OpenAI and vLLM; the tokens of one character all have the offset of the character."""
        text = "Naïve 東京 🙂é, they said"
        p = self.completion(text, echo=True, logprobs=0, max_tokens=0).choices[0].logprobs
        self.assertEqual(p.text_offset, sorted(p.text_offset))
        self.assertEqual(p.text_offset[:2], [0, 0])  # <s> is not part of the text
        self.assertEqual(p.text_offset[-1] + len(p.tokens[-1]), len(text))
        for token, at in zip(p.tokens[1:], p.text_offset[1:]):
            if "\ufffd" not in token:
                self.assertEqual(text[at:at + len(token)], token)

    def test_offsets_of_a_stream(self):
        """Tokens have correct offsets although the text of some is held back."""
        options = {"logprobs": 0, "max_tokens": 40, "temperature": 0,
                   "extra": {"structured_outputs": {"regex": "(🙂|東|é){6}"}}}
        whole = self.completion(**options).choices[0]
        self.assertRegex(whole.text, "^[🙂東é]{6}$")
        offsets = whole.logprobs.text_offset
        self.assertLessEqual(max(offsets), 6)
        self.assertEqual([at for c in self.completion(stream=True, **options)
                          for at in c.choices[0].logprobs.text_offset], offsets)

    def test_scoring_agrees(self):
        """The log-probability of a generated token equals the one from scoring the same text."""
        made = self.completion(temperature=0, logprobs=0, extra={"return_token_ids": True})
        ids = made.choices[0].prompt_token_ids + made.choices[0].token_ids
        scored = self.completion(ids, max_tokens=1, extra={"prompt_logprobs": 0})
        values = [list(e.values())[0]["logprob"]
                  for e in scored.choices[0].prompt_logprobs[1:]]
        for a, b in zip(made.choices[0].logprobs.token_logprobs,
                        values[len(made.choices[0].prompt_token_ids) - 1:]):
            self.assertAlmostEqual(a, b, places=4)

    def test_echo_scores_the_prompt(self):
        """Scoring a text as with OpenAI's API: echo, logprobs, and nothing generated."""
        choice = self.completion("Once upon a time", echo=True, logprobs=1, max_tokens=1,
                                 temperature=0).choices[0]
        p = choice.logprobs
        self.assertEqual(len(p.tokens), len(p.token_logprobs))
        self.assertTrue(choice.text.startswith("Once upon a time"))
        self.assertIsNone(p.token_logprobs[0])
        self.assertGreater(len(p.tokens), 3)
        self.assertTrue("".join(p.tokens).endswith(choice.text))


class Completions(ClientCase):
    def test_prompts_of_every_kind(self):
        ids = self.server.post("/tokenize", {"prompt": "Once upon a time"})[1]["tokens"]
        text = self.completion(temperature=0).choices[0].text
        self.assertEqual(self.completion(ids, temperature=0).choices[0].text, text)
        both = self.completion([ids, ids], temperature=0)
        self.assertEqual([c.text for c in both.choices], [text, text])
        many = self.completion(["Once upon a time", "A dog"], temperature=0, n=2)
        self.assertEqual([c.index for c in many.choices], [0, 1, 2, 3])
        self.assertEqual(many.choices[0].text, text)

    def test_echo(self):
        plain = self.completion(temperature=0).choices[0].text
        self.assertEqual(self.completion(temperature=0, echo=True).choices[0].text,
                         "Once upon a time" + plain)

    def test_logit_bias(self):
        best = self.completion(temperature=0, max_tokens=1,
                               extra={"return_token_ids": True}).choices[0].token_ids[0]
        other = self.completion(temperature=0, max_tokens=1, logit_bias={str(best): -100},
                                extra={"return_token_ids": True}).choices[0].token_ids[0]
        self.assertNotEqual(best, other)
        forced = self.completion(temperature=1, max_tokens=4, logit_bias={"77": 100},
                                 extra={"return_token_ids": True}).choices[0].token_ids
        self.assertEqual(forced, [77] * 4)

    def test_min_tokens_and_ignore_eos(self):
        eos = self.server.get("/props")[1]["eos_token"]
        ids = self.server.post("/tokenize", {"prompt": eos, "add_special_tokens": False})[1]
        bias = {str(ids["tokens"][0]): 100}
        soon = self.completion(logit_bias=bias, max_tokens=8)
        self.assertEqual(soon.choices[0].finish_reason, "stop")
        self.assertEqual(soon.usage.completion_tokens, 1)
        later = self.completion(logit_bias=bias, max_tokens=8, extra={"min_tokens": 5})
        self.assertEqual(later.usage.completion_tokens, 6)
        never = self.completion(logit_bias=bias, max_tokens=8, extra={"ignore_eos": True})
        self.assertEqual(never.choices[0].finish_reason, "length")
        self.assertEqual(never.usage.completion_tokens, 8)

    def test_return_token_ids(self):
        choice = self.completion(temperature=0, extra={"return_token_ids": True}).choices[0]
        text = self.server.post("/detokenize", {"tokens": choice.token_ids})[1]["prompt"]
        self.assertEqual(text, choice.text)
        pieces, prompt = [], None
        for chunk in self.completion(temperature=0, stream=True,
                                     extra={"return_token_ids": True}):
            prompt = prompt or chunk.choices[0].prompt_token_ids
            pieces += chunk.choices[0].token_ids
        self.assertEqual(pieces, choice.token_ids)
        self.assertEqual(prompt, choice.prompt_token_ids)

    def test_stop_tokens(self):
        ids = self.completion(temperature=0, extra={"return_token_ids": True}).choices[0].token_ids
        cut = self.completion(temperature=0, extra={"stop_token_ids": [ids[3]],
                                                    "return_token_ids": True}).choices[0]
        self.assertEqual(cut.token_ids, ids[:ids.index(ids[3]) + 1])
        self.assertEqual(cut.finish_reason, "stop")
        self.assertEqual(cut.stop_reason, ids[3])

    def test_cached_tokens(self):
        prompt = "The same long beginning of a text, " * 20
        self.completion(prompt, max_tokens=1)
        usage = self.completion(prompt, max_tokens=1).usage
        self.assertGreater(usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens // 2)

    def test_models(self):
        models = self.client.models.list().data
        self.assertEqual([m.id for m in models], ["default"])
        self.assertEqual(self.client.models.retrieve("default").id, "default")
        with self.assertRaises(openai.NotFoundError):
            self.client.models.retrieve("other")


def read_safetensors(path):
    """name -> (type, shape, bytes)"""
    with open(path, "rb") as f:
        data = f.read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    return {name: (e["dtype"], e["shape"], data[8 + size + e["data_offsets"][0]:
                                                8 + size + e["data_offsets"][1]])
            for name, e in header.items() if name != "__metadata__"}


def numbers(tensor):
    kind, shape, data = tensor
    if kind == "BF16":
        halves = struct.unpack(f"<{len(data) // 2}H", data)
        flat = struct.unpack(f"<{len(halves)}f", struct.pack(f"<{len(halves)}I",
                                                             *(h << 16 for h in halves)))
    else:
        code = {"F32": "f", "I64": "q", "I32": "i"}[kind]
        flat = struct.unpack(f"<{len(data) // struct.calcsize('<' + code)}{code}", data)
    width = shape[-1]
    return [flat[i:i + width] for i in range(0, len(flat), width)]


class Embeddings(ClientCase):
    """A model with reference logits. Logits are the output matrix times the hidden state, so the
    state from /v1/embeddings can be checked against logits that another implementation computed."""
    options = {"model": GOLDEN, "template": None}
    mean = False

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        golden = read_safetensors(os.path.join(GOLDEN, "golden.safetensors"))
        cls.ids = [int(i) for i in numbers(golden["ids_1"])[0]]
        logits = numbers(golden["logits_1"])
        cls.logits = logits[-1]
        if cls.mean:
            cls.logits = [sum(column) / len(logits) for column in zip(*logits)]
        cls.head = numbers(read_safetensors(os.path.join(GOLDEN, "model.safetensors"))[
            "lm_head.weight"])

    def embed(self, given, **options):
        extra = options.pop("extra", {})
        return self.client.embeddings.create(model="default", input=given, extra_body=extra,
                                             **options)

    def test_against_reference_logits(self):
        state = self.embed(self.ids, extra={"normalize": False}).data[0].embedding
        self.assertEqual(len(state), 64)
        for row, want in zip(self.head, self.logits):
            got = sum(a * b for a, b in zip(row, state))
            self.assertAlmostEqual(got, want, delta=0.02 + 0.02 * abs(want))

    def test_normalised(self):
        raw = self.embed(self.ids, extra={"normalize": False}).data[0].embedding
        unit = self.embed(self.ids).data[0].embedding
        length = math.sqrt(sum(x * x for x in raw))
        self.assertAlmostEqual(math.sqrt(sum(x * x for x in unit)), 1, places=5)
        for a, b in zip(raw, unit):
            self.assertAlmostEqual(a / length, b, places=5)

    def test_formats_agree(self):
        """The client requests base64 by default, and decodes it itself."""
        default = self.embed(self.ids)
        floats = self.embed(self.ids, encoding_format="float")
        self.assertEqual(default.data[0].embedding, floats.data[0].embedding)
        coded = self.embed(self.ids, encoding_format="base64").data[0].embedding
        self.assertIsInstance(coded, str)

    def test_lists(self):
        one = self.embed(self.ids).data[0].embedding
        two = self.embed(self.ids[:5]).data[0].embedding
        both = self.embed([self.ids, self.ids[:5]])
        self.assertEqual([d.index for d in both.data], [0, 1])
        self.assertEqual([d.embedding for d in both.data], [one, two])
        self.assertEqual(both.usage.prompt_tokens, len(self.ids) + 5)
        self.assertEqual(both.usage.total_tokens, len(self.ids) + 5)

    def test_refusals(self):
        for options in ({"dimensions": 32}, {"encoding_format": "int8"}):
            with self.assertRaises(openai.BadRequestError) as caught:
                self.embed(self.ids, **options)
            self.assertEqual(caught.exception.param, next(iter(options)))
        for wrong in ([], [[]], [[1], "a", 3], [100000], [-1], list(range(288)) * 4):
            with self.assertRaises(openai.BadRequestError, msg=wrong):
                self.embed(wrong)


class MeanEmbeddings(Embeddings):
    flags = ("--pooling", "mean")
    mean = True


class TextEmbeddings(ClientCase):
    def test_text_is_its_tokens(self):
        ids = self.server.post("/tokenize", {"prompt": "A dog runs"})[1]["tokens"]
        answer = self.client.embeddings.create(model="default", input=["A dog runs", "A dog runs"])
        by_ids = self.client.embeddings.create(model="default", input=ids)
        self.assertEqual(answer.data[0].embedding, by_ids.data[0].embedding)
        self.assertEqual(answer.data[1].embedding, by_ids.data[0].embedding)

    def test_many_at_once(self):
        texts = [f"Text number {i}" for i in range(200)]
        answer = self.client.embeddings.create(model="default", input=texts)
        self.assertEqual(len(answer.data), 200)
        alone = self.client.embeddings.create(model="default", input=texts[77])
        self.assertEqual(answer.data[77].embedding, alone.data[0].embedding)
        self.assertEqual(self.server.metric("vllm:num_requests_running"), 0)


if __name__ == "__main__":
    unittest.main()
