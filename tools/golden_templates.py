#!/usr/bin/env python3
"""Writes golden_generation.json and golden_features.json with jinja2, set up as transformers does.

usage: golden_templates.py OUT      (in tests/data/templates; needs jinja2 3.1)

OUT is the unpacked tests/data/templates.tar.xz. Its golden.json, for all templates without
{% generation %}, was made in the same way.
"""
import copy, glob, itertools, json, sys
from datetime import datetime

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

OUT = sys.argv[1]


class Generation(jinja2.ext.Extension):
    """Renders its body, like a call block of a function that gives the text back."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    e = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                      extensions=[Generation, jinja2.ext.loopcontrols])
    e.filters["tojson"] = tojson
    e.globals["raise_exception"] = raise_exception
    e.globals["strftime_now"] = lambda f: datetime(2024, 7, 26, 12, 30).strftime(f)
    return e


def render(source, context):
    try:
        return {"output": environment().from_string(source).render(**context)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:120]}"}


def generation():
    golden = json.load(open(f"{OUT}/golden.json", encoding="utf8"))
    out = {k: v for k, v in golden.items() if k != "expected"}
    out["expected"] = {}
    for path in sorted(glob.glob("*.jinja")):
        if "compile_error" not in golden["expected"][path]:
            continue
        source = open(path, encoding="utf8").read()
        fixed = dict(add_generation_prompt=True, bos_token=golden["bos_token"], eos_token=golden["eos_token"])
        out["expected"][path] = {k: render(source, {**fixed, **c}) for k, c in golden["cases"].items()}
    return out


CONTEXT = dict(
    n=None, t=True, f=False, i=7, neg=-7, zero=0, big=9007199254740993, x=2.5, y=-0.1, whole=3.0, tiny=1e-7, huge=1e22,
    s="Hello, World", e="", u="naïve Ünïcödé 🙂 ß", w="  two  words \n", ml="one\ntwo\n\nfour\n", h="<a href='x'>&\"q\"</a>",
    l=[3, 1, 2], m=[1, "a", None, True, 2.5, [1], {"k": "v"}], ls=["b", "A", "c", "B"], el=[],
    d={"b": 1, "a": 2, "C": 3}, ed={}, nested={"a": {"b": [10, {"c": "deep"}]}, "items": "shadow", "get": 1},
    rows=[{"n": "x", "v": 3, "g": "p"}, {"n": "y", "v": 1, "g": "q"}, {"n": "Z", "v": 2, "g": "P"}, {"n": "w", "v": 1}],
    messages=[{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}])

VALUES = ["n", "t", "f", "i", "neg", "zero", "x", "y", "whole", "s", "e", "u", "l", "el", "d", "ed", "missing", "m"]


def expressions():
    for a, b in itertools.product(["7", "-7", "2", "0", "2.5", "-0.5", "true", "'ab'", "[1]", "none", "missing"], repeat=2):
        for op in ["+", "-", "*", "/", "//", "%"]:
            yield f"{a} {op} {b}"
    for a, b in itertools.product(["7", "0", "2.5", "true"], ["0", "2", "3", "-1", "0.5"]):
        yield f"{a} ** {b}"
    for a, b in itertools.product(["1", "1.0", "true", "'1'", "'a'", "[1]", "[1, 2]", "(1,)", "none", "missing", "{'a': 1}"], repeat=2):
        for op in ["==", "<", ">="]:
            yield f"{a} {op} {b}"
    yield from ["1 < 2 < 3", "1 < 3 < 2", "1 == 1.0 == true", "not 1 == 2", "1 in [1] and 2 not in [1]", "'a' in 'cat'",
                "'x' not in 'cat'", "'b' in d", "1 in missing", "1 in 5", "1 in 'a'", "3 in range(5)", "not not 1",
                "2 ** 3 ** 2", "-2 ** 3", "-2 ** -1", "-2 ** 2", "- 3 | abs", "-x|round", "1 + 2 * 3 - 4 / 2", "(1 + 2) * 3", "10 // 3 % 2",
                "'a' ~ 1 ~ none ~ 2.0 ~ true", "'a' 'b' \"c\"", "1 if true else 2", "1 if false", "1 if false else 2 if false else 3",
                "1 or 2", "0 or ''", "1 and 0", "none and 1", "true and 'x'", "[] or {} or 'z'", "1_000 + 0x1F + 0b11 + 0o17",
                "1e3", "1.5e-3", "1E5", "0.1 + 0.2", "1e16", "1e15", "123456789.125", "1/3", "2.0 ** 0.5", "7 // 2.0", "-7 // 2",
                "-7 % 3", "7 % -3", "-7.5 % 2", "7.5 // -2", "5 % 2.5", "1e308 * 10", "true + true", "[1] + [2]", "(1,) + (2,)",
                "[1] + (2,)", "[0] * 3", "3 * 'ab'", "'ab' * -1", "'a' + 1", "1 + 'a'", "+true", "-true", "+x", "-'a'",
                "()", "(1,)", "(1, 2)", "[1, [2, (3,)], {'a': none}]", "{1: 2, 'a': [true], 2.5: 'x'}", "{'a': 1, 'b': 2, 'a': 3}",
                "{[1]: 2}", "{1: 'a', 1.0: 'b', true: 'c'}", "[1, 2,]", "{'a': 1,}", "m", "d", "nested", "w", "[w]", "[u]", "[h]",
                "[\"it's\"]", "['say \"hi\"']", "[\"it's \\\"x\\\"\"]", "['\\t\\n\\\\\\r\\x00\\x7f\\xa0\\u200b']", "'\\u00e9\\u4f60'",
                "'\\a\\b\\f\\v' == '\\x07\\x08\\x0c\\x0b'", "'\\101\\60'", "'\\q'", "'\\u00e9\\U0001F600'", "'\\x4'", "'a\\\nb'",
                "nested.a.b[1].c", "nested['a']['b'][0]", "nested.items", "nested['items']", "nested.get('items')", "d.a", "d['zz']",
                "d.zz", "d.zz.y", "d.zz|default('q')", "missing.x", "missing[0]", "missing()", "none.x", "none.x.y", "l[0]", "l[-1]",
                "l[5]", "l[5].x", "l.0", "l['0']", "s[0]", "s[-1]", "s[99]", "u[2]", "u[-3]", "u[-1]", "(1,2)[1]", "range(5)[2]",
                "m[6].k", "m[6]['k']", "s.nope", "s.upper", "d.keys", "l[1.0]", "l[true]", "l[none]", "d[none]", "d[[1]]",
                "x is defined", "missing is defined", "d.zz is defined", "nested.a.zz is not defined",
                "(1 if false) is defined", "missing == missing2", "missing ~ 'x'", "missing|string", "[missing]", "missing|list",
                "missing|length", "missing|upper", "missing|int", "missing|float", "missing|join", "missing|tojson", "missing|first",
                "missing|last", "missing + 1", "missing < 1", "missing and 1", "not missing", "-missing", "missing is string",
                "missing is iterable", "missing is sequence", "missing is none", "dict(a=1, b=2)", "dict([('a', 1)])", "dict(d, z=9)",
                "range(3)", "range(1, 10, 3)|list", "range(5, 0, -2)|list", "range(0)|list", "range(3)|sum", "range(3, step=2)",
                "range('a')", "strftime_now('%Y-%m-%d %H:%M:%S %A %d %B %j %%')", "strftime_now('%b %-d')", "strftime_now('')",
                "raise_exception('stop')", "namespace(a=1).a", "namespace({'b': 2}).b", "namespace(a=1).b", "namespace(a=[1], b='x')",
                "cycler('a', 'b').next()", "cycler()", "joiner('|')() ~ 'x'", "joiner is callable", "range is callable", "5 is callable",
                "[1,2,3] is sequence", "d is sequence", "s is sequence", "d.items() is sequence", "d.items() is iterable",
                "d.items()", "d.keys()|list", "d.values()|list", "d.items()|list", "d|items|list", "l|items", "d.items()|length",
                "d|list", "s|list|length", "u|list", "x.is_integer", "1 is divisibleby 2", "4 is divisibleby(2)", "3 is odd",
                "3 is even", "-3 is odd", "2.0 is even", "'a' is odd", "1 is eq 1", "1 is equalto(2)", "3 is gt 2", "3 is lessthan 2",
                "3 is ge 3", "3 is le(2)", "3 is ne 3", "1 is in [1, 2]", "'a' is in 'abc'", "1 is sameas 1", "none is sameas none",
                "'abc' is lower", "'Abc' is lower", "'ABC' is upper", "'1' is upper", "s is not string", "'x' is filter",
                "'upper' is filter", "'odd' is test", "'q' is test", "h|e is escaped", "1 is not odd", "1 is foo", "1|foo",
                "s is string and l is iterable", "s is string or missing.x", "3 is number and t is number", "x is float",
                "i is integer", "t is integer", "t is boolean", "t is true", "f is false", "1 is true", "d is mapping",
                "messages|selectattr('role', 'equalto', 'user')|list", "messages|map(attribute='role')|join(', ')",
                "messages|rejectattr('role', 'in', ['user', 'system'])|map(attribute='content')|list",
                "rows|selectattr('g')|list|length", "rows|rejectattr('g')|list|length", "rows|selectattr('g', 'defined')|list|length",
                "rows|map(attribute='g', default='-')|list", "rows|map(attribute='g')|list", "rows|sum(attribute='v')",
                "rows|sort(attribute='v')|map(attribute='n')|join", "rows|sort(attribute='n')|map(attribute='n')|join",
                "rows|sort(attribute='v,n', reverse=true)|map(attribute='n')|join", "rows|groupby('v')|map('first')|list",
                "rows|groupby('g', default='none')|list", "rows|unique(attribute='v')|map(attribute='n')|join",
                "rows|min(attribute='v')", "rows|max(attribute='v')|attr('n')", "(rows|groupby('v'))[0].grouper",
                "(rows|groupby('v'))[0].list|length", "nested|attr('a')", "s|attr('nope')",
                "l|map('string')|list", "ls|map('lower')|join('-')", "l|map('multiply')|list", "l|select('odd')|list",
                "l|reject('gt', 1)|list", "l|select|list", "[0, 1, '', none]|select|list", "[0, 1, '']|reject|list",
                "l|map|list", "l|map(attribute='x')|list", "['a', 'bb']|map('length')|list", "['a,b']|map('split', ',')|list",
                "l|select('foo')|list", "el|select('foo')|list", "l|map('round', precision=1)|list",
                "'%s and %d' % ('a', 3)", "'%5.1f|%-6s|%06d|%x|%X|%o|%e|%g|%%' % (3.14159, 'ab', 42, 255, 255, 8, 12345.678, 0.0001)",
                "'%(a)s-%(b)d' % {'a': 1, 'b': 2}", "'%s' % missing", "'%s' % [1, 2]", "'%s' % d", "'%d' % 'a'", "'%s %s' % 'a'",
                "'%s' % ('a', 'b')", "'%c%c' % (65, 'b')", "'%+d % d' % (3, 4)", "'%*d' % (5, 3)", "'%r' % 'a'", "'%.2s' % 'abc'",
                "'%s, %s!'|format('a', 'b')", "'%(x)s'|format(x=1)", "'%y' % 1", "'%#x %#o' % (255, 8)", "'%5s|%-5s|' % (true, none)",
                "'{} {}'.format(1, 'a')", "'{1} {0}'.format(1, 2)", "'{a} {b.c}'.format(a=1, b={'c': 2})", "'{0[a]} {1[0]}'.format({'a': 1}, [2])",
                "'{:>5}|{:<5}|{:^5}|{:*^7}'.format('a', 'b', 'c', 'd')", "'{:05d} {:+d} {:,} {:_}'.format(42, 7, 1234567, 1234567)",
                "'{:.2f} {:10.3e} {:g} {:%}'.format(3.14159, 12345.678, 0.00001, 0.25)", "'{:x} {:#x} {:b} {:o} {:c}'.format(255, 255, 5, 8, 65)",
                "'{!r} {!s}'.format('a', 'b')", "'{{}} {}'.format(1)", "'{}'.format()", "'{a}'.format(1)", "'{'.format(1)", "'}'.format(1)",
                "'{:d}'.format('a')", "'{:s}'.format(1)", "'{:{}}|'.format('a', 5)", "'{:.3}'.format('abcdef')", "'{:.3}'.format(2.0)",
                "'{} {}'.format(none, true)", "'{:5}|{:<5}|'.format(true, 1)", "'{:=+6d}'.format(5)", "'{}'.format([1, 'a'])",
                "h|e", "h|safe", "h|e|safe", "h|forceescape", "h|e + h", "h + (h|e)", "(h|safe) ~ h", "h|safe|upper + '<'",
                "(h|e)|replace('&', '<')", "(h|e)|length", "('<b>'|safe) % '<'", "('<b>%s'|safe) % '<'", "('{}'|safe).format('<')",
                "['<', '>'|safe]|join('&')", "('&'|safe).join(['<', '>'])", "[h|safe]", "h|tojson", "h|tojson|safe + '<'", "'<'|e is escaped",
                "('a<b'|safe).split('<')", "('a'|safe)[0] + '<'", "('a'|safe) * 2 + '<'", "h|urlencode", "d|urlencode", "'a b/c?é'|urlencode",
                "{'a b': 'c&d', 'e': 1}|urlencode", "5|urlencode"]
    for a in ["0", "1", "-2", "9", ""]:
        for b in ["0", "2", "-1", "99", ""]:
            for c in ["", ":2", ":-1"]:
                yield f"'abcdé'[{a}:{b}{c}]"
                if not c:
                    yield f"[1, 2, 3, 4][{a}:{b}]"
    yield from ["l[::-1]", "l[::0]", "(1, 2, 3)[1:]", "l['a':]", "d[1:]", "u[3:9]", "u[::-1]", "l[:none]"]
    for method in ["upper()", "lower()", "capitalize()", "title()", "swapcase()", "casefold()", "strip()", "lstrip()", "rstrip()", "strip(' \\n')",
                   "strip('Hdß')", "split()", "split(' ')", "split(none, 1)", "split(' ', 1)", "split(maxsplit=1)", "rsplit()", "rsplit(' ', 1)",
                   "rsplit(none, 1)", "splitlines()", "splitlines(true)", "startswith('H')", "startswith(('x', ' '))", "endswith('d')",
                   "endswith('\\n')", "startswith('W', 7)", "endswith('o', 0, 5)", "find('o')", "find('o', 5)", "find('zz')", "rfind('o')",
                   "index('o')", "count('o')", "count('')", "count(' ')", "replace('o', '0')", "replace('o', '0', 1)", "replace('', '-')",
                   "replace('', '-', 2)", "replace(' ', '')", "partition(' ')", "rpartition(' ')", "partition('zz')", "rpartition('zz')",
                   "center(21, '*')", "center(22)", "ljust(15, '.')|length", "rjust(15)", "zfill(15)", "isupper()", "islower()", "isalpha()",
                   "isdigit()", "isalnum()", "isspace()", "istitle()", "isascii()", "removeprefix('Hello')", "removesuffix('World')",
                   "join(['a', 'b'])", "join([1])", "expandtabs()", "encode", "isidentifier()", "format(1)", "__class__", "nope()"]:
        for v in ["s", "e", "u", "w", "ml"]:
            yield f"{v}.{method}"
    yield from ["'a\\tb\\n\\tc'.expandtabs(4)", "'+5'.zfill(4)", "'-'.zfill(3)", "'a.b.c'.rsplit('.', 1)", "'aXbXc'.rsplit('X')", "'aaa'.split('aa')",
                "'aaa'.rsplit('aa', 1)", "',a,'.split(',')", "'x'.split('')", "'a  b '.split(' ')", "'abc'.strip(1)", "'abc'.startswith(1)",
                "'ab'.center(5)", "'abc'.center(6)", "'abc'.center(4, 'xy')", "'ABC def'.title()", "\"they're\".title()", "'1a'.title()",
                "d.get('a')", "d.get('q')", "d.get('q', 5)", "d.get()", "d.pop('a')", "d.update({})", "d.setdefault('a', 1)", "d.clear()", "d.copy()",
                "l.append(1)", "l.pop()", "l.sort()", "l.reverse()", "l.extend([1])", "l.insert(0, 1)", "l.remove(1)", "l.index(1)", "l.index(9)",
                "l.count(1)", "(1, 1).count(1)", "l.copy()", "s.__len__()", "''.__class__.__mro__", "d.__class__", "d._x", "d['__class__']"]
    for f in ["upper", "lower", "title", "capitalize", "trim", "length", "count", "string", "list", "first", "last", "reverse|list", "reverse",
              "sort", "unique|list", "min", "max", "sum", "join", "join('-')", "int", "float", "abs", "round", "tojson", "default('D')", "d('D', true)",
              "dictsort", "items|list", "wordcount", "escape", "batch(2)|list", "slice(2)|list", "select|list", "replace('a', 'b')", "indent",
              "truncate(5)", "center(9)", "format", "safe", "filesizeformat", "map('string')|list", "tojson(indent=2)"]:
        for v in VALUES:
            yield f"{v}|{f}"
    yield from ["'42'|int", "' 42 '|int", "'4_2'|int", "'4__2'|int", "'0x1F'|int", "'0x1F'|int(base=16)", "'1F'|int(0, 16)", "'z'|int(-1)", "'42.9'|int",
                "'-3.9'|int", "'1e3'|int", "'inf'|int", "'nan'|int(5)", "''|int", "'0b11'|int(0, 2)", "'077'|int(0, 0)", "3.99|int", "-3.99|int", "none|int",
                "[]|int(7)", "'3.5'|float", "'x'|float", "'x'|float(2.5)", "' 1e5 '|float", "'inf'|float", "'-inf'|float", "'nan'|float", "true|float", "5|float",
                "2.5|round", "3.5|round", "-2.5|round", "2.675|round(2)", "1234.5678|round(-2)", "1234|round(-2)", "1250|round(-2)", "1350|round(-2)",
                "42.55|round(1, 'floor')", "42.55|round(1, 'ceil')", "42.1|round(method='ceil')", "5|round", "5|round(2)", "'a'|round", "2.5|round(1, 'x')",
                "1e20|round", "0.5|round", "1.5|round", "0.05|round(1)", "-5|abs", "-2.5|abs", "'a'|abs", "true|abs",
                "ls|sort", "ls|sort(true)", "ls|sort(case_sensitive=true)", "ls|unique|list", "ls|unique(true)|list", "ls|min", "ls|max", "ls|max(true)",
                "[1, 'a']|sort", "[3, 1.5, true]|sort", "[[2, 1], [1, 5]]|sort", "d|dictsort(true)", "d|dictsort(by='value')", "d|dictsort(reverse=true)",
                "d|dictsort(by='x')", "{'b': 1, 'A': 2, 'a': 3}|dictsort", "l|join(1)", "l|join(', ', attribute='x')", "rows|join(',', attribute='n')", "s|join('.')",
                "ml|indent", "ml|indent(2)", "ml|indent(2, true)", "ml|indent(2, true, true)", "ml|indent('> ')", "ml|indent(width=1, blank=true)", "'a\\r\\nb'|indent",
                "l|batch(2, 'x')|list", "range(7)|batch(3)|map('list')|list", "range(7)|slice(3)|list", "range(7)|slice(3, 'x')|list", "range(2)|slice(4, 'x')|list",
                "l|slice(0)|list", "s|truncate(8)", "s|truncate(8, true)", "s|truncate(8, true, '!')", "s|truncate(8, leeway=0)", "s|truncate(2)", "s|truncate(12)",
                "s|truncate(5, leeway=0)", "s|truncate(9, false, '', 0)", "'foo bar baz qux'|truncate(9)", "'foo bar baz qux'|truncate(11, false, '...', 0)",
                "'  x '|trim", "'xxaxx'|trim('x')", "5|trim", "s|replace('l', 'L')", "s|replace('l', 'L', 2)", "5|replace(5, 6)", "s|replace('l')", "s|center(20)", "s|center",
                "'hello-world (foo)[bar] it\\'s'|title", "'ÉCOLE été'|title", "'hELLO wORLD'|capitalize", "'ßa'|capitalize", "'straße'|upper", "'İ'|lower",
                "'a b\\tc\\nd'|wordcount", "u|wordcount", "1|filesizeformat", "999|filesizeformat", "1000|filesizeformat", "1500000|filesizeformat",
                "1024|filesizeformat(true)", "123456789|filesizeformat(true)", "1e30|filesizeformat", "0|filesizeformat",
                "m|tojson", "nested|tojson", "nested|tojson(indent=2)", "nested|tojson(indent=0)", "m|tojson(indent='--')", "el|tojson(indent=2)", "ed|tojson(indent=2)",
                "d|tojson(sort_keys=true)", "d|tojson(separators=(',', ':'))", "d|tojson(indent=1, separators=(',', ':'))", "u|tojson", "u|tojson(ensure_ascii=true)",
                "u|tojson(true)", "(1, 2)|tojson", "{1: 2, none: 3, true: 4, 1.5: 5}|tojson", "{(1, 2): 3}|tojson", "l|map('string')|tojson", "range(3)|tojson",
                "range|tojson", "big|tojson", "[tiny, huge, whole, x, 1e5, 1e16]|tojson", "'\\x00\\x1f\\x7f\\u2028'|tojson", "[1, [2, [3, {}]], {'a': []}]|tojson(indent=4)",
                "namespace(a=1)|tojson", "d.items()|tojson", "d|tojson(foo=1)", "[missing]|tojson", "1e400|tojson", "tiny", "huge", "big", "whole",
                "l|first", "el|first", "''|first", "d|first", "l|map('string')|last", "u|first", "u|last", "u|reverse", "d|reverse|list", "5|reverse", "l|map('string')|reverse|list",
                "l|map('string')|length", "l|map('string')|list|length", "5|length", "5|list", "5|first", "none|list", "none|length", "x|join", "l|sum(start=10)", "ls|sum", "[[1], [2]]|sum(start=[])",
                "[1.5, 2]|sum", "l|min", "d|max", "1|default(2)", "none|default(2)", "none|default(2, true)", "''|default('x', boolean=true)", "missing.a|default(1)",
                "l|default(1, 2, 3, 4)", "l|length(1)", "s|upper(1)", "s|trim(x=1)", "s[0] is upper"]
    yield from rare_expressions()


def rare_expressions():
    """Big integers, special cases of letters, and filters that few templates use."""
    big = ["99999999999999999999", "-99999999999999999999", "9223372036854775807", "-9223372036854775808", "10 ** 30"]
    for a, b in itertools.product(big, big + ["7", "-1", "0", "2.5", "'a'", "none"]):
        for op in ["+", "-", "*", "//", "%", "/", "==", "<", ">="]:
            yield f"({a}) {op} ({b})"
    for v in big:
        for f in ["abs", "int", "float", "round", "round(-3)", "string", "tojson", "pprint", "filesizeformat", "length", "default(1)"]:
            yield f"({v})|{f}"
        for f in ["%d", "%x", "%X", "%o", "%s", "%e", "%030d", "%.2f", "%+d", "%c"]:
            yield f"'{f}' % ({v})"
        for f in ["", ",", "_", "x", "#x", "b", "e", ".3f", ">40", "+d", "040d", "c", "s"]:
            yield f"'{{:{f}}}'.format({v})"
        yield from [f"-({v})", f"+({v})", f"({v}) is odd", f"({v}) is even", f"({v}) is divisibleby 3", f"({v}) is number", f"({v}) is integer",
                    f"({v}) is float", f"[{v}, 1]|sum", f"[{v}, 1, 2.5]|sort", f"[{v}, 1]|max", f"{{({v}): 1}}[{v}]", f"({v}) in [{v}]", f"'a' * ({v})", f"l[{v}]"]
    yield from ["2 ** 64", "2 ** 63", "(-2) ** 63", "-(2 ** 63)", "2 ** 200 // 3 ** 50", "-(2 ** 200) % 12345678901234567891", "3 ** 100 % 2 ** 70", "2 ** 64 - 2 ** 64",
                "10 ** 20 - 10 ** 20 + 5", "2.0 ** 64 == 2 ** 64", "2 ** 53 + 1 == 2.0 ** 53", "9007199254740993 == 9007199254740992.0", "2 ** 64 > 1e19", "2 ** 64 < 1e20",
                "2 ** 1000 < 1e308", "2 ** 2000 * 1.5", "2 ** 2000 / 2 ** 1999", "10 ** 400 / 3", "0x10000000000000000", "0b1" + "0" * 70, "0o7777777777777777777777777",
                "1_000_000_000_000_000_000_000", "'123456789012345678901234567890'|int", "'-0x1ffffffffffffffffffff'|int(base=16)", "1e25|int", "-1e19|int",
                "9223372036854775807 + 1", "-9223372036854775808 - 1", "-9223372036854775808 // -1", "-9223372036854775808 % -1", "4611686018427387904 * 2", "-9223372036854775808|abs",
                "12345678901234567890123|round(-5)", "12345678901234550000000|round(-5)", "'%d' % 1e25", "[10 ** 20]|tojson", "{10 ** 20: 1}|tojson", "10 ** 20 ~ 'x'"]
    for text in ["\ufb01 \ufb03x \ufb06", "stra\u00dfe \u00df", "\u0149a \u01f0b", "\u1e96 \u1e9a", "\u0390 \u03b0", "\u1f80 \u1fb2 \u1fb7 \u1ff3", "\u0587 \ufb13", "\u01c6 \u01c4",
                 "\u0130 I\u0307", "\u039f\u0394\u039f\u03a3 \u03a3\u0391\u03a3.", "\u03a3", "A\u03a3\u0301 B", "\u1e9e\u03c2", "\u13a0\uab70", "\u1fbe\u0345"]:
        for method in ["upper", "lower", "title", "capitalize", "swapcase", "casefold"]:
            yield f"'{text}'.{method}()"
        yield from [f"'{text}'|title", f"'{text}'|capitalize"]
    yield from [f"strftime_now('{f}')" for f in ["%f", "%z", "%Z", "%f|%z|%Z", "%%f %%z", "%A %d %B %Y, %H:%M:%S.%f %Z", "%I:%M %p", "%y %U %W %w %u %G %V", "%c", "%x", "%X", "%D %F %T %R %r",
                                                 "%e %k %l", "%-d/%-m", "%h %n%t", "%C", "100%", "%"]]
    prose = "'The quick-brown fox -- really--jumped over the well-known lazy-dog, e.g. twenty-five times; and supercalifragilisticexpialidocious it was.'"
    for width in ["3", "10", "20", "40", "79"]:
        yield from [f"{prose}|wordwrap({width})", f"{prose}|wordwrap({width}, false)", f"{prose}|wordwrap({width}, true, '|')",
                    f"{prose}|wordwrap({width}, break_on_hyphens=false)", f"{prose}|wordwrap({width}, false, '|', false)"]
    yield from ["'a b c'|wordwrap(3)", "ml|wordwrap(2)", "w|wordwrap(4)", "''|wordwrap", "'  a   b  '|wordwrap(3)", "'a\tb c'|wordwrap(3)", "'aaa-bbb-ccc'|wordwrap(5)", "'---a'|wordwrap(2)",
                "'é-è-ü ñandú-öl'|wordwrap(4)", "s|wordwrap(0)", "s|wordwrap(-1)", "5|wordwrap", "'a\n\n b\n'|wordwrap(9)", "u|wordwrap(6)", "'1-2-3 a1-b2'|wordwrap(4)"]
    yield from ["'<b>x</b>'|striptags", "h|striptags", "'a <!-- <b> --> c'|striptags", "'<<b>i>x'|striptags", "'a < b'|striptags", "'a <!-- b'|striptags", "'&lt;b&gt; &amp;amp; &#65;&#x42;&nope;'|striptags",
                "'  a \n <br> b  '|striptags", "5|striptags", "'<!<!-- x -->-- y -->z'|striptags", "''|striptags"]
    yield from ["{'a': 1, 'b': none, 'c': missing, 'd': '<\"x\">'}|xmlattr", "{'a': 1}|xmlattr(false)", "{}|xmlattr", "{'a b': 1}|xmlattr", "{'a>': 1}|xmlattr", "{'a=': 1}|xmlattr", "{'a/': 1}|xmlattr",
                "'x'|xmlattr", "{'é<': 'ü'}|xmlattr", "{1: true}|xmlattr"]
    long = "['" + "', '".join(["word" * n for n in range(1, 9)]) + "']"
    yield from ["1|pprint", "s|pprint", "d|pprint", "m|pprint", "nested|pprint", "rows|pprint", "messages|pprint", f"{long}|pprint", f"{{'k': {long}, 'a': [{long}, 1]}}|pprint", f"({long}, 2)|pprint",
                f"({long},)|pprint", f"{prose}|pprint", f"[{prose}, 1]|pprint", f"{{'text': {prose} ~ '\n' ~ {prose}}}|pprint", "missing|pprint", "[]|pprint", "('x' * 100)|pprint", "('x y ' * 40)|pprint",
                "[true, none, 1.5, (1,)]|pprint", "range(3)|pprint", "{'b': 1, 'a': {'d': 1, 'c': 2}}|pprint"]
    yield from ["[7]|random", "''|random", "[]|random", "'x'|random", "5|random"]


STATEMENTS = [
    # whitespace control
    "a\n{% if true %}\nb\n{% endif %}\nc\n", "a\n  {% if true %}\n  b\n  {% endif %}\nc", "a {%- if true -%} b {%- endif -%} c", "a\n\n{%- if true %}\n\nb{% endif %}",
    "  {%+ if true %}x{% endif %}", "{% if true +%}\nx{% endif %}", "a  {# c #}\nb", "a\n  {# c #}\nb", "a {#- c -#} b", "{# multi\nline #}x\n", "x  {{- 1 -}}  y", "x {{ 1 }}\ny\n\n",
    "{{ 1 }}\n", "{{ 1 }}\n\n", "\n{{ 1 }}", "  {{ 1 }}", "  {{- 1 }}", "{% if true %}\n\n  x\n\n{% endif %}\n\ny", "a\r\nb\rc\n", "{% raw %}{{ x }}{% if %}{% endraw %}", "a\n  {% raw %}\n  x\n  {% endraw %}\nb",
    "a {%- raw -%} x {%- endraw -%} b", "{% raw %}{% endraw %}", "{% set x = 1 %}\n{{ x }}", "{%set x=1%}{{x}}", "{{'}}'}}", "{{ {'a': {'b': 1}}['a']['b'] }}", "{{{'a':1}}}", "{ {{ 1 }} }", "{%- set a = 1 -%}\n\n  {{ a }}",
    "{% for i in [1,2] %}\n  {{ i }}\n{% endfor %}\n", "{% for i in [1,2] -%}\n  {{ i }}\n{%- endfor %}\n", "\t{% if true %}x{% endif %}", "x\t{% if true %}y{% endif %}", "{% if true %}  {% if true %}x{% endif %}  {% endif %}",
    "{{ 'a\nb' }}", "{{\n1\n+\n2\n}}", "{% if true: %}x{% endif %}", "{##}x", "{#-#}x", "a{#--#} b", "x{{ '' }}", "x{%- set y = 1 %}\n z", "{{- 1 }}{{ 2 -}}\n", "\u2003{% if true %}x{% endif %}", "a\u00a0{%- if true %}x{% endif %}",
    # if, set, with
    "{% if f %}a{% elif zero %}b{% elif i %}c{% else %}d{% endif %}", "{% if n %}a{% endif %}", "{% if l, %}a{% endif %}", "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% set a, b = [1, 2, 3] %}", "{% set a, b = [1] %}", "{% set a = 1, 2 %}{{ a }}",
    "{% set (a, b) = (1, 2) %}{{ a + b }}", "{% set x %}a{{ i }}b{% endset %}[{{ x }}]", "{% set x | upper | replace('A', 'z') %}a{{ i }}{% endset %}{{ x }}", "{% set x %}{% set y = 1 %}{% endset %}{{ y is defined }}", "{% set x = x|default(5) %}{{ x }}",
    "{% set q = q|default(5) %}{{ q }}", "{% if missing is not defined %}{% set missing = 3 %}{% endif %}{{ missing }}", "{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a is defined }}", "{% with %}{% set a = 1 %}{% endwith %}{{ a is defined }}",
    "{% set a = 1 %}{% with a = 2, b = a %}{{ a }}{{ b }}{% endwith %}{{ a }}", "{% set ns = namespace(x=0) %}{% for i in l %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}", "{% set d.x = 1 %}", "{% set ns = namespace() %}{% set ns.a, ns.b = 1, 2 %}{{ ns.a ~ ns.b }}",
    "{% set missing.x = 1 %}", "{% set ns = namespace(a=1) %}{{ ns }}", "{% set ns = namespace(a=1) %}{{ ns.b }}|{{ ns['a'] }}", "{% set true = 1 %}", "{% set x.y.z = 1 %}", "{% set s = 'x' %}{{ s }}", "{% print 1, 2 %}", "{% filter upper %}a{{ i }}b{% endfilter %}",
    "{% filter replace('a', 'b')|upper %}xa{% endfilter %}", "{% block b %}x{{ i }}{% endblock %}", "{% block b %}x{% endblock b %}", "{% autoescape false %}{{ h }}{% endautoescape %}",
    # for
    "{% for i in l %}{{ i }}{% if not loop.last %},{% endif %}{% endfor %}", "{% for i in el %}a{% else %}b{% endfor %}", "{% for i in missing %}a{% else %}b{% endfor %}", "{% for i in none %}a{% endfor %}", "{% for i in 5 %}a{% endfor %}", "{% for c in u %}{{ c }}.{% endfor %}",
    "{% for k in d %}{{ k }}{% endfor %}", "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "{% for k, v in d|items %}{{ k }}={{ v }};{% endfor %}", "{% for k, v in d|dictsort %}{{ k }}={{ v }};{% endfor %}", "{% for a, b in [[1, 2], [3, 4]] %}{{ a + b }} {% endfor %}",
    "{% for a, (b, c) in [[1, [2, 3]]] %}{{ a }}{{ b }}{{ c }}{% endfor %}", "{% for a, b in [1] %}{% endfor %}", "{% for a, b in [[1, 2, 3]] %}{% endfor %}", "{% for i in l if i > 1 %}{{ loop.index }}/{{ loop.length }}:{{ i }} {% endfor %}", "{% for i in l if i > 9 %}x{% else %}none{% endfor %}",
    "{% for i in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.depth0 }} {% endfor %}",
    "{% for i in l %}{{ loop.previtem }}<{{ i }}>{{ loop.nextitem }} {% endfor %}", "{% for i in l %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }} {% endfor %}", "{% for i in l %}{{ loop.cycle('a', 'b') }}{% endfor %}", "{% for i in l %}{{ loop.cycle() }}{% endfor %}",
    "{% for i in [1, 1, 2, 2, 1] %}{{ loop.changed(i) }} {% endfor %}", "{% for i in [1, 1, 2] %}{{ loop.changed(i, 'x') }} {% endfor %}", "{% for i in l %}{{ loop.foo }}{% endfor %}", "{% for i in l %}{{ loop.foo.bar }}{% endfor %}", "{% for i in range(6) %}{% if i == 4 %}{% break %}{% endif %}{% if i is odd %}{% continue %}{% endif %}{{ i }}{% endfor %}",
    "{% for i in l %}{% break %}{% else %}e{% endfor %}", "{% for i in l %}{% for j in l %}{% if j == 1 %}{% break %}{% endif %}{{ i }}{{ j }} {% endfor %}{% endfor %}", "{% break %}", "{% for i in l %}{% macro m() %}{% break %}{% endmacro %}{% endfor %}", "{% for i in l %}{% set x = i %}{% endfor %}{{ x }}",
    "{% set z = 0 %}{% for i in l %}{{ z }}{% set z = i %}{{ z }} {% endfor %}{{ z }}", "{% for i in l %}{% if loop.first %}{% set q = 1 %}{% endif %}{{ q is defined }} {% endfor %}", "{% for i in l %}{% for j in [1] %}{{ loop.index }}{% endfor %}{{ loop.index }}{% endfor %}", "{{ loop is defined }}{% for i in l %}{% endfor %}{{ loop is defined }}{{ i }}",
    "{% for n in [{'v': 1, 'c': [{'v': 2, 'c': []}, {'v': 3}]}] recursive %}({{ n.v }}@{{ loop.depth }}{{ loop(n.c) if n.c }}){% endfor %}", "{% for n in [[1, [2, [3]]]] recursive %}{% if n is iterable %}[{{ loop(n) }}]{% else %}{{ n }}{% endif %}{% endfor %}", "{% for i in l %}{{ loop(l) }}{% endfor %}",
    "{% for i in range(3) %}{% set x %}{{ i }}{% endset %}{{ x }}{% endfor %}", "{% for m in messages %}{{ m.role }}:{{ m['content'] }}|{% endfor %}", "{% for m in messages[1:] %}{{ m.role }} {% endfor %}", "{% for m in messages[::-1] %}{{ m.role }} {% endfor %}", "{% for i in l|sort|reverse %}{{ i }}{{ loop.last }}{% endfor %}",
    "{% for i in (1, 2) %}{{ i }}{% endfor %}", "{% for i in 1, 2 %}{{ i }}{% endfor %}", "{% for i in l if true else 3 %}{% endfor %}", "{% for i in d.values() %}{{ i }}{% endfor %}", "{% for i in l %}{{ loop }}{% break %}{% endfor %}" if False else "{% for i in l %}{{ loop|length }}{% break %}{% endfor %}" if False else "{% for i in l %}{{ i }}{% endfor %}",
    "{% set g = l|map('string') %}{{ g|join }}{{ g|join }}", "{% set g = l|select('odd') %}{% for i in g %}{{ i }}{% endfor %}{% for i in g %}{{ i }}{% endfor %}", "{% set g = d.items() %}{{ g|length }}{{ g|list|length }}{{ g|list|length }}", "{% set g = d|items %}{{ g|first }}{{ g|list }}", "{% for loop in l %}{{ loop }}{% endfor %}" if False else "",
    # macros and calls
    "{% macro m(a, b=2) %}[{{ a }}{{ b }}]{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(b=4, a=5) }}{{ m() }}", "{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", "{% macro m(a) %}{% endmacro %}{{ m(b=2) }}", "{% macro m(a) %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, x=4) }}",
    "{% macro m(a, b=a) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}", "{% macro m(a, b=1, c) %}{% endmacro %}", "{% macro m() %}{{ i }}{% endmacro %}{{ m() }}", "{% set z = 1 %}{% macro m() %}{{ z }}{% endmacro %}{% set z = 2 %}{{ m() }}", "{% macro m() %}{% set z = 5 %}{{ z }}{% endmacro %}{{ m() }}{{ z is defined }}",
    "{% macro fact(n) %}{% if n <= 1 %}1{% else %}{{ n * fact(n - 1)|int }}{% endif %}{% endmacro %}{{ fact(10) }}", "{% macro m(x) %}<{{ caller(x) }}>{% endmacro %}{% call(y) m(3) %}{{ y }}{{ i }}{% endcall %}", "{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}a{% endcall %}", "{% macro m() %}{{ caller() }}{% endmacro %}{{ m() }}",
    "{% macro m() %}{{ caller is defined }}{% endmacro %}{{ m() }}{% call m() %}{% endcall %}", "{% macro m() %}x{% endmacro %}{% call m() %}a{% endcall %}", "{% macro m(caller=none) %}{{ caller is none }}{% endmacro %}{{ m() }}", "{% call(a, b=2) m() %}{% endcall %}{% macro m() %}{% endmacro %}", "{% macro o() %}{% call i2() %}x{{ caller() }}{% endcall %}{% endmacro %}{% macro i2() %}({{ caller() }}){% endmacro %}{% call o() %}y{% endcall %}",
    "{% macro m() %}a{% endmacro %}{{ m }}"[:0] + "{% macro m() %}a{% endmacro %}{{ m() ~ m()|upper }}", "{% macro m() %} x {% endmacro %}{{ m()|trim }}|{{ m()|length }}", "{% macro m(l) %}{% for i in l %}{{ i }}{% if i is iterable and i is not string %}{{ m(i) }}{% endif %}{% endfor %}{% endmacro %}{{ m([1, [2, [3]]]) }}", "{{ m() }}{% macro m() %}{% endmacro %}",
    "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}B{% endmacro %}{{ a() }}", "{% if true %}{% macro m() %}x{% endmacro %}{% endif %}{{ m() }}", "{% for i in l %}{% macro m() %}{{ i }}{% endmacro %}{{ m() }}{% endfor %}", "{% macro m(*a) %}{% endmacro %}", "{% macro m(a, a2) %}{{ a }}{{ a2 }}{% endmacro %}{{ m(*[1, 2]) }}{{ m(**{'a': 3, 'a2': 4}) }}{{ m(5, *[6]) }}",
    "{% macro m() %}{{ kwargs }}{% endmacro %}{{ m(**d) }}", "{{ range(*[1, 3])|list }}", "{{ dict(**d) }}", "{% macro m(x) %}{{ x is defined }}{% endmacro %}{{ m() }}{{ m(none) }}", "{% macro m(x=missing) %}{{ x|default('D') }}{% endmacro %}{{ m() }}", "{% macro outer() %}{% macro inner() %}I{% endmacro %}{{ inner() }}{% endmacro %}{{ outer() }}{{ inner is defined }}",
    "{% set ns = namespace(c=0) %}{% macro inc() %}{% set ns.c = ns.c + 1 %}{% endmacro %}{{ inc() }}{{ inc() }}{{ ns.c }}", "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.reset() }}{{ c.next() }}", "{% set j = joiner() %}{% for i in l %}{{ j() }}{{ i }}{% endfor %}", "{% generation %}{% set a = 1 %}x{{ a }}{% endgeneration %}{{ a is defined }}",
    "{% for i in l %}{% generation %}{{ i }}{{ loop.index }}{% endgeneration %}{% endfor %}", "{% macro m() %}{{ varargs|length }}{% endmacro %}{{ m(1, 2) }}", "{% set f = s.upper %}{{ f() }}", "{% set f = d.get %}{{ f('a') }}{{ f('z', 1) }}", "{{ s.upper()()}}",
    # errors of syntax
    "{{ 1", "{% if true %}", "{% if true %}{% endfor %}", "{% endif %}", "{{ }}", "{% %}", "{{ 1 2 }}", "{{ (1 }}", "{{ 1) }}", "{{ [1, }}", "{{ 'a }}", "{{ a. }}", "{{ a.1b }}", "{{ |upper }}", "{{ a| }}", "{{ a is }}", "{{ not }}", "{{ a if }}", "{% for in l %}{% endfor %}", "{% for i l %}{% endfor %}",
    "{% set %}", "{% set 1 = 2 %}", "{% set x %}", "{% macro %}{% endmacro %}", "{% macro m %}{% endmacro %}", "{% foo %}", "{# open", "{% raw %}", "{% else %}", "{% elif 1 %}", "{{ a == }}", "{{ == 1 }}", "{{ f(a=1, 2) }}", "{{ f(*a, *b) }}", "{{ {1} }}", "{{ {1: } }}", "{{ a ? b }}", "{{ a && b }}", "{{ a $ }}", "{{ x = 1 }}",
    "{% if a = 1 %}{% endif %}", "{% for i in l %}{% endfor", "{% extends 'x' %}", "{% include 'x' %}", "{% import 'x' as y %}", "{% call 1 %}{% endcall %}", "{% call m %}{% endcall %}", "{{ 1 is odd is even }}", "{{ l[ }}", "{{ l[] }}", "{{ l[1:2:3:4] }}", "{{ 1 ~ }}", "{{ ** 2 }}", "{% continue %}", "{% if x is defined if y %}{% endif %}",
    "{{ '\\x' }}", "{{ ]", "{{ } }}", "{% if 1 %}{{ 2 }}{% else %}{% else %}{% endif %}", "{% block %}{% endblock %}", "{% with a %}{% endwith %}", "{% filter %}x{% endfilter %}", "{% filter nope %}x{% endfilter %}", "{{ 5.5.5 }}", "{{ l.0.1 }}", "{{ 1.e }}", "{{ a..b }}", "{{ a.'b' }}", "{{ \"a\" \"b\" 'c' }}",
]

# What is known to differ: addresses in texts, and integers beyond 64 bits.
SKIPPED = ("object at 0x", "object do_items at", "<function", "<built-in", "<Macro", "<bound", "<class")


def features():
    cases, seen = [], set()
    for source in itertools.chain(("{{ " + e + " }}" for e in expressions()), STATEMENTS):
        if source in seen:
            continue
        seen.add(source)
        result = render(source, copy.deepcopy(CONTEXT))  # |indent of a list changes it
        if not any(s in result.get("output", "") for s in SKIPPED):
            cases.append({"source": source, **result})
    return {"context": CONTEXT, "cases": cases}


if __name__ == "__main__":
    for name, made in (("golden_generation.json", generation()), ("golden_features.json", features())):
        with open(f"{OUT}/{name}", "w", encoding="utf8") as out:
            json.dump(made, out, ensure_ascii=False, indent=0)
        print(name, len(made.get("cases", [])))
