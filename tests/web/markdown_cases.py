"""Markdown on the page: compared with another parser, and with hostile input."""
import xml.dom.minidom

import commonmark

from web_rig import ChatCase, expect

# CommonMark without what the page changes on purpose: HTML, pictures, links that are not to the web, and
# \( and \[, which begin maths.
DOCUMENTS = [
    "# One\n\nText with *emphasis*, **strong _both_** and `code *x*`.\n\nTwo\n===\n\n### Three ###",
    "- a\n- b\n  - c\n\n    second paragraph\n- d\n\n1. one\n2. two\n\n7) seven",
    "> quote\n> more\n>\n> - list\n>\n> > deeper\n\nlazy\n***\nend",
    "[link](https://example.org/a?b=c&d \"title\") and [ref][r] and <https://example.org/x>\n\n[r]: http://a.example/",
    "```python\nprint('*x*')\n```\n\n    indented <b>\n\n~~~\ntildes\n~~~\nend\\\nbreak  \nsecond",
    "\\*not\\* \\# \\_x\\_ &amp; &copy; a*b*c __init__ 2 * 3 * 4 snake_case_word",
    "a\n- b\n+ c\n\n* * *\n\n- - x\n\n10. ten\n    11. no",
    "*a **b* c** ***d*** `` ` `` **e*f*g** _h_i",
]
RENAMED = {"h1": "h3", "h2": "h4", "h3": "h5", "h4": "h6", "h5": "h6", "h6": "h6"}


def merged(nodes):
    """Adjacent texts as one, white space and line breaks as one space: the page shows a single line break."""
    out = []
    for node in nodes:
        if isinstance(node, str):
            if out and isinstance(out[-1], str):
                node = out.pop() + node
            out.append(node)
        else:
            out.append([node[0], node[1], merged(node[2])])
    return [" ".join(n.split()) if isinstance(n, str) else n for n in out if not isinstance(n, str) or n.strip()]


def outline(node):
    """[tag, address, what is inside] per element, and texts."""
    out = []
    for child in node.childNodes:
        if child.nodeType == child.TEXT_NODE:
            out.append(child.data)
        elif child.nodeName == "br":
            out.append(" ")
        else:
            out.append([RENAMED.get(child.nodeName, child.nodeName), child.getAttribute("href"), outline(child)])
    return out


def expected(text):
    return merged(outline(xml.dom.minidom.parseString(f"<x>{commonmark.commonmark(text)}</x>").documentElement))


# The page's outline in the same form; the frame around code is looked through.
SHOWN = """root => { const walk = (node) => [...node.childNodes].flatMap((c) => {
    if (c.nodeType === 3) return [c.data];
    if (c.nodeName === 'BR') return [' '];
    if (c.className === 'codehead') return [];
    if (c.className === 'codeblock') return walk(c);
    if (c.nodeName === 'CODE') return [['code', '', [c.textContent]]];
    return [[c.localName, c.getAttribute('href') ?? '', walk(c)]];
  });
  return walk(root); }"""


