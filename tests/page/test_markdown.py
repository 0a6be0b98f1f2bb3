"""Markdown of answers: what is drawn, also while it grows, and that it is harmless."""

from __future__ import annotations

import pytest
from browsing import Visit
from playwright.sync_api import expect

HOSTILE = """<script>document.title = "owned"</script>
<img src=x onerror="document.title = 'owned'"> ![pixel](https://example.com/pixel.png)
[click](javascript:alert(1)) [data](data:text/html,<script>alert(1)</script>)
[fine](https://example.com/a_(b)) <svg onload=alert(1)><iframe src="https://example.com">"""

HARMLESS = {"A", "BR", "CODE", "DEL", "DIV", "EM", "P", "STRONG"}

DOCUMENT = """# Title

Some *emphasis*, **strong _both_**, `code <b>`, ~~gone~~ and snake_case_name.
A second line with <https://example.com/?a=1>.

1. first
2. second
   - nested
   - `deep`

     ```python
     def f(x):
         return x
     ```

3. third

> quoted
> - item

| left | right |
|:-----|------:|
| a \\| b | 1 |
| **c** |

---

~~~
```
~~~

In the year
1984. Nothing happened, 3 * 4 * 5.
```js
const open = 1;
"""

DRAW = """async (text) => {
  const { MarkdownView } = await import("/page/markdown.js");
  const target = document.createElement("div");
  new MarkdownView(target).show(text);
  return target.innerHTML;
}"""

CASES = {
    "a **b** c": "<p>a <strong>b</strong> c</p>",
    "***both***": "<p><strong><em>both</em></strong></p>",
    "*a **b** c*": "<p><em>a <strong>b</strong> c</em></p>",
    "snake_case_name, 2 * 3 * 4": "<p>snake_case_name, 2 * 3 * 4</p>",
    r"\*not\* and `\*`": r"<p>*not* and <code>\*</code></p>",
    "``a`b``": "<p><code>a`b</code></p>",
    "## Two ##\ntext": "<h4>Two</h4><p>text</p>",
    "- a\n\n- b\n  c": "<ul><li><p>a</p></li><li><p>b\nc</p></li></ul>",
    "1. a\n  - b\n    - c": (
        '<ol start="1"><li><p>a</p><ul><li><p>b</p><ul><li><p>c</p></li></ul></li></ul></li></ol>'
    ),
    "3. a\n4. b": '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>',
    "text\n- a": "<p>text</p><ul><li><p>a</p></li></ul>",
    "> a\n> b": "<blockquote><p>a\nb</p></blockquote>",
    "a\n***\nb": "<p>a</p><hr><p>b</p>",
    "a<br>b & <i>c</i>": "<p>a<br>b &amp; &lt;i&gt;c&lt;/i&gt;</p>",
    "[**b**](http://x.y/)": (
        '<p><a href="http://x.y/" title="http://x.y/" target="_blank"'
        ' rel="noopener noreferrer"><strong>b</strong></a></p>'
    ),
}


@pytest.mark.parametrize("text", CASES)
def test_markdown_is_drawn(visit: Visit, text: str) -> None:
    assert visit.page.evaluate(DRAW, text) == CASES[text]


def test_a_code_block_has_its_language_and_a_table_its_cells(visit: Visit) -> None:
    drawn = visit.page.evaluate(DRAW, DOCUMENT)
    for expected in (
        "<span>python</span>",
        "def f(x):\n    return x</code>",
        "<code>```</code>",
        "1984. Nothing happened, 3 * 4 * 5.",
        "const open = 1;",
        '<th style="text-align: right;">right</th>',
        "<td>a | b</td>",
    ):
        assert expected in drawn


def test_text_that_grows_is_drawn_as_if_it_came_at_once(visit: Visit) -> None:
    grown = visit.page.evaluate(
        """async (text) => {
          const { MarkdownView } = await import("/page/markdown.js");
          const target = document.createElement("div");
          const view = new MarkdownView(target);
          const differ = [];
          for (let length = 1; length <= text.length; length += 1) {
            view.show(text.slice(0, length));
            const once = document.createElement("div");
            new MarkdownView(once).show(text.slice(0, length));
            if (once.innerHTML !== target.innerHTML) differ.push(text.slice(0, length));
          }
          return differ;
        }""",
        DOCUMENT,
    )
    assert grown == []


def test_complete_blocks_are_not_drawn_again(visit: Visit) -> None:
    kept = visit.page.evaluate("""async () => {
      const { MarkdownView } = await import("/page/markdown.js");
      const target = document.createElement("div");
      const view = new MarkdownView(target);
      view.show("one\\n\\ntwo\\n\\n```\\nthree\\n");
      const [first, second, code] = target.children;
      view.show("one\\n\\ntwo\\n\\n```\\nthree\\nfour\\n```\\n- a\\n- b");
      const item = target.querySelector("li");
      view.show("one\\n\\ntwo\\n\\n```\\nthree\\nfour\\n```\\n- a\\n- b\\n- c");
      const same = [first, second, code].map((node, number) => node === target.children[number]);
      return [...same, item === target.querySelector("li")];
    }""")
    assert kept == [True] * 4


SLOW = {
    "quotes": ">" * 20_000,
    "items": "- " * 20_000 + "a",
    "stars": "*a " * 20_000,
    "strong": "**a" * 20_000,
    "brackets": "[" * 50_000,
    "ticks": "a".join("`" * number for number in range(300)),
    "hashes": "# " + "#" * 50_000 + "x",
    "table": "|-" * 20_000 + "\n" + "|-" * 20_000,
}


@pytest.mark.parametrize("text", SLOW.values(), ids=SLOW)
def test_text_made_to_be_slow_or_deep_is_drawn(visit: Visit, text: str) -> None:
    assert len(visit.page.evaluate(DRAW, text)) >= len(text) // 2


def test_a_hostile_answer_makes_no_dangerous_element_and_no_request(visit: Visit) -> None:
    """The fixture also fails for any request to elsewhere and any blocked script."""
    visit.dictate(HOSTILE)
    visit.ask("Hello")
    text = visit.answer.locator(".text")
    expect(text).to_contain_text('<script>document.title = "owned"</script>')
    assert (
        set(text.evaluate("node => [...node.querySelectorAll('*')].map((each) => each.tagName)"))
        <= HARMLESS
    )
    links = text.evaluate("node => [...node.querySelectorAll('a')].map((each) => each.href)")
    assert links == [f"https://example.com/{path}" for path in ("pixel.png", "a_(b)", "")]
    attributes = (
        "node => [...node.querySelectorAll('*')].flatMap((each) => each.getAttributeNames())"
    )
    assert set(text.evaluate(attributes)) <= {"class", "href", "title", "target", "rel"}
    assert visit.page.title() == "Baton"
    visit.page.reload()  # kept text is no less hostile
    expect(text).to_contain_text('<script>document.title = "owned"</script>')
    assert visit.page.title() == "Baton"
