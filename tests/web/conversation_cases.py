"""Conversations on the page: kept, listed, searched, branched, continued, exported and imported."""
import base64
import json
import re
import urllib.request

from web_rig import PATIENCE_S, ChatCase, expect


class ListCase(ChatCase):
    def titled(self, page, *titles):
        expect(page.locator(".entry .title")).to_have_text(list(titles))

    def texts(self, page):
        return page.locator(".message .body").all_inner_texts()

    def shows(self, page, *texts):
        expect(page.locator(".message .body")).to_have_text(list(texts), use_inner_text=True)

    def listed(self, page, count):
        expect(page.locator(".entry")).to_have_count(count)

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
        before = ("A question about rivers", "The first answer.", "And lakes?", "The second answer.")
        self.shows(page, *before)
        self.keeps(page, "The second answer.")
        self.reload(page)
        self.shows(page, *before)
        expect(page.locator(".who").first).to_have_text(page.locator("#model-name").inner_text())
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".message")).to_have_count(0)
        page.go_back()
        self.shows(page, *before)
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
        self.eventually(page, lambda: self.assertGreater(
            sum(len(n["content"].strip()) for c in self.kept(page) for n in c["nodes"] if n["role"] == "assistant"), 40))
        self.throttle(page)
        page.reload()
        expect(page.locator(".assistant .body")).to_have_text(re.compile(".{20}", re.S))
        expect(page.get_by_role("button", name="Continue")).to_be_visible()

    def test_list_search_rename_delete(self):
        page = self.open()
        self.script(page, "Granite is hard.", "Snow melts.", "Bread rises.")
        for i, question in enumerate(("Stones", "Winter", "Baking")):
            page.get_by_role("button", name="New chat").click()
            expect(page.locator(".message")).to_have_count(0)
            self.ask(page, question)
            self.answered(page, 1)
            self.listed(page, i + 1)
        self.keeps(page, "Granite is hard.", "Snow melts.", "Bread rises.")
        self.titled(page, "Baking", "Winter", "Stones")
        search = page.get_by_role("searchbox", name="Search conversations")
        search.fill("MELTS")
        self.titled(page, "Winter")
        expect(page.locator(".excerpt")).to_contain_text("Snow melts.")
        page.locator(".entry .open").click()
        self.shows(page, "Winter", "Snow melts.")
        search.fill("no such word")
        expect(page.locator("#history-note")).to_contain_text("Nothing found")
        search.fill("")
        self.listed(page, 3)
        self.menu(page, "Winter", "Rename")
        page.get_by_label("New name").fill("Meltwater <b>")
        page.keyboard.press("Enter")
        expect(page.locator(".entry.current .title")).to_have_text("Meltwater <b>")
        self.reload(page)
        self.titled(page, "Baking", "Meltwater <b>", "Stones")
        self.menu(page, "Stones", "Delete")
        self.listed(page, 2)
        page.get_by_role("button", name="Undo").click()
        self.listed(page, 3)
        self.menu(page, "Stones", "Delete")
        self.listed(page, 2)
        self.reload(page)
        self.titled(page, "Baking", "Meltwater <b>")
        page.get_by_role("button", name="All conversations").click()
        page.get_by_role("menuitem", name="Delete all").click()
        self.listed(page, 0)
        expect(page.locator(".message")).to_have_count(0)
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
        # The answer has ended, and what its end would have stored comes before what is asked for next.
        expect(page.locator("#stop")).to_be_hidden()
        self.assertEqual(self.kept(page), [])
        self.reload(page)
        page.wait_for_selector("#history-note:visible")
        self.listed(page, 0)
        self.assertEqual(self.problems, [])

    def test_two_tabs_lose_nothing(self):
        page = self.open()
        self.script(page, "One.")
        self.ask(page, "Shared")
        self.answered(page, 1)
        self.keeps(page, "One.")
        other = page.context.new_page()
        self.script(other, "Two.")
        other.goto(page.url)
        other.wait_for_selector(".assistant")
        other.locator("#prompt").fill("From the other tab")
        other.keyboard.press("Enter")
        self.answered(other, 2)
        self.keeps(other, "Two.")
        self.script(page, "Three.")
        page.get_by_role("button", name="Retry").click()
        self.answered(page, 1)
        self.keeps(page, "One.", "Two.", "Three.")
        self.reload(page)
        self.shows(page, "Shared", "Three.")
        page.get_by_role("button", name="Earlier version").click()
        self.shows(page, "Shared", "One.", "From the other tab", "Two.")

    def test_works_where_storage_is_blocked(self):
        context = self.context()
        context.add_init_script("""Object.defineProperty(window, 'indexedDB', {get() { throw new Error('blocked'); }});
            for (const s of ['localStorage', 'sessionStorage'])
              Object.defineProperty(window, s, {get() { throw new Error('blocked'); }});""")
        page = context.new_page()
        problems = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        self.script(page, "It works.")
        page.goto(self.server.url + "/")
        self.connected(page)
        page.locator("#prompt").fill("Hello")
        page.keyboard.press("Enter")
        self.answered(page, 1)
        self.listed(page, 1)
        expect(page.locator("#history-note")).to_contain_text("keeps nothing")
        self.assertEqual(problems, [])


