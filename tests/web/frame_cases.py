"""What is around the conversation: settings, models, colours, keys, copying, phones, access, weight."""
import gzip
import json
import re
from pathlib import Path

import axe_playwright_python

from web_rig import SOURCE, ChatCase, expect

SAMPLING = {"temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "max_tokens", "seed", "logprobs"}
LONG = ("## A heading\n\nSome *text* with `code` and a [link](https://a.example/).\n\n```python\nx = 1  # note\n"
        "def f(): return 'text'\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n> quote\n\n- item\n\n$$x^2$$\n")


class Frame(ChatCase):
    def test_first_visit(self):
        page = self.open(1280, 800)
        expect(page.locator("#settings")).to_be_hidden()
        expect(page.locator("#live")).to_be_hidden()
        self.script(page, "Yes.")
        self.ask(page, "Hello")
        self.answered(page, 1)
        chat = json.loads(self.server.get("/props")[2])["chat_sampling"]  # as run and chat use
        self.assertEqual({k: v for k, v in self.sent[-1].items() if k in SAMPLING}, chat)
        expect(page.locator(".assistant .who")).to_have_text(page.locator("#model-name").inner_text())
        self.open_panel(page, "settings")
        expect(page.get_by_label("Token probabilities")).not_to_be_checked()
        page.get_by_label("Top-p, exactly").fill("0.8")
        self.ask(page, "Hello")
        self.answered(page, 2)
        self.assertEqual({k: v for k, v in self.sent[-1].items() if k in SAMPLING}, {**chat, "top_p": 0.8})
        self.reload(page)
        expect(page.locator("#settings"), "an open panel is not remembered").to_be_visible()
        expect(page.get_by_label("Top-p, exactly")).to_have_value("0.8")
        page.get_by_role("button", name="Reset to defaults").click()
        expect(page.get_by_label("Top-p, exactly")).to_have_value("")
        self.assertEqual(self.problems, [])

    def test_the_servers_defaults_are_shown(self):
        page = self.open()
        self.open_panel(page, "settings")
        expect(page.locator("#temperature")).to_have_value("0.7")
        expect(page.get_by_label("Min-p, exactly")).to_have_attribute("placeholder", "0.05")
        page.route("**/props", lambda route: route.fulfill(json={"chat_template": "x", "chat_sampling": {
            "temperature": 0.35, "top_k": 20, "repetition_penalty": 1.1}}))
        self.reload(page)
        self.open_panel(page, "settings")
        expect(page.locator("#temperature")).to_have_value("0.35")
        for name, default in (("Temperature", "0.35"), ("Top-k", "20"), ("Repetition penalty", "1.1")):
            expect(page.get_by_label(f"{name}, exactly")).to_have_attribute("placeholder", default)

    def test_drafted_tokens(self):
        page = self.open()
        page.route("**/v1/chat/completions", lambda route: route.fulfill(
            content_type="text/event-stream", body="".join(f"data: {json.dumps(e)}\n\n" for e in (
                {"choices": [{"delta": {"content": "Yes."}, "finish_reason": "stop"}]},
                {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}, "metrics": {
                    "speculative_decoding": {"num_draft_tokens": 8, "num_accepted_draft_tokens": 6}}}))
            + "data: [DONE]\n\n"))
        self.ask(page, "Hello")
        self.answered(page, 1)
        expect(page.locator(".numbers")).to_contain_text("6 of 8 drafted tokens accepted")

    def test_several_models(self):
        page = self.open()
        expect(page.locator("#model"), "a list of one model").to_be_hidden()
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "small"}, {"id": "large"}]}))
        self.reload(page)
        page.get_by_label("Model").select_option("large")
        self.script(page, "Yes.")
        self.ask(page, "Hello")
        self.answered(page, 1)
        self.assertEqual(self.sent[-1]["model"], "large")
        expect(page.locator(".assistant .who")).to_have_text("large")
        self.reload(page)
        expect(page.get_by_label("Model")).to_have_value("large")

    def test_theme(self):
        page = self.open(1280, 800, color_scheme="dark")
        body, toggle = page.locator("body"), page.locator("#theme")
        colour = lambda: body.evaluate("e => getComputedStyle(e).backgroundColor")
        dark = colour()
        page.emulate_media(color_scheme="light")
        # The page hears of it in an event, which may come after emulate_media() returns.
        expect(body).not_to_have_css("background-color", dark)
        light = colour()
        expect(toggle).to_have_attribute("aria-label", "Colours: system")
        toggle.click()
        toggle.click()
        expect(toggle).to_have_attribute("aria-label", "Colours: dark")
        expect(body).to_have_css("background-color", dark)
        self.reload(page)
        expect(body, "the choice is forgotten").to_have_css("background-color", dark)
        page.locator("#theme").click()
        expect(body).to_have_css("background-color", light)
        self.assertEqual(self.problems, [])

    def test_shortcuts(self):
        page = self.open(1280, 800)
        self.script(page, "One.", "Two.")
        self.ask(page, "Hello")
        self.answered(page, 1)
        page.keyboard.press("Control+Shift+Enter")
        page.wait_for_function("() => document.querySelector('.assistant .body').textContent === 'Two.'")
        page.locator("#prompt").focus()
        page.keyboard.press("ArrowUp")
        expect(page.get_by_label("Edit message")).to_have_value("Hello")
        page.keyboard.press("Escape")
        page.keyboard.press("Control+k")
        expect(page.locator("#search")).to_be_focused()
        page.keyboard.type("a/?")
        expect(page.locator("#search")).to_have_value("a/?")
        page.locator("#search").fill("")
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("/")
        expect(page.locator("#prompt")).to_be_focused()
        for panel, key, shown in (("history", "b", False), ("settings", ",", True)):
            expect(page.locator(f"#{panel}")).to_be_visible(visible=not shown)
            page.keyboard.press(f"Control+{key}")
            expect(page.locator(f"#{panel}")).to_be_visible(visible=shown)
        page.keyboard.press("Control+Shift+l")
        expect(page.locator("#theme")).to_have_attribute("aria-label", "Colours: light")
        page.keyboard.press("Control+Shift+o")
        expect(page.locator(".message")).to_have_count(0)
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("?")
        sheet = page.get_by_role("dialog", name="Keyboard shortcuts")
        expect(sheet).to_contain_text("Search the conversations")
        self.keep(page, "shortcuts")
        page.keyboard.press("Escape")
        expect(sheet).to_be_hidden()
        self.assertEqual(self.problems, [])

    def test_phones(self):
        for width, height in ((390, 844), (844, 390)):
            page = self.open(width, height, is_mobile=True, has_touch=True)
            ideas, composer = self.box(page.locator("#ideas button").last), self.box(page.locator("#composer"))
            self.assertLessEqual(ideas["y"] + ideas["height"], composer["y"], "a suggestion lies under the input")
            self.assertLessEqual(composer["y"] + composer["height"], height)
            self.script(page, LONG + "\n\n" + "w" * 300 + "\n\n```\n" + "c" * 300 + "\n```")
            page.locator("#prompt").fill("A phone")
            page.get_by_role("button", name="Send").tap()
            self.answered(page, 1)
            self.fits(page, width)
            page.wait_for_selector("math")
            self.keep(page, f"phone-{width}")
            for panel in ("history", "settings", "live"):
                page.locator(f"#toggle-{panel}").tap()
                box = self.box(page.locator(f"#{panel}"))
                self.assertLessEqual(box["x"] + box["width"], width)
                self.fits(page, width)
                self.keep(page, f"phone-{width}-{panel}")
                page.locator(f"#{panel} .close").tap()
                expect(page.locator(f"#{panel}")).to_be_hidden()
            page.locator("#toggle-history").tap()
            page.locator(".entry .open").tap()
            expect(page.locator("#history")).to_be_hidden()
            expect(page.locator(".message").first).to_be_visible()
            for button in page.locator(".bar .tool:visible").all():
                box = self.box(button)
                self.assertGreaterEqual(min(box["width"], box["height"]), 32)
            self.assertEqual(self.problems, [])


