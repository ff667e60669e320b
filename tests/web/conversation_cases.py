"""Conversations on the page: kept, listed, searched, branched, continued, exported and imported."""
import base64
import json
import urllib.request

from web_rig import ChatCase


class ListCase(ChatCase):
    def titles(self, page):
        return page.locator(".entry .title").all_inner_texts()

    def texts(self, page):
        return page.locator(".message .body").all_inner_texts()

    def listed(self, page, count):
        page.wait_for_function("n => document.querySelectorAll('.entry').length === n", arg=count)

    def menu(self, page, title, item):
        page.locator(".entry", has_text=title).hover()
        page.get_by_role("button", name=f"More for “{title}”").click()
        page.get_by_role("menuitem", name=item).click()


class History(ListCase):
    def test_survives_a_reload(self):
        page = self.open()
        self.script(page, "The **first** answer.", "The second answer.")
        self.ask(page, "A question about rivers")
        self.answered(page, 1)
        self.ask(page, "And lakes?")
        self.answered(page, 2)
        before = self.texts(page)
        page.wait_for_timeout(500)  # the page stores an answer a moment after it shows it
        page.reload()
        page.wait_for_selector(".message")
        self.assertEqual(self.texts(page), before)
        self.assertEqual(before[1], "The first answer.")
        self.assertEqual(page.locator(".who").first.inner_text(), page.locator("#model-name").inner_text())
        page.get_by_role("button", name="New chat").click()
        self.assertEqual(page.locator(".message").count(), 0)
        page.go_back()
        page.wait_for_selector(".message")
        self.assertEqual(self.texts(page), before)
        self.ask(page, "Still there?")
        self.answered(page, 3)
        self.assertEqual([m["content"] for m in self.sent[-1]["messages"]],
                         ["A question about rivers", "The **first** answer.", "And lakes?", "The second answer.",
                          "Still there?"])
        self.assertEqual(self.problems, [])

    def test_keeps_what_was_written_when_the_page_goes(self):
        page = self.open()
        self.set_tokens(page, 2000)
        page.evaluate("""() => { const real = fetch; window.fetch = (path, o) => real(path, o?.body
            ? {...o, body: JSON.stringify({...JSON.parse(o.body), ignore_eos: true})} : o); }""")
        self.throttle(page, 8000)
        self.ask(page, "A long one")
        page.wait_for_function("() => document.querySelector('.assistant .body')?.textContent.length > 60")
        page.wait_for_timeout(1500)
        self.throttle(page)
        page.reload()
        page.wait_for_selector(".assistant .body p")
        self.assertGreater(len(page.locator(".assistant .body").inner_text()), 20)
        self.assertTrue(page.get_by_role("button", name="Continue").is_visible())

    def test_list_search_rename_delete(self):
        page = self.open()
        self.script(page, "Granite is hard.", "Snow melts.", "Bread rises.")
        for i, question in enumerate(("Stones", "Winter", "Baking")):
            page.get_by_role("button", name="New chat").click()
            self.ask(page, question)
            self.answered(page, 1)
            self.listed(page, i + 1)
        self.assertEqual(self.titles(page), ["Baking", "Winter", "Stones"])
        page.get_by_role("searchbox", name="Search conversations").fill("MELTS")
        self.listed(page, 1)
        self.assertEqual(self.titles(page), ["Winter"])
        self.assertIn("Snow melts.", page.locator(".excerpt").inner_text())
        page.locator(".entry .open").click()
        page.wait_for_function("() => document.querySelector('.assistant .body').textContent === 'Snow melts.'")
        page.get_by_role("searchbox", name="Search conversations").fill("no such word")
        self.assertIn("Nothing found", page.locator("#history-note").inner_text())
        page.get_by_role("searchbox", name="Search conversations").fill("")
        self.listed(page, 3)
        self.menu(page, "Winter", "Rename")
        page.get_by_label("New name").fill("Meltwater <b>")
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.querySelector('.entry.current .title')?.textContent === 'Meltwater <b>'")
        page.reload()
        self.listed(page, 3)
        self.assertIn("Meltwater <b>", self.titles(page))
        self.menu(page, "Stones", "Delete")
        self.listed(page, 2)
        page.get_by_role("button", name="Undo").click()
        self.listed(page, 3)
        self.menu(page, "Stones", "Delete")
        self.listed(page, 2)
        page.reload()
        self.listed(page, 2)
        self.assertNotIn("Stones", self.titles(page))
        page.get_by_role("button", name="All conversations").click()
        page.get_by_role("menuitem", name="Delete all").click()
        self.listed(page, 0)
        self.assertEqual(page.locator(".message").count(), 0)
        self.assertEqual(self.problems, [])

    def test_deleted_while_it_is_written(self):
        page = self.open()
        self.set_tokens(page, 2000)
        self.throttle(page, 8000)
        self.ask(page, "A long one")
        page.wait_for_selector(".streaming .body p")
        self.menu(page, "A long one", "Delete")
        self.listed(page, 0)
        self.throttle(page)
        page.wait_for_timeout(1500)
        page.reload()
        page.wait_for_selector("#history-note:visible")
        self.assertEqual(self.titles(page), [])
        self.assertEqual(self.problems, [])

    def test_two_tabs_lose_nothing(self):
        page = self.open()
        self.script(page, "One.")
        self.ask(page, "Shared")
        self.answered(page, 1)
        other = page.context.new_page()
        self.script(other, "Two.")
        other.goto(page.url)
        other.wait_for_selector(".assistant")
        other.locator("#prompt").fill("From the other tab")
        other.keyboard.press("Enter")
        self.answered(other, 2)
        page.get_by_role("button", name="Retry").click()
        self.answered(page, 1)
        page.wait_for_timeout(300)
        page.reload()
        page.wait_for_selector(".assistant")
        page.get_by_role("button", name="Earlier version").click()
        self.assertIn("From the other tab", self.texts(page))

    def test_works_where_storage_is_blocked(self):
        context = self.browser.new_context()
        self.addCleanup(context.close)
        context.add_init_script("""Object.defineProperty(window, 'indexedDB', {get() { throw new Error('blocked'); }});
            for (const s of ['localStorage', 'sessionStorage'])
              Object.defineProperty(window, s, {get() { throw new Error('blocked'); }});""")
        page = context.new_page()
        problems = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        self.script(page, "It works.")
        page.goto(self.server.url + "/")
        page.wait_for_selector("#dot.up")
        page.locator("#prompt").fill("Hello")
        page.keyboard.press("Enter")
        self.answered(page, 1)
        self.listed(page, 1)
        self.assertIn("keeps nothing", page.locator("#history-note").inner_text())
        self.assertEqual(problems, [])


