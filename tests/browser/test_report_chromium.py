"""The report in a real browser: it draws, the console stays silent, it fits a phone, follows a run, saves pictures."""

import json
import shutil
import struct
import threading
from functools import cache

import pytest

from bapo.report import serve, write_report
from tests.browser.conftest import PATIENCE
from tests.compared_runs import COMPARED
from tests.unit.report.test_report import with_scores


@pytest.fixture(scope="module")
def pages(lasting, report):
    """The report in a light and in a dark page. Tests share them, and leave what others look at as they found it."""

    @cache
    def shown(scheme):
        page = lasting.open(report, ALLOWED, color_scheme=scheme)
        unfolded(page)
        return page

    return shown


@pytest.fixture
def page(pages, watched):
    return pages("light")


@pytest.fixture
def opened(watched):
    """A function that opens a page and waits until it is drawn."""

    def open_page(url, **options):
        page = watched(url, ALLOWED, **options)
        unfolded(page)
        return page

    return open_page


ALLOWED = ("file:", "data:", "blob:", "http://127.0.0.1")


def drawn(page):
    page.wait_for_selector("html[data-drawn]", timeout=PATIENCE)


def redrawn(page, action):
    """Do something and wait for the drawing it causes."""
    page.evaluate("delete document.documentElement.dataset.drawn")
    action()
    drawn(page)


def unfolded(page):
    """Open every figure for experts, whose plots are drawn then."""
    drawn(page)
    if page.locator("details.figure:not([open])").count():
        open_all = "document.querySelectorAll('details.figure').forEach((one) => { one.open = true; })"
        redrawn(page, lambda: page.evaluate(open_all))
        page.wait_for_selector(".plot:not(:has(.main-svg))", state="detached", timeout=PATIENCE)


def plot(page, name, what):
    """Something of a plot, asked of plotly itself."""
    return page.evaluate(f"name => {{ const plot = document.getElementById(`plot-${{name}}`); return {what}; }}", name)


def embedded(page):
    return json.loads(page.locator("#values").text_content())


def test_every_plot_is_drawn_with_the_values_of_the_file(page):
    values = embedded(page)
    panels = [panel for figure in values["figures"] for panel in figure["panels"]]
    assert len(panels) == page.locator(".plot .main-svg .cartesianlayer").count() > 25
    for panel in panels:
        assert plot(
            page, panel["id"], "plot.querySelectorAll('path.js-line, path.point, .bars path, .points path').length"
        )
    norm = next(panel for panel in panels if panel.get("key") == "grad_norm")
    series = norm["series"][0]
    assert len(series["runs"]) == 2
    mean = [sum(pair) / 2 for pair in zip(*series["runs"], strict=True)]
    shown = plot(page, norm["id"], "Array.from(plot.data.find(trace => trace.showlegend).y)")
    assert shown == pytest.approx(mean)


def test_the_table_shows_and_sorts(page):
    values = embedded(page)
    assert page.locator("#overview tbody tr").count() == len(values["arms"]) == 6
    first = values["table"]["rows"][0]["cells"]
    assert first["avg"]["text"] in page.locator("#overview tbody tr").first.inner_text()
    page.locator("#overview").get_by_role("button", name="Positive share").click()
    shares = [row["cells"]["share"] for row in values["table"]["rows"]]
    ordered = [cell["text"] for cell in sorted(shares, key=lambda cell: -cell["value"])]
    position = 1 + [column["key"] for column in values["table"]["columns"]].index("share")
    column = page.locator(f"#overview tbody td:nth-child({position})")
    assert [text.split("\n")[0] for text in column.all_inner_texts()] == ordered
    page.locator("#overview").get_by_role("button", name="Positive share").click()
    assert [text.split("\n")[0] for text in column.all_inner_texts()] == ordered[::-1]
    assert page.evaluate("document.activeElement.textContent") == "Positive share"  # the keyboard stays where it was