class Copying(ChatCase):
    @classmethod
    def start_browser(cls):
        # A name that is not of this machine is not trusted without TLS.
        super().start_browser("--host-resolver-rules=MAP freshet.test 127.0.0.1")

    def copied(self, page, text):
        expect(page.locator("#toast")).to_have_text("Copied")
        page.locator("#prompt").fill("")
        page.locator("#prompt").focus()
        page.keyboard.press("Control+v")
        expect(page.locator("#prompt")).to_have_value(text)

    def test_without_tls(self):
        page = self.open(1280, 800, self.server.url.replace("127.0.0.1", "freshet.test"))
        self.assertFalse(page.evaluate("isSecureContext"))
        self.assertEqual(page.evaluate("typeof navigator.clipboard"), "undefined")
        self.script(page, "The **answer**.\n\n```python\nx = 1\ny = 2\n```\n")
        self.ask(page, "Hello")
        self.answered(page, 1)
        answer = "The **answer**.\n\n```python\nx = 1\ny = 2\n```\n"
        page.get_by_role("button", name="Copy code").click()
        self.copied(page, "x = 1\ny = 2")
        page.locator(".assistant .meta").get_by_role("button", name="Copy").click()
        self.copied(page, answer)
        page.locator(".user").get_by_role("button", name="Copy").click()
        self.copied(page, "Hello")
        page.keyboard.press("Control+Shift+y")
        self.copied(page, answer)
        self.keeps(page, answer)
        page.wait_for_selector(".entry")
        page.reload()
        page.wait_for_selector(".message")  # kept here too


