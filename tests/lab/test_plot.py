"""Charts: every point, bar and mark stands where its value says."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from foretoken.lab.plot import (
    HEIGHT,
    WIDTH,
    Axes,
    Bar,
    Series,
    bar_chart,
    decades,
    html_charts,
    html_contents,
    line_chart,
    page,
    ticks,
)  # fmt: skip

SVG = "{http://www.w3.org/2000/svg}"


def test_ticks_are_round_and_reach_the_largest_value() -> None:
    assert ticks(64) == [0, 20, 40, 60, 80]
    assert ticks(2000) == [0, 500, 1000, 1500, 2000]
    assert ticks(0.9) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])


def test_a_chart_has_each_point_at_its_place() -> None:
    text = line_chart(
        "A < B", Axes("tokens", "ms"), [Series("a", [(0, 0, 0, 0), (10, 5, 4, 10)])], legend=False
    )
    dots = ElementTree.fromstring(text).findall(f".//{SVG}circle")
    places = [(dot.get("cx"), dot.get("cy")) for dot in dots]
    assert places == [("64.0", "348.0"), ("616.0", "196.0")]
    assert "A &lt; B" in text


def test_logarithmic_charts_have_decades_and_equal_ratios_at_equal_distances() -> None:
    assert decades(3, 800) == [1, 10, 100, 1000]
    assert decades(10, 10) == [10, 100]
    points = [(x, x, x, x) for x in (1, 10, 100)]
    text = line_chart(
        "A", Axes("rows", "us", logarithmic=True), [Series("a", points)], legend=False
    )
    dots = ElementTree.fromstring(text).findall(f".//{SVG}circle")
    places = [(dot.get("cx"), dot.get("cy")) for dot in dots]
    assert places == [("64.0", "348.0"), ("340.0", "196.0"), ("616.0", "44.0")]


def test_marks_of_a_doubling_axis_are_the_points() -> None:
    points = [(x, x, x, x) for x in (1, 8, 64)]
    axes = Axes("batch", "tokens/s", x_marks=[1, 8, 64])
    text = line_chart("A", axes, [Series("a", points)], legend=False)
    dots = ElementTree.fromstring(text).findall(f".//{SVG}circle")
    assert [dot.get("cx") for dot in dots] == ["64.0", "340.0", "616.0"]
    assert [dot.get("cy") for dot in dots] == ["344.2", "317.6", "104.8"]  # 0 to 80, linear
    alone = line_chart("A", Axes("batch", "ms", x_marks=[8]), [Series("a", points[1:2])])
    dot = ElementTree.fromstring(alone).find(f".//{SVG}circle")
    assert dot is not None
    assert dot.get("cx") == "340.0"


def test_bars_are_stacked_from_the_axis() -> None:
    bars = [
        Bar("plain", "batch 1", {"target": 3.0, "host": 1.0}, mark=2.0),
        Bar("K=4", "batch 1", {"target": 5.0, "host": 0.0}, limits=(4.0, 6.0)),
    ]
    tree = ElementTree.fromstring(bar_chart("A < B", "ms", bars, mark="floor"))
    shown = [r for r in tree.findall(f"{SVG}rect") if r.get("width") != "12"]  # not the legend's
    ends = [(float(r.get("y", "")), float(r.get("height", ""))) for r in shown]
    bottom, unit = 348.0, 48.0  # 60 to 348 for 0 to 6
    assert [end[0] for end in ends] == [bottom - unit * up for up in (3, 4, 5, 5)]
    assert [end[1] for end in ends] == [unit * size for size in (3, 1, 5, 0)]
    marks = [line for line in tree.findall(f"{SVG}line") if line.get("class") == "mark"]
    heights = sorted(float(line.get("y1", "")) for line in marks)
    assert heights == sorted([40.0, bottom - 2 * unit, bottom - 4 * unit])
    texts = [text.text for text in tree.findall(f"{SVG}text")]
    assert texts.count("batch 1") == 1
    assert {"plain", "K=4", "target", "host", "floor", "A < B"} <= set(texts)


def test_a_page_holds_its_charts_below_one_another() -> None:
    chart = bar_chart("A", "x", [Bar("a", "b", {"c": 1.0})])
    tree = ElementTree.fromstring(page([chart, chart]))
    assert tree.get("height") == "800"
    assert [g.get("transform") for g in tree.findall(f"{SVG}g")] == [
        "translate(0 0)",
        "translate(0 400)",
    ]
    assert len(tree.findall(f".//{SVG}rect")) == 2


def test_many_charts_are_about_as_wide_as_high() -> None:
    chart = bar_chart("A", "x", [Bar("a", "b", {"c": 1.0})])
    for count in (7, 22, 100):
        tree = ElementTree.fromstring(page([chart] * count))
        width, height = int(tree.get("width", "")), int(tree.get("height", ""))
        assert 0.5 < width / height < 2
        places = {g.get("transform") for g in tree.findall(f"{SVG}g")}
        assert len(places) == count
        assert f"translate({width - WIDTH} 0)" in places
        assert any(str(place).endswith(f" {height - HEIGHT})") for place in places)


def test_notes_and_long_titles_stand_above_the_axes() -> None:
    lines = [Series("a", [(0, 0, 0, 0), (1, 1, 1, 1)]), Series("a", [(0, 1, 1, 1)], dashed=True)]
    title, note = "a title of many words " * 5, "what there is to know of it. " * 8
    text = line_chart(title, Axes("x", "y"), lines, level=("limit", 0.5), note=note)
    tree = ElementTree.fromstring(text)
    said = {kind: [one for one in tree.findall(f"{SVG}text") if one.get("class") == kind]
            for kind in ("title", "note")}  # fmt: skip
    for kind, whole in (("title", title), ("note", note)):
        assert len(said[kind]) > 1
        assert " ".join(str(one.text) for one in said[kind]) == whole.strip()
    highest = min(float(one.get("cy", "")) for one in tree.findall(f".//{SVG}circle"))
    assert max(float(one.get("y", "")) for one in said["note"]) < highest
    legend = [one.text for one in tree.findall(f"{SVG}text")]
    assert [legend.count(name) for name in ("a", "limit")] == [1, 1]


def test_contents_lead_to_every_section() -> None:
    titled = {"native, block": ["found <this>", "more"], "native, standard": []}
    nav = ElementTree.fromstring(html_contents(titled))
    assert "".join(nav.itertext()) == "native, blockfound <this>native, standard"
    sections = [html_charts(title, lines, ["<svg/>"], []) for title, lines in titled.items()]
    for link, section in zip(nav.iter("a"), sections, strict=True):
        heading = ElementTree.fromstring(f"<p>{section}</p>").find("h2")
        assert heading is not None
        assert (f"#{heading.get('id')}", heading.text) == (link.get("href"), link.text)
