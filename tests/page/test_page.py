"""The page as a browser's parser sees it: escaped, self-contained, and usable without a mouse."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from chai_eval.report.command import report
from chai_eval.report_settings import ReportSettings
from tests.page.made import HARMFUL, frontier
from tests.page.test_report import noisy, results

__all__ = ["results"]

VOID = {"meta", "input", "br", "path", "use", "line", "circle"}


class Seen(HTMLParser):
    """Elements with their attributes and texts, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[tuple[str, dict[str, str | None], list[str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = (tag, dict(attrs), [each[0] for each in self.open])
        self.elements.append(element)
        if tag not in VOID:
            self.open.append((tag, dict(attrs), []))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), [each[0] for each in self.open]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop()[0] == tag

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes, _ in self.elements if name == tag]


@pytest.fixture
def text(results: Path) -> str:
    frontier(results / "frontier" / "x", "tiny", {"chai": (0.14, noisy(0.3, 1)), "kv_rank": (0.14, noisy(0.1, 2))})
    out, *_ = report(ReportSettings((results,), results.parent / "out"), "python -m chai_eval report '<b>'")
    return (out / "index.html").read_text()


@pytest.fixture
def seen(text: str) -> Seen:
    parser = Seen()
    parser.feed(text)
    parser.close()
    assert not parser.open
    return parser


def test_text_of_documents_and_settings_is_shown_as_text(text: str, seen: Seen) -> None:
    assert len(seen.of("script")) == 1
    assert not [each for each in seen.of("b") if each]
    assert "alert" in text
    assert HARMFUL not in text
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in text
    assert "two &lt;b&gt;" in text
    assert "report &#39;&lt;b&gt;&#39;" in text


def test_the_page_asks_nothing_of_any_network(text: str, seen: Seen) -> None:
    policy = next(each["content"] for each in seen.of("meta") if each.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    script = text[text.index("<script>") + 8 : text.index("</script>")]
    assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    assert not re.findall(r"(?:src|href)=\"(?!#)[^\"]*\"", text)
    assert not re.search(r"url\((?!#)|@import", text)


def test_identifiers_are_unique_and_links_lead_to_them(seen: Seen) -> None:
    names = [attributes["id"] for _, attributes, _ in seen.elements if "id" in attributes]
    assert len(names) == len(set(names))
    links = [each.get("href") or each.get("xlink:href") for tag in ("a", "use") for each in seen.of(tag)]
    assert links
    assert {str(each)[1:] for each in links} <= set(names)


def test_tables_say_what_they_are_and_scroll_by_themselves(seen: Seen) -> None:
    tables = [inside for tag, _, inside in seen.elements if tag == "table"]
    assert len(tables) == len(seen.of("caption")) > 4
    assert all(each.get("scope") in ("col", "row") for each in seen.of("th"))
    sortable = [each for each in seen.of("th") if "aria-sort" in each]
    buttons = [inside for tag, _, inside in seen.elements if tag == "button" and inside[-1] == "th"]
    assert len(sortable) == len(buttons) > 10
    scrolling = [each for each in seen.of("div") if each.get("class") == "scroll"]
    assert all(each.get("tabindex") == "0" and each.get("aria-label") for each in scrolling)


def test_the_decision_comes_first(text: str) -> None:
    assert text.index("Should you use chai on tiny?") < text.index("<table") < text.index('id="tables"')
    assert text.index(">No.</strong>") < text.index("What is lost?")
    assert "python -m chai_eval measure model=tiny method=chai" in text


def test_changed_answers_stand_side_by_side_and_those_without_text_say_why(text: str) -> None:
    # Of 120 answers 18 are lost and 4 gained: of six shown five are lost.
    assert "of 120 answers 18 lost, 4 gained, 0 from one wrong answer to another" in text
    chai = text[text.index("<b>chai</b> on tiny") : text.index("<b>chai_static</b> on tiny")]
    assert chai.count('class="doc lost"') == 5
    assert chai.count('class="doc gained"') == 1
    assert re.search(r'<li class="gold">[^<]*(&lt;b&gt;\d+&lt;/b&gt;)? <em>right</em> <em>MHA</em></li>', chai)
    assert "The text is not at hand" in text
