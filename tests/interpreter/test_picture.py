"""Pictures of plans: what is drawn, where it stands, and that no text of a program gets loose."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.interpreter.conftest import MakeBackend
from tests.support.engine_harness import graphs as engine_graphs
from tests.support.graphs import GraphBuilder, graphs

import umbel as ub
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply, ScriptedCall
from umbel.interpreter.picture import to_html, to_mermaid, to_svg
from umbel.interpreter.picture_layout import CARD_WIDTH, Layout, lay_out, row_height
from umbel.interpreter.picture_text import seconds, shorten, text_width
from umbel.interpreter.plan import make_plan, plan_result
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Gen, Join, Ref, Select, Text
from umbel.lang.results import NodeResult, Timings, Usage

SVG = "{http://www.w3.org/2000/svg}"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = (
    "</script></text><script>alert(1)</script><img src=x onerror=alert(1)>&\"'`]]>\u202e\0\ud800"
)


@ub.function
def advise(s: ub.State, num_points: int) -> None:
    s += "You advise with care. " + ub.gen("idea", max_tokens=80)
    forks = s.fork(num_points)
    for branch in forks:
        branch += ub.gen("point", max_tokens=40)
        branch += " rated " + ub.gen("rating", regex="[1-5]")
    forks.join(mode="append")
    s += "\nVerdict: " + ub.select("verdict", ["good", "bad"])


def _num_points(num_nodes: int) -> int:
    """Return the argument with which the program has about so many nodes."""
    return (num_nodes - 4) // 4


class Page(HTMLParser):
    """Takes a page apart: elements with their attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.shown: list[str] = []
        self._open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            self.scripts[-1] += data
        else:
            self.shown.append(data)


def _data(page: Page) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = json.loads(page.scripts[0])
    return found


# --- places --------------------------------------------------------------------------------


def _check_layout(nodes: tuple[GraphNode, ...]) -> Layout:
    """Check what holds of every layout."""
    layout = lay_out(nodes)
    assert sorted(i for card in layout.cards for i in card.nodes) == list(range(len(nodes)))
    for i, card in enumerate(layout.cards):
        assert 0 < card.x < card.right < layout.width
        assert 0 < card.y < card.y + card.height < layout.height
        for other in layout.cards[i + 1 :]:
            assert (
                card.right < other.x
                or other.right < card.x
                or card.y + card.height < other.y
                or other.y + other.height < card.y
            ), f"cards of {card.nodes} and {other.nodes} overlap"
        y = card.y
        for node in card.nodes:
            row = layout.rows[node]
            assert (row.node, row.card, row.height) == (node, i, row_height(nodes[node]))
            assert row.y >= y
            y = row.y + row.height
        assert y <= card.y + card.height
    card_of = {i: card for card in layout.cards for i in card.nodes}
    prefixes = {(node.parent, node.id) for node in nodes if node.parent is not None}
    within = {(a, b) for a, b in prefixes if card_of[a] != card_of[b]}
    assert {(edge.source, edge.target) for edge in layout.stems} == within
    is_join = [isinstance(node.op, Join) for node in nodes]
    data = {(dep, node.id) for node in nodes for dep in node.deps}
    assert {(e.source, e.target) for e in layout.joins} == {e for e in data if is_join[e[1]]}
    assert {(e.source, e.target) for e in layout.values} == {e for e in data if not is_join[e[1]]}
    for edge in (*layout.stems, *layout.joins):
        assert edge.x1 == card_of[edge.source].right
        assert (edge.x2, edge.y2) == (card_of[edge.target].x, card_of[edge.target].axis)
        assert edge.x1 < edge.x2, "time runs to the right"
    return layout


@pytest.mark.parametrize("num_nodes", [12, 200])
def test_no_boxes_overlap(num_nodes: int) -> None:
    graph = advise.compile(_num_points(num_nodes))
    assert abs(len(graph.nodes) - num_nodes) <= 5
    _check_layout(graph.nodes)


@settings(max_examples=80, deadline=None)
@given(engine_graphs(max_ops=25))
def test_a_program_s_boxes_never_overlap(graph: RequestGraph) -> None:
    _check_layout(graph.nodes)