def test_light_and_dark(pages, watched):
    def background(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light, dark = pages("light"), pages("dark")
    assert background(light) == "rgb(251, 251, 250)"
    assert background(dark) == "rgb(20, 22, 26)"
    redrawn(light, lambda: light.locator("#theme").click())
    assert background(light) == background(dark)
    name = embedded(light)["figures"][1]["panels"][0]["id"]
    color = "plot.data.find(trace => trace.showlegend).line.color"
    assert plot(light, name, color) == plot(dark, name, color)
    redrawn(light, lambda: light.locator("#theme").click())
    assert plot(light, name, color) != plot(dark, name, color)


def test_it_fits_a_phone(opened, report):
    page = opened(report, viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    widths = page.evaluate("Array.from(document.querySelectorAll('.plot'), plot => plot.getBoundingClientRect().right)")
    assert max(widths) <= 390
    page.locator(".chip", has_text="grpo").tap()


def test_chips_hide_and_the_slider_smooths(page):
    norm = next(p for f in embedded(page)["figures"] for p in f["panels"] if p.get("key") == "grad_norm")
    names = "plot.data.filter(trace => trace.showlegend).map(trace => trace.name)"
    assert len(plot(page, norm["id"], names)) == 6
    redrawn(page, lambda: page.locator(".chip", has_text="bapo").click())
    assert plot(page, norm["id"], names) == ["grpo · reuse-2", "clip_higher · reuse-4", "push-once · reuse-4"]
    redrawn(page, lambda: page.locator(".smooth input").fill("3"))
    assert page.locator(".smooth output").inner_text() == "mean of 3 points"
    index = next(i for i, arm in enumerate(embedded(page)["arms"]) if arm["objective"] == "clip_higher")
    raw = next(series for series in norm["series"] if series["arm"] == index)["runs"][0]
    smooth = [sum(raw[max(0, i - 1) : i + 2]) / len(raw[max(0, i - 1) : i + 2]) for i in range(len(raw))]
    shown = plot(page, norm["id"], "Array.from(plot.data.filter(trace => trace.showlegend)[1].y)")
    assert shown == pytest.approx(smooth)
    redrawn(page, lambda: page.locator(".smooth input").fill("1"))
    redrawn(page, lambda: page.locator(".chip", has_text="bapo").click())
    assert len(plot(page, norm["id"], names)) == 6


def test_a_plot_becomes_a_picture(page, tmp_path):
    with page.expect_download() as download:
        page.get_by_role("button", name="save Gradient norm before clipping as PNG").click()
    assert download.value.suggested_filename.endswith(".png")
    download.value.save_as(tmp_path / "plot.png")
    data = (tmp_path / "plot.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", data[16:24]) == (2880, 1840)
    assert len(data) > 20_000  # not a blank sheet


def test_a_picture_needs_no_caption(page):
    """Its title says what it shows, and the line below says whose runs these are and what lines and bands are."""
    saved = """async (name) => {
        const save = Plotly.toImage;
        const figure = new Promise((resolve) => {
            Plotly.toImage = (figure) => { resolve(figure); return save(figure, { format: "svg" }); };
        });
        document.querySelector(`[aria-label="save ${name} as PNG"]`).click();
        const { layout, data } = await figure;
        Plotly.toImage = save;
        const names = data.filter((trace) => trace.showlegend).map((trace) => trace.name);
        return [layout.title.text, layout.title.subtitle.text, layout.showlegend, names];
    }"""
    title, below, legend, names = page.evaluate(saved, "Share of tokens that the clip blocks")
    assert title == "Share of tokens that the clip blocks"
    assert below == "compared: demo on countdown · mean over seeds, band from lowest to highest"
    assert legend
    assert "bapo · reuse-2" in names
    _, below, _, _ = page.evaluate(saved, "Entropy of trained tokens, nats per token")
    assert below == "compared: demo on countdown · mean over seeds"  # the bands would cover each other
    _, below, _, _ = page.evaluate(saved, "avg@2 on held-out problems")
    assert below.split("<br>") == [
        "compared: demo on countdown · mean over seeds",
        page.locator("#held-out .overlaps").first.text_content()[:117] + "…",
    ]


def test_the_answer_comes_first_then_its_numbers_then_figures(page):
    values = embedded(page)
    assert page.locator("#verdict .answer").all_inner_texts() == values["verdict"]["lines"]
    (table,) = values["differences"]
    cells = page.locator("#differences tbody tr").first.locator("td").all_inner_texts()
    assert [cell.strip() for cell in cells] == [text.strip() for text in table["rows"][0]]
    places = [page.locator(name).bounding_box()["y"] for name in ("#verdict", "#differences", "#overview", "#held-out")]
    assert places == sorted(places)
    page.evaluate("scrollTo(0, 0)")
    box = page.locator("#verdict").bounding_box()
    assert box["y"] + box["height"] < page.viewport_size["height"]  # without scrolling


def test_evaluations_on_other_problems_are_hollow_and_unconnected(page):
    name = next(p["id"] for f in embedded(page)["figures"] for p in f["panels"] if p.get("key") == "eval/avg")
    shown = "plot.data.map(({name, mode, marker, x, y, meta}) => ({name, mode, symbol: marker.symbol, x, y, ...meta}))"
    points = [trace for trace in plot(page, name, shown) if trace["name"] == "push-once · reuse-4"]
    log = (COMPARED / "reuse-4/push-once/seed-0/metrics.jsonl").read_text().splitlines()
    evals = [line for line in map(json.loads, log) if line["kind"] == "eval"]
    (joined,) = [trace for trace in points if not trace.get("apart")]
    (hollow,) = [trace for trace in points if trace.get("apart")]
    for trace, problems in ((joined, 4), (hollow, 1)):
        here = [line for line in evals if line["eval/problems"] == problems]
        assert trace["x"] == [line["version"] for line in here]
        assert trace["y"] == pytest.approx([line["eval/avg"] for line in here])
    assert (hollow["mode"], hollow["symbol"].endswith("-open")) == ("markers", True)
    assert (joined["mode"], joined["symbol"].endswith("-open")) == ("lines+markers", False)
    assert "Hollow points" in page.locator("#held-out").inner_text()


ENDS = """plot.data.filter((trace) => trace.showlegend || trace.meta?.apart).map(({ x, y, error_y }) =>
    [...x].map((at, place) => [at, y[place] - error_y.arrayminus[place], y[place] + error_y.array[place]])).flat()"""


def whiskers(page, key):
    """x -> the ends of the bar there, in the plot of an evaluation of one arm."""
    name = next(p["id"] for f in embedded(page)["figures"] for p in f["panels"] if p.get("key") == key)
    return {x: (low, high) for x, low, high in plot(page, name, ENDS)}


@pytest.mark.parametrize("axis", ["", "#x=responses"])
def test_bars_of_one_run_are_the_intervals_that_it_logged(opened, tmp_path, axis):
    write_report([COMPARED / "reuse-4/bapo/seed-0"], tmp_path / "r.html")
    page = opened((tmp_path / "r.html").as_uri() + axis)
    log = (COMPARED / "reuse-4/bapo/seed-0/metrics.jsonl").read_text().splitlines()
    kept = {line["version"]: line for line in map(json.loads, log) if line["kind"] == "eval"}
    for key in ("eval/avg", "eval/pass"):
        logged = [(line[f"{key}_low"], line[f"{key}_high"]) for line in kept.values()]
        assert len(logged) > 2
        found = whiskers(page, key)
        assert len(found) == len(logged)
        assert sorted(found.values()) == [pytest.approx(ends, abs=1e-5) for ends in sorted(logged)]
    name = next(p["id"] for f in embedded(page)["figures"] for p in f["panels"] if p.get("key") == "eval/avg")
    low, high = plot(page, name, "plot._fullLayout.yaxis.range")
    assert low <= min(end for end, _ in whiskers(page, "eval/avg").values())  # so that no small change fills the axis
    assert high >= max(end for _, end in whiskers(page, "eval/avg").values())


def test_bars_over_seeds_are_those_of_the_table(opened, tmp_path):
    """avg .1 .2 .3: .2 ± 4.3027 · .1 / √3 = .248. pass .9 1 1: .967 ± .143, which ends at 1."""
    with_scores(COMPARED, tmp_path / "three", **{"avg": (0.1, 0.2, 0.3), "pass": (0.9, 1.0, 1.0)})
    write_report([tmp_path / "three"], tmp_path / "r.html")
    page = opened((tmp_path / "r.html").as_uri())
    cells = embedded(page)["table"]["rows"][0]["cells"]
    assert (cells["avg"]["text"], cells["pass"]["text"]) == ("0.200 ± 0.248", "0.967 [0.823, 1.000]")
    for key, ends in (("eval/avg", (-0.0484, 0.4484)), ("eval/pass", (0.8232, 1.0))):
        found = whiskers(page, key)
        assert found[max(found)] == pytest.approx(ends, abs=1e-4)
    dots = "plot.data.filter((trace) => trace.meta?.detail).map(({x, y}) => [x.at(-1), y.at(-1)])"
    name = next(p["id"] for f in embedded(page)["figures"] for p in f["panels"] if p.get("key") == "eval/avg")
    assert [y for _, y in plot(page, name, dots)] == [0.1, 0.2, 0.3]


def test_figures_for_experts_are_drawn_when_they_are_opened(watched, report):
    page = watched(report, ALLOWED)
    drawn(page)
    folded = [figure for figure in embedded(page)["figures"] if figure["folded"]]
    assert len(folded) == page.locator("details.figure").count() == 7
    assert page.locator("details.figure[open], details.figure .main-svg").count() == 0
    assert page.locator("#bounds h2").is_visible()
    assert not page.locator("#bounds .plot").first.is_visible()
    redrawn(page, lambda: page.locator("#bounds summary").click())
    assert page.locator("#bounds .main-svg .cartesianlayer").count() == 2
    width = "(one) => one.clientWidth - one.querySelector('.main-svg').clientWidth"
    widths = page.evaluate(f"[...document.querySelectorAll('#bounds .plot')].map({width})")
    assert widths == [0, 0]  # a plot that is drawn while it is hidden has another width
    redrawn(page, lambda: page.get_by_role("link", name="Entropy-Clip Rule").click())
    assert page.locator("#quadrants .plot").first.is_visible()
    redrawn(page, lambda: page.locator("#theme").click())
    assert page.locator("details.figure[open]").count() == 2
    there = watched(f"{report}#by-use", ALLOWED)
    drawn(there)
    assert there.locator("#by-use .plot").first.is_visible()


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    """The page of three arms of two seeds each."""
    root = tmp_path_factory.mktemp("crowd")
    for objective in ("grpo", "bapo"):
        shutil.copytree(COMPARED / "reuse-2" / objective, root / "g/reuse-2" / objective)
    shutil.copytree(COMPARED / "reuse-2/bapo", root / "g/reuse-2/third")
    (root / "g/grid.json").write_text(json.dumps({"name": "crowd", "objectives": ["grpo", "bapo", "third"]}))
    write_report([root / "g"], root / "r.html")
    return (root / "r.html").as_uri()


def test_a_quantity_that_never_changes_has_a_readable_axis(opened, tmp_path):
    """Forty updates at the same bounds: their moving mean is 0.8 up to rounding, which is not a range for an axis."""
    run = shutil.copytree(COMPARED / "reuse-4/push-once/seed-0", tmp_path / "run")
    (run / "summary.json").unlink()
    *_, last = (
        line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if line["kind"] == "update"
    )
    still = {"clip_low": 0.8, "clip_high": 1.2, "clip_fraction": 0.0, "step": 1}
    logged = [last | still | {"version": n, "grad_norm": 0.5 + 0.001 * n} for n in range(1, 161)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in logged))
    (run / "timing.jsonl").write_text("")
    write_report([run], tmp_path / "r.html")
    page = opened((tmp_path / "r.html").as_uri())
    names = {
        panel["key"]: panel["id"]
        for figure in embedded(page)["figures"]
        for panel in figure["panels"]
        if "key" in panel
    }
    ticks = "[...plot.querySelectorAll('.ytick text')].map(text => Number(text.textContent.replace('−', '-')))"
    for key, value in (("clip_low", 0.8), ("clip_high", 1.2), ("clip_fraction", 0.0), ("grad_norm", 0.58)):
        shown = plot(page, names[key], ticks)
        assert len(shown) == len(set(shown)) >= 3, key
        assert min(shown) <= value <= max(shown), key
    low, high = plot(page, names["clip_low"], "plot._fullLayout.yaxis.range")
    assert (low, high) == pytest.approx((0.72, 0.88))


def test_many_bands_appear_for_the_arm_under_the_pointer(opened, crowd):
    page = opened(crowd)
    names = {p["key"]: p["id"] for f in embedded(page)["figures"] for p in f["panels"] if "key" in p}
    name = names["clip_fraction"]
    detail = "plot.data.filter(trace => trace.meta.detail).map(trace => [trace.meta.arm, trace.opacity])"
    bold = "plot.data.filter(trace => trace.showlegend).map(trace => [trace.meta.arm, trace.opacity])"
    filled = """[...plot.querySelectorAll('.fills path.js-fill')].filter(path => path.style.fillOpacity > 0).length"""
    assert {opacity for _, opacity in plot(page, name, detail)} == {0}
    assert plot(page, name, filled) == 0
    assert len(plot(page, name, detail)) == 3 * 4  # a band of two lines, and two seeds, of every arm
    page.locator(f"#plot-{name}").scroll_into_view_if_needed()
    hover = """async (name) => {
        const plot = document.getElementById(`plot-${name}`);
        plot.emit("plotly_hover", { points: [{ data: plot.data.filter((trace) => trace.showlegend)[1] }] });
    }"""
    page.evaluate(hover, name)
    lifted = plot(page, name, "plot.data.filter(trace => trace.showlegend)[1].meta.arm")
    assert {(arm == lifted, opacity) for arm, opacity in plot(page, name, detail)} == {(True, 1), (False, 0)}
    assert {(arm == lifted, opacity) for arm, opacity in plot(page, name, bold)} == {(True, 1), (False, 0.25)}
    assert plot(page, name, filled) == 1
    plot(page, name, "plot.emit('plotly_unhover')")
    assert plot(page, name, filled) == 0
    assert {opacity for _, opacity in plot(page, name, bold)} == {1}
    assert {opacity for _, opacity in plot(page, name, detail)} == {0}
    redrawn(page, lambda: page.locator(".chip", has_text="third").click())
    assert {opacity for _, opacity in plot(page, name, detail)} == {1}  # two bands can be told apart
    assert plot(page, name, filled) == 2
    assert {opacity for _, opacity in plot(page, names["entropy"], detail)} == {0}  # not if one covers the other
    assert plot(page, names["entropy"], filled) == 0


def test_a_page_of_one_run_has_a_verdict_and_no_comparison(opened, tmp_path):
    write_report([COMPARED / "reuse-2/bapo/seed-0"], tmp_path / "r.html")
    page = opened((tmp_path / "r.html").as_uri())
    assert page.locator("#verdict .answer").inner_text().startswith("avg@2 went from 0.375 [")
    assert page.locator("#differences, #undrawn, .chips").count() == 0
    assert page.locator(".top p").inner_text().startswith("1 run ·")
    text = page.locator("main").inner_text().lower()
    for word in ("compar", "against grpo", "common to all", "over seeds"):
        assert word not in text


def test_responses_show_who_wrote_them(page):
    option = page.locator(".pick option", has_text="partial").get_attribute("value")
    page.locator(".pick").select_option(option)
    assert page.locator(".sample").count() == 3
    pieces = page.locator(".sample .piece")
    assert pieces.count() >= 2
    assert pieces.first.locator("sup").inner_text().isdigit()


def test_markup_in_a_response_stays_text(opened, tmp_path):
    shutil.copytree(COMPARED / "reuse-2/bapo/seed-0", tmp_path / "run")
    rollouts = tmp_path / "run/rollouts.jsonl"
    line = json.loads(rollouts.read_text().splitlines()[0])
    evil = "<img src=x onerror=\"document.title='gone'\"></script><script>document.title='gone'</script>"
    line["written_by"][0] = [[0, evil], [1, evil]]
    line["problem"]["prompt"] = evil
    rollouts.write_text(json.dumps(line) + "\n")
    write_report([tmp_path / "run"], tmp_path / "r.html")
    page = opened((tmp_path / "r.html").as_uri())
    assert page.locator(".prompt").inner_text() == evil
    assert "gone" not in page.title()


def test_what_is_not_finite_is_drawn_too(opened, tmp_path):
    run = shutil.copytree(COMPARED / "reuse-2/bapo/seed-0", tmp_path / "run")
    groups = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    groups[0]["trajectories"][0]["reward"] = float("nan")
    (run / "rollouts.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups))
    write_report([run], tmp_path / "r.html")
    page = opened((tmp_path / "r.html").as_uri())
    assert "mean reward – over 4 responses" in page.locator(".sample").first.inner_text()
    assert "no reward" in page.locator(".sample .response").first.inner_text()


def test_defects_are_on_top(opened, tmp_path):
    shutil.copytree(COMPARED / "reuse-2", tmp_path / "grid/reuse-2")
    (tmp_path / "grid/reuse-2/bapo/seed-1/summary.json").write_text("{")
    write_report([tmp_path / "grid"], tmp_path / "r.html")
    page = opened((tmp_path / "r.html").as_uri())
    text = page.locator(".warning").inner_text()
    assert "damaged" in text
    assert "summary.json" in text
    assert page.locator(".warning").bounding_box()["y"] < page.locator("#overview").bounding_box()["y"]


def test_the_live_page_follows_without_reloading(opened, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(COMPARED / "reuse-4/bapo/seed-0", run)
    summary = (run / "summary.json").read_text()
    (run / "summary.json").unlink()
    logged = {name: (run / name).read_text().splitlines(keepends=True) for name in ("metrics.jsonl", "timing.jsonl")}
    third = next(i for i, line in enumerate(logged["metrics.jsonl"]) if '"rollout", "step": 3' in line)
    (run / "metrics.jsonl").write_text("".join(logged["metrics.jsonl"][:third]))
    (run / "timing.jsonl").write_text("".join(logged["timing.jsonl"][:2]))
    with serve([run], 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            page = opened(server.url)
            page.evaluate("window.kept = true")
            state = page.locator("#state")
            assert state.inner_text() == "following, step 2 of 3"
            name = next(p["id"] for f in embedded(page)["figures"] for p in f["panels"] if p.get("key") == "grad_norm")
            assert plot(page, name, "plot.data.at(-1).x.at(-1)") == 8
            (run / "metrics.jsonl").write_text("".join(logged["metrics.jsonl"]))
            (run / "timing.jsonl").write_text("".join(logged["timing.jsonl"]))
            page.get_by_text("following, step 3 of 3").wait_for(timeout=PATIENCE)
            assert plot(page, name, "plot.data.at(-1).x.at(-1)") == 12
            (run / "summary.json").write_text(summary)
            page.get_by_text("complete", exact=True).wait_for(timeout=PATIENCE)
            assert page.evaluate("window.kept")
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_overview_fits_a_laptop_and_shows_where_it_goes_on_where_it_does_not(pages, watched, scheme):
    hidden = "[...document.querySelectorAll('.scroll')].map((box) => box.scrollWidth - box.clientWidth)"
    page = pages(scheme)
    page.evaluate("scrollTo(0, 0)")
    usual = page.viewport_size
    for width in (1200, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        assert set(page.evaluate(hidden)) == {0}
    page.set_viewport_size({"width": 390, "height": 900})
    assert max(page.evaluate(hidden)) > 0
    page.locator("#overview .scroll").evaluate("(box) => box.scrollIntoView({ block: 'center' })")
    box = page.locator("#overview .scroll").bounding_box()
    edge = {"x": box["x"] + box["width"] - 8, "y": box["y"] + box["height"] - 8, "width": 4, "height": 3}  # no text
    there = page.screenshot(clip=edge)
    page.locator("#overview .scroll").evaluate("(box) => { box.scrollLeft = box.scrollWidth; }")
    assert page.screenshot(clip=edge) != there  # the shadow is gone where nothing is hidden
    page.set_viewport_size(usual)


@pytest.fixture(scope="module")
def supervised(tmp_path_factory):
    """A tiny run of `bapo sft`."""
    from bapo.config.recipe import parse
    from bapo.config.sft import SftConfig
    from bapo.train.sft import start
    from tests.supervised import saved_model, sums, write_rows

    root = tmp_path_factory.mktemp("supervised")
    task = {"train": [str(write_rows(root / "sums.jsonl", sums()))]}
    model = {"path": str(saved_model(root / "model"))}
    values = {
        "model": model,
        "task": task,
        "device": "cpu",
        "threads": 1,
        "eval": {"every": 2},
        "out": str(root / "run"),
    }
    start(parse(SftConfig, values, source="test"), plain=True)
    return root / "run"


@pytest.mark.parametrize("mixed", [False, True])
def test_supervised_runs_have_a_table_and_figures_of_their_own(supervised, mixed, opened, tmp_path):
    paths = [supervised, COMPARED / "reuse-2"] if mixed else [supervised]
    write_report(paths, tmp_path / "report.html")
    page = opened((tmp_path / "report.html").as_uri())
    title = "compared: demo on countdown, with supervised runs" if mixed else "run: model on sums"
    assert page.locator("h1").inner_text() == title
    facts = "4 runs, 2 objectives, 1 setting, 1 supervised run ·" if mixed else "1 supervised run ·"
    assert page.locator(".top p").inner_text().startswith(facts)
    assert page.locator("#sft-overview tbody tr").count() == 1
    assert page.locator("#overview").count() == page.locator(".axis").count() == mixed
    assert page.locator("#sft .plot .scatterlayer .trace").count() >= 4
    page.locator("#sft-overview").get_by_role("button", name="Held-out loss").click()
    assert page.locator("#sft-overview th[aria-sort]").count() == 1
    if mixed:
        page.locator("#overview").get_by_role("button", name="Responses").click()
        assert page.locator("#sft-overview th[aria-sort]").count() == 0  # one table is sorted at a time
        assert page.locator("#overview th[aria-sort]").count() == 1
        page.locator(".pick").select_option(index=2)
        redrawn(page, lambda: page.locator(".axis input[value=responses]").check(force=True))
        assert page.locator("#held-out .xtitle").first.text_content() == "sampled responses"
        assert page.locator("#sft .xtitle").first.text_content() == "update"  # it samples none
        assert not page.locator("#uncounted").is_visible()
    assert "samples no responses" in page.locator("#samples").inner_text()