class Markdown(ChatCase):
    def show(self, page, text, done=True):
        self.script(page, text)
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".message")).to_have_count(0)
        self.ask(page, "Show")
        if done:
            self.answered(page, 1)
        return page.locator(".assistant .body")

    def test_renders_what_another_parser_renders(self):
        page = self.open()
        for document in DOCUMENTS:
            body = self.show(page, document)
            self.assertEqual(merged(body.evaluate(SHOWN)), expected(document), document)
        self.assertEqual(self.problems, [])

    def test_tables_code_and_maths(self):
        page = self.open()
        text = ("| a | b |\n|:--|--:|\n| 1 | ~~2~~ |\n\n```python\ndef f(x):\n    return '<b>' + \"&amp;\"\n```\n\n"
                "Inline $x_i^2$ and \\(\\alpha\\), not $5 and $10.\n\n$$\n\\frac{a}{b}\n$$\n\n\\[ \\sum_{i} i \\]\n\n"
                "Bad $\\frac{$ and $\\def\\a{\\a\\a}\\a$ end")
        body = self.show(page, text)
        page.wait_for_selector(".hljs-keyword")
        page.wait_for_selector("math")
        expect(page.locator(".assistant th")).to_have_text(["a", "b"])
        expect(page.locator(".assistant td s")).to_have_text("2")
        expect(page.locator(".assistant td").nth(1)).to_have_css("text-align", "right")
        self.assertEqual(page.locator(".assistant pre").inner_text(), "def f(x):\n    return '<b>' + \"&amp;\"")
        expect(page.locator(".codehead span")).to_have_text("python")
        expect(page.locator(".assistant math")).to_have_count(4)
        expect(page.locator(".assistant math[display=block]")).to_have_count(2)
        expect(page.locator(".assistant mfrac")).to_have_count(1)
        expect(body).to_contain_text("not $5 and $10.")
        expect(body).to_contain_text(r"\def\a{\a\a}\a")
        self.assertGreater(self.box(page.locator(".assistant math").first)["height"], 5)
        self.keep(page, "markdown")
        self.assertEqual(self.problems, [])

    def test_a_stream_ends_as_the_whole(self):
        page = self.open()
        text = "# Title\n\n* one\n* two `x`\n\n```js\nlet a = 1;\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n[l][r] $x$\n\n[r]: https://a.example/"
        self.show(page, text)
        page.wait_for_selector("math")
        page.wait_for_selector(".hljs-keyword")
        whole = page.locator(".assistant .body").inner_html()
        page.evaluate("""() => { const real = fetch; window.fetch = async (path, o) => { const r = await real(path, o);
            if (!String(path).includes('completions')) return r;
            const all = new Uint8Array(await r.arrayBuffer()); let at = 0;
            return new Response(new ReadableStream({ async pull(c) { await new Promise((d) => setTimeout(d, 15));
              if (at >= all.length) return c.close(); c.enqueue(all.slice(at, at + 170)); at += 170; } })); }; }""")
        self.script(page, [text[i:i + 3] for i in range(0, len(text), 3)])
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".message")).to_have_count(0)
        self.ask(page, "Show")
        page.wait_for_selector(".streaming h3")
        self.answered(page, 1)
        self.eventually(page, lambda: self.assertEqual(page.locator(".assistant .body").inner_html(), whole))
        self.assertEqual(self.problems, [])

    def test_hostile_text_executes_nothing(self):
        page = self.open()
        page.evaluate("window.bad = 0; window.alert = () => { window.bad++; }; 0")
        hostile = ["<script>bad++</script>", "<img src=x onerror=bad++>", "<svg/onload=bad++>", "<iframe srcdoc='<script>parent.bad++</script>'>",
                   "[a](javascript:bad++)", "[b](JaVaScRiPt&#58;bad++)", "[c](data:text/html,<script>parent.bad++</script>)",
                   "[d](vbscript:x)", "[e](\tjavascript:bad++)", "[f](https://a.example/\" onclick=\"bad++)", "<javascript:bad++>",
                   "![p](https://a.example/p.png)", "![q](javascript:bad++)", "![r](data:image/svg+xml,<svg onload=bad++>)",
                   "[g]: javascript:bad++\n\n[g]", "`<b onclick=bad++>`", "```\"><script>bad++</script>\n<img src=x onerror=bad++>\n```",
                   "```html\n<script>bad++</script>\n```", "| <script>bad++</script> |\n|---|\n| <img src=x onerror=bad++> |",
                   r"$\href{javascript:bad++}{x}$ $\htmlData{onclick=bad++}{x}$ $\includegraphics{https://a.example/x}$ $\url{javascript:bad++}$",
                   "$<img src=x onerror=bad++>$", "<a href='javascript:bad++'>x</a>", "[h](file:///etc/passwd)", "[i](//a.example/x)"]
        body = self.show(page, "\n\n".join(hostile))
        page.wait_for_selector("math")
        page.wait_for_timeout(300)
        for link in page.locator(".assistant .body a").all():
            self.assertRegex(link.get_attribute("href"), r"^(https?://|mailto:)")
            self.assertIn("noopener", link.get_attribute("rel"))
        tags = set(body.evaluate("e => [...e.querySelectorAll('*')].map(c => c.localName)"))
        self.assertEqual(tags & {"script", "img", "iframe", "svg", "object", "embed", "form", "input", "style", "link"},
                         {"svg"} & tags)  # the icon of the copy button
        self.assertEqual(body.evaluate("""e => [...e.querySelectorAll('*')].flatMap(c => [...c.attributes])
            .filter(a => /^on|^style$|^src/.test(a.name)).length"""), 0)
        page.locator(".assistant .body").click(position={"x": 5, "y": 5})
        self.assertEqual(page.evaluate("window.bad"), 0)
        self.assertEqual(self.problems, [])

    def test_hostile_text_does_not_hang(self):
        page = self.open()
        size = 120_000
        fill = lambda piece: piece * (size // len(piece))
        cases = [fill(">"), fill("- ") + "x", fill("[a]("), fill("**a*b_"), fill("<"), fill("---\n"), fill("\\[a\n"), fill("`a"),
                 "|" + fill("a|")[:40_000] + "\n|" + "-|" * 20_000 + "\n" + "x\n" * 20_000,
                 "| a | b |\n|---|---|\n" + "| x | y |\n" * 12_000,
                 "```cpp\n" + fill("a ") + "\n```", "$" + "{" * 3000 + "}" * 3000 + "$", "$" + r"\sqrt" * 1500 + "$",
                 "\n".join(" " * i + "- x" for i in range(0, 400, 2))]
        chrome = page.context.new_cdp_session(page)
        chrome.send("Performance.enable", {"timeDomain": "threadTicks"})

        def cpu_seconds():  # of the page's thread; others may keep the machine busy
            metrics = chrome.send("Performance.getMetrics")["metrics"]
            return next(m["value"] for m in metrics if m["name"] == "ThreadTime")
        for case in cases:
            begin = cpu_seconds()
            body = self.show(page, case + "\n\nThe end.")
            self.assertLess(cpu_seconds() - begin, 20, case[:20])
            expect(body, case[:20]).to_contain_text("The end.")
        self.assertEqual(self.problems, [])

    def test_questions_stay_text(self):
        page = self.open()
        self.script(page, "a ``b`` `c<b>`")
        self.ask(page, "<img src=x onerror=alert(1)> **x**")
        self.answered(page, 1)
        expect(page.locator(".user .body")).to_have_text("<img src=x onerror=alert(1)> **x**")
        expect(page.locator(".assistant p code")).to_have_text(["b", "c<b>"])