@settings(max_examples=80, deadline=None)
@given(graphs())
def test_any_graph_s_boxes_never_overlap(nodes: list[GraphNode]) -> None:
    _check_layout(tuple(nodes))


def test_a_shared_prefix_is_one_stem_that_branches_leave_and_a_join_ends() -> None:
    builder = GraphBuilder()
    stem = builder.text("shared", builder.text("first"))
    branches = builder.fork(stem, 4)
    lasts = [builder.add(Gen("g"), branch) for branch in branches]
    join = builder.join(lasts, stem)
    layout = _check_layout(tuple(builder.nodes))
    assert layout.cards[0].nodes == (0, 1)
    assert {edge.target for edge in layout.stems} == {*branches, join}
    assert {(edge.x1, edge.y1) for edge in layout.stems} == {
        (layout.cards[0].right, layout.cards[0].axis)
    }
    ways_on = [edge for edge in layout.stems if edge.target == join]
    assert [edge.y1 for edge in ways_on] == [edge.y2 for edge in ways_on], "the stem goes straight"
    above = [e for e in layout.stems if e.y2 < e.y1]
    below = [e for e in layout.stems if e.y2 > e.y1]
    assert len(above) == len(below) == 2
    assert {edge.source for edge in layout.joins} == set(lasts)


# --- the drawing ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_nodes", [12, 200])
def test_every_node_and_edge_is_drawn_once(num_nodes: int) -> None:
    graph = advise.compile(_num_points(num_nodes))
    svg = ET.fromstring(to_svg(make_plan(graph)))
    drawn = [int(g.attrib["data-node"]) for g in svg.iter(f"{SVG}g") if "data-node" in g.attrib]
    assert sorted(drawn) == list(range(len(graph.nodes)))
    layout = lay_out(graph.nodes)
    lines = [
        (path.attrib["class"], int(path.attrib["data-from"]), int(path.attrib["data-to"]))
        for path in svg.iter(f"{SVG}path")
        if "data-from" in path.attrib
    ]
    expected = [
        (kind, edge.source, edge.target)
        for kind, edges in (
            ("stem", layout.stems),
            ("join", layout.joins),
            ("value", layout.values),
        )
        for edge in edges
    ]
    assert sorted(lines) == sorted(expected)
    boxes = [rect for rect in svg.iter(f"{SVG}rect") if rect.attrib["class"] == "box"]
    assert len(boxes) == len(layout.cards)


def test_a_stem_is_thicker_the_more_paths_share_it() -> None:
    def width(num_branches: int) -> float:
        builder = GraphBuilder()
        first = builder.text("a")
        builder.text("unread", first)
        stem = builder.text("b", first)
        for branch in builder.fork(stem, num_branches):
            builder.add(Gen("g"), branch)
        svg = ET.fromstring(to_svg(make_plan(builder.piece())))
        (found,) = [p for p in svg.iter(f"{SVG}path") if p.attrib.get("data-to") == str(stem)]
        return float(found.attrib["stroke-width"])

    assert width(1) < width(2) < width(8) <= width(1000)


def test_the_words_stay_inside_their_card() -> None:
    builder = GraphBuilder()
    at = builder.text("w" * 300)
    at = builder.add(Gen("m" * 80), at)
    builder.add(Select("名" * 80, ("x" * 90, "y")), at)
    svg = ET.fromstring(to_svg(make_plan(builder.piece())))
    for row in svg.iter(f"{SVG}g"):
        if "data-node" not in row.attrib:
            continue
        words = {text.attrib["class"]: text.text or "" for text in row.iter(f"{SVG}text")}
        line = text_width(words["title"], 13) + text_width(words.get("value", ""), 11.5)
        assert line <= CARD_WIDTH - 30


