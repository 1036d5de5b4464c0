"""The page in a real browser: it works, is quiet, sends nothing, and those who cannot see it can use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raybench.report import build, write_report
from raybench.report.reference import load_references
from raybench.results.store import Writer, load
from tests.report.chromium import chromium
from tests.results.made import REQUEST, run_row, skipped_row, write_measured

HOSTILE = "</script><script>alert(1)</script><img src=//x.test/y onerror=alert(2)> {{7*7}} \u202etxet & \"'"
CASES = ["bucketed", "naive", "torch-ddp", f"x{HOSTILE}"]


def write_hostile(folder: Path) -> Path:
    """A report on a store with good cases, failures, and text that means harm wherever text can come from."""
    write_measured(folder / "results", CASES, device=f"CPU {HOSTILE}")
    request = {"tracks": [{"track": "k-x", "title": HOSTILE, "question": HOSTILE, "cases": []}, *REQUEST["tracks"]]}
    writer = Writer(folder / "results", "suite-1", request)
    writer.write_round("k-x", "broken", 1, 1, {"runs": [run_row(status="crashed", reason=HOSTILE, window_ns=None)]})
    writer.write_round("k-x", "never", 0, 0, {"runs": [skipped_row("needs 4 GPUs, the cluster has 2")]})
    report = build(load(folder / "results"), price=1.0, references=load_references())
    write_report(report, folder / "report")
    return folder / "report" / "report.html"


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hostile(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


class Visit:
    """A page, and everything that it did which it should not have."""

    def __init__(self, browser: Any, html: Path, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.noise: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.noise.append(message.text))
        self.page.on("pageerror", lambda error: self.noise.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.noise.append(dialog.message), dialog.dismiss()))
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(html.as_uri())

    def head(self, name: str) -> Any:
        titles = self.page.locator("#cases-table thead th")
        return titles.nth(titles.all_inner_texts().index(name))

    def column(self, name: str) -> list[str]:
        """The visible cells of a column, from above."""
        index = self.page.locator("#cases-table thead th").all_inner_texts().index(name)
        rows = self.page.locator("#cases-table tbody tr:visible").all()
        return [row.locator("th, td").nth(index).inner_text() for row in rows]

    def press(self, name: str) -> None:
        self.head(name).get_by_role("button").click()


@pytest.fixture
def visit(browser: Any, html: Path) -> Iterator[Visit]:
    found = Visit(browser, html)
    yield found
    assert found.noise == []
    assert found.requests == [html.as_uri()]
    found.context.close()


def test_columns_sort_and_missing_numbers_stay_below(visit: Visit) -> None:
    visit.press("tokens/s")
    speeds = visit.column("tokens/s")
    measured = [float(text.replace(",", "")) for text in speeds[: len(CASES)]]
    assert measured == sorted(measured, reverse=True)
    assert speeds[len(CASES) :] == ["crashed", "skipped"]
    visit.press("tokens/s")
    assert visit.column("tokens/s") == [*reversed(speeds[: len(CASES)]), "crashed", "skipped"]
    assert visit.head("tokens/s").get_attribute("aria-sort") == "ascending"
    assert "by tokens/s" in visit.page.get_by_role("status").inner_text()


def test_the_keyboard_is_enough(visit: Visit) -> None:
    visit.page.keyboard.press("Tab")
    assert visit.page.evaluate("document.activeElement.className") == "skip"
    visit.head("case").get_by_role("button").focus()
    visit.page.keyboard.press("Enter")
    assert visit.column("case") == sorted(visit.column("case"), key=str.lower)
    visit.page.keyboard.press("Space")
    assert visit.head("case").get_attribute("aria-sort") == "descending"


def test_rows_are_filtered_by_text_track_and_status(visit: Visit) -> None:
    from playwright.sync_api import expect

    visit.page.get_by_label("Search").fill("NAIVE passed")
    assert visit.column("case") == ["naive"]
    assert visit.page.get_by_role("status").inner_text().startswith("1 of 6 cases")
    visit.page.get_by_role("button", name="Show all").click()
    expect(visit.page.locator("#cases-table tbody tr:not([hidden])")).to_have_count(6)
    visit.page.locator("#filter").get_by_label("Status").select_option("crashed")
    assert visit.column("case") == ["broken"]
    visit.page.locator("#filter").get_by_label("Status").select_option("")
    visit.page.locator("#filter").get_by_label("Track").select_option("k-x")
    assert sorted(visit.column("case")) == ["broken", "never"]


def test_text_from_outside_stays_text(visit: Visit) -> None:
    assert visit.page.locator("main img").count() == 0
    assert visit.page.locator("script").count() == 1
    shown = " ".join(visit.page.locator("body").inner_text().split())
    assert "<script>alert(1)</script>" in shown
    assert "{{7*7}}" in shown
    assert "\u202e" not in shown


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_those_who_cannot_see_it_can_use_it(browser: Any, html: Path, scheme: str, width: int) -> None:
    from axe_playwright_python.sync_playwright import Axe

    visit = Visit(browser, html, color_scheme=scheme, viewport={"width": width, "height": 800})
    found = Axe().run(visit.page).response["violations"]
    serious = [(rule["id"], rule["nodes"][0]["html"][:200]) for rule in found if rule["impact"] != "minor"]
    assert serious == []
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    assert visit.noise == []
    visit.context.close()


def test_it_reads_without_its_script(browser: Any, html: Path) -> None:
    visit = Visit(browser, html, java_script_enabled=False)
    assert len(visit.column("case")) == len(CASES) + 2
    assert visit.page.locator("#filter").is_hidden()
    assert visit.page.locator("figure svg[role=img]").count() >= 8
    visit.context.close()


def test_paper_takes_all_of_it(browser: Any, html: Path) -> None:
    """On an upright A4 page: no column is cut, no figure is split."""
    visit = Visit(browser, html, viewport={"width": 718, "height": 1047})
    visit.page.emulate_media(media="print")
    wide = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
    assert visit.page.evaluate(wide) == 0
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 718
    assert visit.page.locator("nav, form").filter(visible=True).count() == 0
    style = "e => getComputedStyle(e).breakInside"
    assert {figure.evaluate(style) for figure in visit.page.locator("figure").all()} == {"avoid"}
    assert visit.page.pdf(format="A4").startswith(b"%PDF")
    visit.context.close()