class Branches(ListCase):
    def test_retry_and_edit_keep_the_old(self):
        page = self.open()
        self.script(page, "Answer 1", "Answer 2", "Answer 3", "Answer 4")
        self.ask(page, "Question 1")
        self.answered(page, 1)
        expect(page.locator(".branches").first).to_be_hidden()
        page.get_by_role("button", name="Retry").click()
        self.answered(page, 1)
        self.shows(page, "Question 1", "Answer 2")
        expect(page.locator(".assistant .branches")).to_have_text("2/2")
        self.ask(page, "Follow-up")
        self.answered(page, 2)
        self.shows(page, "Question 1", "Answer 2", "Follow-up", "Answer 3")
        earlier = page.locator(".assistant").first.get_by_role("button", name="Earlier version")
        earlier.click()
        self.shows(page, "Question 1", "Answer 1")
        expect(earlier).to_be_disabled()
        page.get_by_role("button", name="Later version").click()
        self.shows(page, "Question 1", "Answer 2", "Follow-up", "Answer 3")
        page.locator(".user").first.get_by_role("button", name="Edit").click()
        page.get_by_label("Edit message").fill("Question 2")
        page.keyboard.press("Enter")
        self.answered(page, 1)
        self.shows(page, "Question 2", "Answer 4")
        self.assertEqual([m["content"] for m in self.sent[-1]["messages"]], ["Question 2"])
        self.keeps(page, "Answer 4")
        self.reload(page)
        self.shows(page, "Question 2", "Answer 4")
        expect(page.locator(".user .branches")).to_have_text("2/2")
        page.get_by_role("button", name="Earlier version").click()
        self.shows(page, "Question 1", "Answer 2", "Follow-up", "Answer 3")
        self.assertEqual(self.problems, [])

    def test_continue_goes_on_where_the_text_ends(self):
        page = self.open()
        self.set_tokens(page, 5)
        self.ask(page, "Tell me about rivers.")
        self.answered(page, 1)
        expect(page.locator(".numbers")).to_contain_text("cut at the limit")
        shown = page.locator(".assistant .body").inner_text()
        self.set_tokens(page, 7)
        page.get_by_role("button", name="Continue").click()
        expect(page.locator(".numbers")).to_have_text(re.compile("^12 tokens"))
        self.answered(page, 1)
        begun = self.sent[-1]["messages"][-1]["content"]
        self.assertEqual(begun.split(), shown.split())
        body = json.dumps({"prompt": f"user: Tell me about rivers.\nassistant: {begun}", "max_tokens": 7,
                           "temperature": 0, "add_special_tokens": False}).encode()
        request = urllib.request.Request(self.server.url + "/v1/completions", body,
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
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
        expect(page.locator(".assistant .thought p")).to_have_text("Let me see.")
        expect(page.locator(".assistant .thought")).not_to_have_attribute("open", "")
        expect(page.locator(".assistant .body")).to_have_text("The answer.")
        self.ask(page, "Next")
        self.answered(page, 2)
        self.assertEqual([m["content"] for m in self.sent[-1]["messages"]], ["Think", "The **answer**.", "Next"])
        self.ask(page, "Next")
        self.answered(page, 3)
        expect(page.locator(".assistant .thought p").nth(2)).to_have_text("Hm.")
        self.ask(page, "Next")
        self.answered(page, 4)
        expect(page.locator(".assistant .thought p").nth(3)).to_have_text("The end of it.")
        expect(page.locator(".assistant .body").nth(3)).to_have_text("So.")

    def test_files_go_with_the_question(self):
        page = self.open()
        self.script(page, "Read.")
        data = page.evaluate_handle("""() => { const data = new DataTransfer();
            data.items.add(new File(['a = 1\\n```\\n'], 'notes.md'));
            data.items.add(new File([new Uint8Array([0x89, 0x50, 0xff, 0])], 'picture.png'));
            data.items.add(new File(['gone'], 'gone.txt')); return data; }""")
        page.dispatch_event("#chat", "dragover", {"dataTransfer": data})
        expect(page.locator(".drop-note")).to_be_visible()
        page.dispatch_event("#chat", "drop", {"dataTransfer": data})
        page.wait_for_selector("#chips .chip >> text=notes.md")
        expect(page.locator("#toast")).to_contain_text("picture.png is not a text file")
        page.get_by_role("button", name="Remove gone.txt").click()
        self.ask(page, "What is in it?")
        self.answered(page, 1)
        self.assertEqual(self.sent[-1]["messages"][0]["content"],
                         "File notes.md:\n````\na = 1\n```\n````\n\nWhat is in it?")
        expect(page.locator(".user .chip .name")).to_have_text(["notes.md"])
        expect(page.locator("#chips")).to_be_hidden()
        self.keeps(page, "Read.")
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
        self.reload(page)
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
        expect(page.locator("#chips .picture")).to_have_count(3)
        expect(page.locator("#chips .name")).to_have_text(["notes.txt"] * 2)
        page.get_by_role("button", name="Remove second.png").first.click()
        self.ask(page, "What is it?")
        self.answered(page, 1)
        content = self.sent[-1]["messages"][0]["content"]
        url = "data:image/png;base64," + base64.b64encode(dot).decode()
        self.assertEqual(content[:2], [{"type": "image_url", "image_url": {"url": url}}] * 2)
        self.assertIn("words", content[2]["text"])
        self.assertTrue(content[2]["text"].endswith("What is it?"))
        shown = lambda: self.assertEqual(page.locator(".user .picture img").evaluate_all(
            "all => all.map((image) => image.naturalWidth)"), [1, 1])
        self.eventually(page, shown)  # the policy of the page lets them be shown
        self.keeps(page, "A dot.")
        self.reload(page)
        self.eventually(page, shown)
        self.assertEqual(self.problems, [])

    def test_a_model_that_reads_text_gets_no_picture(self):
        page = self.open()
        page.locator("#attach-file").set_input_files(
            {"name": "dot.png", "mimeType": "image/png", "buffer": b"x"})
        expect(page.locator("#toast")).to_contain_text("reads text only")
        expect(page.locator("#chips")).to_be_hidden()


class Transfer(ListCase):
    def fill_page(self, page):
        self.script(page, "An answer with `code`\n\n<!-- freshet:user -->\n\nand ## a heading",
                    "<think>Deep.</think>Another.", "Third.")
        self.ask(page, "First question")
        self.answered(page, 1)
        page.get_by_role("button", name="Retry").click()
        self.answered(page, 1)
        self.shows(page, "First question", "Another.")
        page.get_by_role("button", name="Earlier version").click()
        self.ask(page, "## Second\nquestion")
        self.answered(page, 2)
        self.keeps(page, "Third.")

    def save(self, page, item):
        with page.expect_download() as download:
            self.menu(page, "First question", item)
        return download.value.suggested_filename, download.value.path().read_text(encoding="utf8")

    def load(self, page, name, text):
        page.locator("#import-file").set_input_files({"name": name, "mimeType": "text/plain",
                                                      "buffer": text.encode()})
        expect(page.locator("#import-file")).to_have_value("")  # it has been read

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
        expect(other.locator("#toast")).to_contain_text("Imported 1 conversation")
        self.shows(other, *shown)
        other.get_by_role("button", name="Later version").click()
        self.shows(other, "First question", "Another.")
        self.load(other, name, text)
        self.assertEqual(len(self.kept(other)), 1)  # twice is once
        self.shows(other, *shown)
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
        self.shows(other, *shown)
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
            expect(page.locator("#toast")).to_contain_text(why)
            expect(page.locator("#toast")).to_contain_text("file.json")
        self.listed(page, 0)
        hostile = {"id": "__proto__", "title": "<img src=x onerror=alert(1)>", "nodes": [
            {**node, "id": "constructor", "content": "<script>window.bad = 1</script>", "stats": {"a": 1},
             "files": [{"name": 5, "text": "t"}]}], "chosen": [["", "constructor"], 3]}
        self.load(page, "file.json", wrap([hostile]))
        self.listed(page, 1)
        self.shows(page, "<script>window.bad = 1</script>")
        self.assertIsNone(page.evaluate("window.bad ?? null"))
        self.assertEqual(self.problems, [])