@given(st.text(max_size=60), st.floats(20, 400))
def test_what_is_shortened_fits_and_begins_as_before(text: str, width: float) -> None:
    short = shorten(text, width, 12)
    assert short == text or (short.endswith("…") and text.startswith(short[:-1]))
    assert text_width(short, 12) <= width


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0000004, "0 µs"), (0.00012, "120 µs"), (0.0202, "20.2 ms"), (1, "1 s"), (1234, "1,234 s")],
)
def test_times_have_few_digits(value: float, said: str) -> None:
    assert seconds(value) == said


# --- after a run ---------------------------------------------------------------------------


def test_a_run_shows_times_tokens_and_cache_hits() -> None:
    builder = GraphBuilder()
    first = builder.add(Gen("first"), builder.text("a"))
    builder.add(Gen("second"), first)
    builder.add(Gen("open"), first)
    timings = Timings(ready=10.0, scheduled=10.0, first_token=11.0, finished=12.0)
    later = Timings(ready=12.0, scheduled=12.5, first_token=13.0, finished=16.0)
    plan = make_plan(
        builder.piece(),
        results={
            0: NodeResult(text="a"),
            1: NodeResult("x", usage=Usage(100, 75, 20), timings=timings),
            2: NodeResult("y", usage=Usage(120, 110, 30), timings=later),
        },
    )
    svg = ET.fromstring(to_svg(plan))
    rows = {g.attrib["data-node"]: g for g in svg.iter(f"{SVG}g") if "data-node" in g.attrib}
    words = {i: [text.text for text in row.iter(f"{SVG}text")] for i, row in rows.items()}
    assert words["1"] == ["first", "20 tok", "2 s · 75% cached"]
    assert words["2"] == ["second", "30 tok", "4 s · 92% cached"]
    assert "finished" in rows["2"].attrib["class"].split()
    assert "open" in rows["3"].attrib["class"].split()
    bars = {
        i: float(rect.attrib["width"])
        for i, row in rows.items()
        for rect in row.iter(f"{SVG}rect")
        if rect.attrib["class"] == "bar"
    }
    assert set(bars) == {"1", "2"}
    assert bars["2"] == pytest.approx(2 * bars["1"], abs=0.2)
    page = Page(to_html(plan))
    shown = " ".join(" ".join(page.shown).split())
    assert "cache hits 84% 185 of 220 prompt tokens" in shown
    assert "took 6 s" in shown
    facts = dict(_data(page)["nodes"][2]["facts"])  # type: ignore[call-overload]
    assert facts["cache hits"] == "110 of 120 tokens (92%)"
    assert facts["waited"] == "500 ms"


def test_a_failure_is_marked_and_tells_no_credentials() -> None:
    error = ub.BackendError("refused, api_key=abcdef123456", backend="scripted")
    backend = ScriptedBackend({"idea": Reply(error=error)})
    try:
        (result,) = advise.options(backend=backend).run_batch([2], on_error="collect")
    finally:
        backend.close()
    plan = plan_result(result)
    drawn = to_html(plan)
    assert "abcdef123456" not in drawn + to_mermaid(plan)
    failed = [
        attrs
        for _, attrs in Page(drawn).elements
        if "data-node" in attrs and "failed" in (attrs["class"] or "").split()
    ]
    assert len(failed) == plan.num_failed > 0
    svg = ET.fromstring(to_svg(plan))
    values = [text.text for text in svg.iter(f"{SVG}text") if text.attrib["class"] == "value"]
    assert values.count("✕ failed") == 1 + 2 * 2 + 1
    idea = next(data for data in _data(Page(drawn))["nodes"] if data["title"] == "idea")
    assert idea["blocks"] == [["error", "BackendError: refused, api_key=[removed]"]]


# --- untrusted text ------------------------------------------------------------------------