class Access(ChatCase):
    def check(self, page, where):
        if not page.evaluate("typeof axe !== 'undefined'"):
            page.evaluate((Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf8"))
        found = page.evaluate("axe.run(document, {resultTypes: ['violations', 'incomplete']})")
        self.assertGreater(len(found["passes"]), 10)
        serious = [f"{v['id']}: {n['html'][:120]} {n.get('failureSummary', '')[:200]}" for v in found["violations"]
                   if v["impact"] in ("serious", "critical") for n in v["nodes"]]
        self.assertEqual(serious, [], where)

    def test_axe_finds_nothing_serious(self):
        for scheme in ("light", "dark"):
            page = self.open(1280, 800, color_scheme=scheme)
            self.check(page, f"{scheme}, welcome")
            self.script(page, "<think>Hm.</think>" + LONG, finish="length")
            self.set_tokens(page, 50)
            self.ask(page, "Hello")
            self.answered(page, 1)
            page.wait_for_selector("math")
            page.wait_for_selector(".hljs-keyword")
            page.get_by_role("button", name="Retry").click()
            self.answered(page, 1)
            page.wait_for_selector(".entry")
            page.locator("#search").fill("quote")
            page.wait_for_selector(".excerpt")
            self.check(page, f"{scheme}, an answer, settings")
            self.keep(page, f"page-{scheme}")
            page.locator("#toggle-live").click()
            page.wait_for_function("() => document.querySelector('canvas').getAttribute('aria-label').includes(':')")
            self.check(page, f"{scheme}, live")
            page.locator(".entry .more").click()
            expect(page.locator("#menu")).to_be_visible()
            self.check(page, f"{scheme}, menu")
            page.keyboard.press("Escape")
            expect(page.locator("#menu")).to_be_hidden()
            page.locator("#open-help").click()
            expect(page.locator("#help")).to_be_visible()
            self.check(page, f"{scheme}, keys")
            page.keyboard.press("Escape")
            page.route("**/v1/chat/completions", lambda route: route.fulfill(
                status=429, json={"error": {"message": "queue full"}}))
            self.ask(page, "Hello")
            page.get_by_role("alert").last.wait_for()
            self.check(page, f"{scheme}, error")

    def test_on_a_phone(self):
        for width, height in ((390, 844), (844, 390)):
            page = self.open(width, height, is_mobile=True, has_touch=True)
            self.check(page, f"{width}, welcome")
            self.script(page, LONG)
            self.ask(page, "Hello")
            self.answered(page, 1)
            self.check(page, f"{width}, answer")
            for panel in ("history", "settings", "live"):
                page.locator(f"#toggle-{panel}").tap()
                expect(page.locator(f"#{panel}")).to_be_visible()
                self.check(page, f"{width}, {panel}")
                page.locator(f"#{panel} .close").tap()
                expect(page.locator(f"#{panel}")).to_be_hidden()


class Weight(ChatCase):
    def test_everything_is_served_and_small(self):
        folder = SOURCE / "src/server/web"
        files = [f for f in folder.rglob("*") if f.suffix in (".js", ".css", ".svg", ".html")]
        self.assertGreater(len(files), 20)
        total = 0
        for file in files:
            name = file.relative_to(folder).as_posix()
            path = "/" if name == "index.html" else f"/web/{name}"
            status, headers, text = self.server.get(path)
            self.assertEqual((status, text), (200, file.read_text(encoding="utf8")), path)
            kind = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
            self.assertTrue(headers["Content-Type"].startswith(kind[file.suffix]), path)
            self.assertIn("default-src 'none'", headers["Content-Security-Policy"])
            self.assertNotIn("unsafe", headers["Content-Security-Policy"])
            total += len(gzip.compress(file.read_bytes(), 9))
            if "vendor" not in name:
                self.assertLessEqual(text.count("\n"), 600, name)
        self.assertLess(total, 250_000, "the page weighs more than 250 kB when compressed")

    def test_libraries_have_their_licences(self):
        vendor = SOURCE / "src/server/web/vendor"
        notice = (vendor / "NOTICE.md").read_text(encoding="utf8")
        for file in vendor.glob("*.js"):
            self.assertIn(f"| {file.name} |", notice)
            self.assertRegex(file.read_text(encoding="utf8")[:200], r"^/\*! .*\(c\)")
        for licence in set(re.findall(r"\| (MIT|BSD[^ ]*) \|", notice)):
            self.assertIn(f"## {licence}", notice)

    def test_most_answers_need_no_library(self):
        page = self.open()
        self.script(page, "Plain *text*.")
        loaded = []
        page.on("request", lambda r: loaded.append(r.url))
        self.ask(page, "Hello")
        self.answered(page, 1)
        self.assertFalse([u for u in loaded if "katex" in u or "highlight" in u])