class Branches(ListCase):
    def test_retry_and_edit_keep_the_old(self):
        page = self.open()
        self.script(page, "Answer 1", "Answer 2", "Answer 3", "Answer 4")
        self.ask(page, "Question 1")
        self.answered(page, 1)
        self.assertTrue(page.locator(".branches").first.is_hidden())
        page.get_by_role("button", name="Retry").click()
        page.wait_for_function("() => document.querySelector('.assistant .body').textContent === 'Answer 2'")
        self.assertEqual(page.locator(".assistant .branches").inner_text(), "2/2")
        self.ask(page, "Follow-up")
        self.answered(page, 2)
        self.assertEqual(self.texts(page), ["Question 1", "Answer 2", "Follow-up", "Answer 3"])
        earlier = page.locator(".assistant").first.get_by_role("button", name="Earlier version")
        earlier.click()
        self.assertEqual(self.texts(page), ["Question 1", "Answer 1"])
        self.assertTrue(earlier.is_disabled())
        page.get_by_role("button", name="Later version").click()
        self.assertEqual(self.texts(page), ["Question 1", "Answer 2", "Follow-up", "Answer 3"])
        page.locator(".user").first.get_by_role("button", name="Edit").click()
        page.get_by_label("Edit message").fill("Question 2")
        page.keyboard.press("Enter")
        self.answered(page, 1)
        self.assertEqual(self.texts(page), ["Question 2", "Answer 4"])
        self.assertEqual([m["content"] for m in self.sent[-1]["messages"]], ["Question 2"])
        page.wait_for_timeout(300)
        page.reload()
        page.wait_for_selector(".assistant")
        self.assertEqual(self.texts(page), ["Question 2", "Answer 4"])
        self.assertEqual(page.locator(".user .branches").inner_text(), "2/2")
        page.get_by_role("button", name="Earlier version").click()
        self.assertEqual(self.texts(page), ["Question 1", "Answer 2", "Follow-up", "Answer 3"])
        self.assertEqual(self.problems, [])

    def test_continue_goes_on_where_the_text_ends(self):
        page = self.open()
        self.set_tokens(page, 5)
        self.ask(page, "Tell me about rivers.")
        self.answered(page, 1)
        self.assertIn("cut at the limit", page.locator(".numbers").inner_text())
        shown = page.locator(".assistant .body").inner_text()
        self.set_tokens(page, 7)
        page.get_by_role("button", name="Continue").click()
        page.wait_for_function("() => /^12 tokens/.test(document.querySelector('.numbers').textContent)")
        self.answered(page, 1)
        begun = self.sent[-1]["messages"][-1]["content"]
        self.assertEqual(begun.split(), shown.split())
        body = json.dumps({"prompt": f"user: Tell me about rivers.\nassistant: {begun}", "max_tokens": 7,
                           "temperature": 0, "add_special_tokens": False}).encode()
        request = urllib.request.Request(self.server.url + "/v1/completions", body,
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            rest = json.load(answer)["choices"][0]["text"]
        self.assertEqual(page.locator(".assistant .body").inner_text().split(), (begun + rest).split())
        self.assertTrue(self.sent[-1]["continue_final_message"])
        self.assertEqual(self.problems, [])

    def test_thoughts_in_the_text_are_folded(self):
        page = self.open()
        self.script(page, ["<think>\nLet me", " see.\n</think>\n\nThe **answer**."], "Fine.",
                    [{"reasoning_content": "Hm."}, {"content": "Yes."}], "The end of it.</think>\nSo.")
        self.ask(page, "Think")
        self.answered(page, 1)
        self.assertEqual(page.locator(".assistant .thought p").text_content(), "Let me see.")
        self.assertFalse(page.locator(".assistant .thought").evaluate("e => e.open"))
        self.assertEqual(page.locator(".assistant .body").inner_text(), "The answer.")
        self.ask(page, "Next")
        self.answered(page, 2)
        self.assertEqual([m["content"] for m in self.sent[-1]["messages"]], ["Think", "The **answer**.", "Next"])
        self.ask(page, "Next")
        self.answered(page, 3)
        self.assertEqual(page.locator(".assistant .thought p").nth(2).text_content(), "Hm.")
        self.ask(page, "Next")
        self.answered(page, 4)
        self.assertEqual(page.locator(".assistant .thought p").nth(3).text_content(), "The end of it.")
        self.assertEqual(page.locator(".assistant .body").nth(3).inner_text(), "So.")

    def test_files_go_with_the_question(self):
        page = self.open()
        self.script(page, "Read.")
        data = page.evaluate_handle("""() => { const data = new DataTransfer();
            data.items.add(new File(['a = 1\\n```\\n'], 'notes.md'));
            data.items.add(new File([new Uint8Array([0x89, 0x50, 0xff, 0])], 'picture.png'));
            data.items.add(new File(['gone'], 'gone.txt')); return data; }""")
        page.dispatch_event("#chat", "dragover", {"dataTransfer": data})
        self.assertTrue(page.locator(".drop-note").is_visible())
        page.dispatch_event("#chat", "drop", {"dataTransfer": data})
        page.wait_for_selector("#chips .chip >> text=notes.md")
        page.get_by_text("picture.png is not a text file").wait_for()
        page.get_by_role("button", name="Remove gone.txt").click()
        self.ask(page, "What is in it?")
        self.answered(page, 1)
        self.assertEqual(self.sent[-1]["messages"][0]["content"],
                         "File notes.md:\n````\na = 1\n```\n````\n\nWhat is in it?")
        self.assertEqual(page.locator(".user .chip .name").all_inner_texts(), ["notes.md"])
        self.assertTrue(page.locator("#chips").is_hidden())
        page.reload()
        page.wait_for_selector(".user .chip")
        self.assertEqual(self.problems, [])


    # Chosen, dropped and pasted, by a page whose server says that the model reads pictures.
    def test_pictures_go_with_the_question(self):
        page = self.open()
        self.script(page, "A dot.")

        def with_vision(route):
            reply = route.fetch()
            route.fulfill(response=reply, json={**reply.json(), "modalities": {"vision": True}})
        page.route("**/props", with_vision)
        page.reload()
        page.wait_for_selector("#attach[aria-label='Add pictures or text files']")
        dot = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
        page.locator("#attach-file").set_input_files(
            {"name": "dot.png", "mimeType": "image/png", "buffer": dot})
        page.wait_for_selector("#chips .picture img[alt='dot.png']")
        data = page.evaluate_handle("""bytes => { const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(bytes)], 'second.png', { type: 'image/png' }));
            data.items.add(new File(['words'], 'notes.txt')); return data; }""", list(dot))
        page.dispatch_event("#chat", "drop", {"dataTransfer": data})
        page.evaluate("""data => document.querySelector('#prompt').dispatchEvent(
            new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true }))""", data)
        page.wait_for_function("() => document.querySelectorAll('#chips .picture').length === 3")
        page.get_by_role("button", name="Remove second.png").first.click()
        self.ask(page, "What is it?")
        self.answered(page, 1)
        content = self.sent[-1]["messages"][0]["content"]
        url = "data:image/png;base64," + base64.b64encode(dot).decode()
        self.assertEqual(content[:2], [{"type": "image_url", "image_url": {"url": url}}] * 2)
        self.assertIn("words", content[2]["text"])
        self.assertTrue(content[2]["text"].endswith("What is it?"))
        shown = "() => [...document.querySelectorAll('.user .picture img')].map((i) => i.naturalWidth)"
        self.assertEqual(page.evaluate(shown), [1, 1])  # the policy of the page lets them be shown
        page.reload()
        page.wait_for_selector(".user .picture img")
        self.assertEqual(page.evaluate(shown), [1, 1])
        self.assertEqual(self.problems, [])

    def test_a_model_that_reads_text_gets_no_picture(self):
        page = self.open()
        page.locator("#attach-file").set_input_files(
            {"name": "dot.png", "mimeType": "image/png", "buffer": b"x"})
        page.get_by_text("reads text only").wait_for()
        self.assertTrue(page.locator("#chips").is_hidden())


class Transfer(ListCase):
    def fill_page(self, page):
        self.script(page, "An answer with `code`\n\n<!-- freshet:user -->\n\nand ## a heading",
                    "<think>Deep.</think>Another.", "Third.")
        self.ask(page, "First question")
        self.answered(page, 1)
        page.get_by_role("button", name="Retry").click()
        page.wait_for_function("() => document.querySelector('.assistant .body').textContent === 'Another.'")
        page.get_by_role("button", name="Earlier version").click()
        self.ask(page, "## Second\nquestion")
        self.answered(page, 2)

    def save(self, page, item):
        with page.expect_download() as download:
            self.menu(page, "First question", item)
        return download.value.suggested_filename, download.value.path().read_text(encoding="utf8")

    def load(self, page, name, text):
        page.locator("#import-file").set_input_files({"name": name, "mimeType": "text/plain",
                                                      "buffer": text.encode()})

    def test_json_brings_everything_back(self):
        page = self.open()
        self.fill_page(page)
        shown = self.texts(page)
        name, text = self.save(page, "Export as JSON")
        self.assertEqual(name, "First-question.json")
        kept = json.loads(text)["conversations"][0]
        self.assertEqual(sorted(n["content"] for n in kept["nodes"] if n["role"] == "assistant")[0],
                         "<think>Deep.</think>Another.")
        other = self.open()
        self.load(other, name, text)
        other.get_by_text("Imported 1 conversation").wait_for()
        other.wait_for_selector(".message")
        self.assertEqual(self.texts(other), shown)
        other.get_by_role("button", name="Later version").click()
        self.assertEqual(self.texts(other), ["First question", "Another."])
        self.load(other, name, text)  # twice is once
        other.wait_for_timeout(500)
        self.listed(other, 1)
        _, again = self.save(other, "Export as JSON")
        self.assertEqual(json.loads(again)["conversations"][0]["nodes"], kept["nodes"])

    def test_markdown_can_be_read_back(self):
        page = self.open()
        self.fill_page(page)
        shown = self.texts(page)
        name, text = self.save(page, "Export as Markdown")
        self.assertEqual(name, "First-question.md")
        self.assertTrue(text.startswith("# First question\n"))
        self.assertIn("\\<!-- freshet:user -->", text)
        other = self.open()
        self.load(other, name, text)
        other.wait_for_selector(".message")
        self.assertEqual(self.texts(other), shown)
        self.assertEqual(self.save(other, "Export as Markdown")[1], text)

    def test_bad_files_are_refused_by_name(self):
        page = self.open()
        node = {"id": "a", "parent": "", "role": "user", "content": "x"}
        wrap = lambda c: json.dumps({"format": "freshet.conversations", "version": 1, "conversations": c})
        for text, why in (("{", "neither JSON"), ('{"format": "other"}', "format"), ("# Notes\n", "no messages"),
                          (wrap([{"nodes": [{**node, "parent": "b"}]}]), "the message before it"),
                          (wrap([{"nodes": [{**node, "role": "system"}]}]), "lacks a role"),
                          (wrap([{"nodes": 7}]), 'no list "nodes"'),
                          (json.dumps({"format": "freshet.conversations", "version": 2, "conversations": []}), "newer")):
            self.load(page, "file.json", text)
            page.wait_for_function("why => { const t = document.getElementById('toast'); return !t.hidden"
                                   " && t.textContent.includes('file.json') && t.textContent.includes(why); }", arg=why)
        self.listed(page, 0)
        hostile = {"id": "__proto__", "title": "<img src=x onerror=alert(1)>", "nodes": [
            {**node, "id": "constructor", "content": "<script>window.bad = 1</script>", "stats": {"a": 1},
             "files": [{"name": 5, "text": "t"}]}], "chosen": [["", "constructor"], 3]}
        self.load(page, "file.json", wrap([hostile]))
        self.listed(page, 1)
        page.wait_for_selector(".user")
        self.assertEqual(self.texts(page), ["<script>window.bad = 1</script>"])
        self.assertIsNone(page.evaluate("window.bad ?? null"))
        self.assertEqual(self.problems, [])