def test_a_run_that_was_retried_says_so() -> None:
    lost = ub.BackendConnectionError("lost", backend="scripted", retryable=True)
    attempts: list[int] = []

    def idea(call: ScriptedCall) -> Reply:
        attempts.append(call.row)
        return Reply(error=lost) if call.row == 1 and attempts.count(1) < 3 else Reply(text="go")

    script: dict[str, Any] = {"idea": idea, "point": ["a", "b"], "rating": ["1", "2"]}
    with ScriptedBackend({**script, "verdict": "good"}) as backend:
        program = advise.options(backend=backend)
        plain, retried = program.run_batch([1, 2], retries=2, backoff=0.01)
    assert (plain.attempt, retried.attempt) == (0, 2)
    for result in (plain, retried):
        plan = plan_result(result)
        assert plan.num_retries == result.attempt
        shown = " ".join(" ".join(Page(to_html(plan)).shown).split())
        said = f"retries {result.attempt} runs before this one"
        assert (said in shown) == (result.attempt > 0)


def _hostile_graph(text: str) -> RequestGraph:
    builder = GraphBuilder()
    at = builder.text(text)
    named = builder.add(Gen(text), at)
    chosen = builder.add(Select(text, (text, text + "x")), named)
    builder.add(Text(("see ", Ref(chosen))), chosen)
    return builder.piece()


@settings(max_examples=40, deadline=None)
@given(st.one_of(st.just(HOSTILE), st.text(min_size=1, max_size=30)))
def test_text_changes_no_structure(text: str) -> None:
    def drawn(text: str) -> tuple[Page, str]:
        graph = _hostile_graph(text)
        results = {i: NodeResult(text=text) for i in range(len(graph.nodes))}
        plan = make_plan(graph, results=results)
        page = to_html(plan, title=text)
        page.encode()  # no half characters
        ET.fromstring(to_svg(plan))
        return Page(page), to_mermaid(plan)

    (page, mermaid), (plain, plain_mermaid) = drawn(text), drawn("plain")
    tags = [tag for tag, attrs in page.elements if tag != "text"]
    assert tags == [tag for tag, attrs in plain.elements if tag != "text"]
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)
    assert len(page.scripts) == 2
    assert page.scripts[1] == plain.scripts[1]
    assert len(_data(page)["nodes"]) == 4
    assert len(mermaid.splitlines()) == len(plain_mermaid.splitlines())


def test_the_text_itself_is_there() -> None:
    page = Page(to_html(make_plan(_hostile_graph("a<b>&amp;\n\u202ec"))))
    assert _data(page)["nodes"][0]["blocks"] == [["text", "a<b>&amp;\n\ufffdc"]]
    assert "a<b>&amp;↵ \ufffdc" in page.shown


def test_a_page_loads_nothing() -> None:
    text = to_html(advise.plan(2))
    page = Page(text)
    for tag, attrs in page.elements:
        assert tag not in {"link", "iframe", "img", "object", "embed", "base", "form"}
        assert not {"src", "action", "formaction", "style"} & set(attrs)
        assert all((attrs.get(name) or "#").startswith("#") for name in ("href", "xlink:href"))
    assert not re.search(r"url\(|@import|fetch\(|eval\(|innerHTML|document\.write", text)
    (policy,) = [a["content"] for _, a in page.elements if a.get("http-equiv")]
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "@@" not in text


# --- files ---------------------------------------------------------------------------------


def test_a_plan_draws_itself(tmp_path: Path) -> None:
    plan = advise.plan(2)
    page = plan.draw(tmp_path / "graph.html")
    assert page.read_text(encoding="utf-8") == to_html(plan, title="graph")
    flowchart = plan.draw(str(tmp_path / "graph.mmd"))
    assert flowchart.read_text(encoding="utf-8") == to_mermaid(plan)
    plan.draw(page, title="<Advice>")
    assert "<title>&lt;Advice&gt; · umbel</title>" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["plan.png", "plan", "plan.html.txt"])
def test_a_picture_of_another_kind_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        make_plan(RequestGraph(())).draw(name)


def test_an_empty_plan_can_be_drawn() -> None:
    plan = make_plan(RequestGraph(()))
    assert _data(Page(to_html(plan)))["nodes"] == []
    assert to_mermaid(plan).startswith("flowchart LR\n  classDef")


@settings(max_examples=40, deadline=None)
@given(engine_graphs())
def test_a_flowchart_has_every_node_and_edge(graph: RequestGraph) -> None:
    lines = to_mermaid(make_plan(graph)).splitlines()
    nodes = [line for line in lines if re.match(r'  n\d+(\(|\{\{|\[)"', line)]
    assert len(nodes) == len(graph.nodes)
    edges = {
        (int(found[1]), int(found[3]))
        for line in lines
        if (found := re.fullmatch(r"  n(\d+) (==>|-->|---|-\.->) n(\d+)", line))
    }
    assert edges == {
        (edge, node.id)
        for node in graph.nodes
        for edge in (*node.deps, node.parent)
        if edge is not None
    }


# --- in a browser --------------------------------------------------------------------------

#: goes through the page as a user does, and writes down what it finds
VISIT = """
<script>
const box = (element) => element.getBoundingClientRect();
const found = { crowded: [], outside: [], hidden: [], path: [], titles: [] };
for (const row of nodes) {
  const [title, value, note] = [".title", ".value", ".note"].map((name) => row.querySelector(name));
  const card = box(row.closest(".card").querySelector(".box"));
  if (title && value && box(title).right > box(value).left) found.crowded.push(title.textContent);
  for (const text of [title, value, note])
    if (text && (box(text).right > card.right || box(text).left < card.left))
      found.outside.push(text.textContent);
}
const press = (key) => {
  document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const at = document.activeElement, node = Number(at.dataset.node), frame = box(scroller);
  if (!key.startsWith("Arrow")) return;
  found.path.push(node);
  if (box(at).top < frame.top - 1 || box(at).bottom > frame.bottom + 1) found.hidden.push(node);
};
["ArrowDown", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"].forEach(press);
for (let i = 0; i < nodes.length; i++) press("ArrowDown");
press("Enter");
found.kept = document.querySelector("aside h2").textContent;
found.chosen = document.querySelectorAll(".node.chosen").length;
const before = scale;
press("+");
found.zoomed = scale > before;
press("Escape");
found.legend = !legend.hidden;
document.documentElement.dataset.found = JSON.stringify(found);
</script>
"""


def _browse(page: Path, profile: Path) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    return subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={profile}",
            "--enable-logging=stderr",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("num_nodes", [12, 200])
def test_a_browser_runs_the_page(num_nodes: int, tmp_path: Path, scripted: MakeBackend) -> None:
    scripted()
    plan = plan_result(advise.run(_num_points(num_nodes)))
    page = plan.draw(tmp_path / "graph.html", title=HOSTILE)
    ended = _browse(page, tmp_path / "profile")
    # the script's last statement: it ran to its end, and nothing else did
    assert f'data-ready="{len(plan.nodes)}"' in ended.stdout
    complaints = [line for line in ended.stderr.splitlines() if "CONSOLE" in line]
    assert complaints == []
    assert html.escape("alert(1)") in ended.stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("num_nodes", [12, 200])
def test_a_page_can_be_read_and_walked_through_by_keyboard(
    num_nodes: int, tmp_path: Path, scripted: MakeBackend
) -> None:
    scripted()
    plan = plan_result(advise.run(_num_points(num_nodes)))
    page = plan.draw(tmp_path / "graph.html")
    drawn = page.read_text()
    # the page's policy lets no other script run, which is why the visitor needs it gone
    opened = re.sub(r"<meta http-equiv=[^>]*>", "", drawn).replace("</body>", VISIT + "</body>")
    assert "data-found" not in _browse(page, tmp_path / "profile").stdout
    page.write_text(drawn.replace("</body>", VISIT + "</body>"))
    assert "data-found" not in _browse(page, tmp_path / "profile").stdout
    page.write_text(opened)
    ended = _browse(page, tmp_path / "profile")
    attributes = Page(ended.stdout).elements[0][1]
    found = json.loads(attributes["data-found"] or "")
    assert found["crowded"] == found["outside"] == found["hidden"] == []
    last = len(plan.nodes) - 1
    assert found["path"][:5] == [0, 1, 2, 3, 1]
    assert found["path"][5:] == [*range(2, last + 1), last, last]
    assert (found["kept"], found["chosen"]) == ("verdict", 1)
    assert found["legend"]
    assert found["zoomed"]
