"""Numbers that pages repeat are those of the tables that they come from.

docs/notes/*.csv hold our measurements. The tables of docs/results.md are rows of them, and those of other pages are
computed from them, as is every number in `CLAIMS`, which README and the pages state in words.
"""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCORES = ("avg@8, T = 1", "pass@8, T = 1", "avg@8, T = .6", "pass@8, T = .6", "greedy")
COLUMNS = (*SCORES, "entropy")
AVG, PASS, AVG_COLD, PASS_COLD, GREEDY = SCORES


def rows(name):
    with (ROOT / "docs/notes" / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


MEASURED, DIFFERENCES = rows("measurements.csv"), rows("differences.csv")


def words(page):
    """A page on one line, so that a sentence is found wherever its lines break."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def tables(page, heading=None):
    """The tables of a page, or of a part of it that begins with a heading, as dictionaries."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if heading is not None:
        text = text.partition(f"\n{heading}\n")[2]
        text = re.split(r"^## ", text, flags=re.MULTILINE)[0]
    found = []
    for table in re.findall(r"(?:^ *\|.*\n)+", text, flags=re.MULTILINE):
        titles, _, *cells = (
            [cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()
        )
        found.append([dict(zip(titles, row, strict=True)) for row in cells])
    return found


def number(cell):
    """The mean in a cell such as `−.037 ± .011*`."""
    return float(cell.replace("−", "-").partition("±")[0].strip("* "))


def score(setting, objective, column=AVG, grid="uses, brake"):
    (row,) = (r for r in MEASURED if (r["grid"], r["setting"], r["objective"]) == (grid, setting, objective))
    return number(row[column])


def difference(setting, objective, column, grid="uses, brake"):
    (row,) = (r for r in DIFFERENCES if (r["grid"], r["setting"], r["objective"]) == (grid, setting, objective))
    return row[column]


def plain(cell):
    return cell.replace("−", "-")


def test_tables_of_the_brake_are_rows_of_the_measurements():
    changes, scores = (t for t in tables("docs/results.md", "## The brake") if "setting" in t[0])
    assert (len(changes), len(scores)) == (15, 9)
    for row in changes:
        stored = [difference(row["setting"], row["rule"], column) for column in COLUMNS]
        assert [plain(row[column]) for column in COLUMNS] == stored, row
    for row in scores:
        for rule in ("grpo", "brake"):
            for titles, columns in ((rule, (AVG, PASS)), (f"{rule}, T = .6", (AVG_COLD, PASS_COLD))):
                once = row["setting"].startswith("1x")
                objective = "either" if once else rule
                expected = " / ".join(f"{score(row['setting'], objective, column):.3f}"[1:] for column in columns)
                assert row[titles] == ("equal" if once and rule == "brake" else expected), row


@pytest.mark.parametrize(
    ("heading", "grid", "objective", "count"),
    [
        ("## What a second use is worth", "uses", "push-once", 9),
        ("## Staleness, and the mean against the clip", "study, staleness", "bapo-weak-sequence", 6),
    ],
)
def test_tables_of_differences_are_rows_of_the_differences(heading, grid, objective, count):
    (table,) = (t for t in tables("docs/results.md", heading) if t[0].keys() == {"setting", *COLUMNS})
    assert len(table) == count
    for row in table:
        stored = [difference(row["setting"], objective, column, grid) for column in COLUMNS]
        assert [plain(row[column]) for column in COLUMNS] == stored, row


def test_the_table_of_searched_bounds_is_rows_of_the_measurements():
    (table,) = tables("docs/results.md", "## Searched bounds against fixed ones")
    assert len(table) == 7
    for row in table:
        (stored,) = (
            r
            for r in MEASURED
            if (r["grid"], r["setting"], r["objective"]) == ("uses", row["setting"], row["objective"])
        )
        assert all(row[column] == stored[column] for column in ("seeds", *COLUMNS[:4])), row


def test_the_table_of_staleness_is_pairs_of_the_measurements():
    table = tables("docs/results.md", "## Staleness, and the mean against the clip")[0]
    seen = 0
    for row in table:
        for column, cell in row.items():
            pair = re.fullmatch(r"\**(\.\d{3})\** / \**(\.\d{3})\**", cell)
            if pair is None:
                continue
            setting, seen = column.replace(" update", "-update"), seen + 1
            (stored,) = (
                r
                for r in MEASURED
                if r["grid"] in ("study", "staleness", "on_policy")
                and (r["setting"], r["objective"]) == (setting, row["objective"])
            )
            assert [float(value) for value in pair.groups()] == [number(stored[AVG]), number(stored[PASS])], (
                row,
                column,
            )
    assert seen == 32


def test_a_difference_is_that_of_the_means_and_its_star_means_what_it_says():
    means = {(r["grid"], r["setting"], r["objective"]): r for r in MEASURED}
    compared = 0
    for row in DIFFERENCES:
        ours, theirs = (means.get((row["grid"], row["setting"], row[name])) for name in ("objective", "minus"))
        for column in COLUMNS:
            if not row[column]:
                continue
            half = float(row[column].partition("±")[2].strip("* "))
            assert abs(abs(number(row[column])) - half) < 0.001 or (
                row[column].endswith("*") == (abs(number(row[column])) > half)
            ), row
            if ours and theirs and ours["seeds"] == theirs["seeds"] and ours[column] and theirs[column]:
                compared += 1
                assert abs(number(ours[column]) - number(theirs[column]) - number(row[column])) < 0.0016, (row, column)
    assert compared > 60


def named(cell):
    return set(re.findall(r"\d+x-\d+e-\d|partial-2x|replay|32-updates", cell))


def test_what_the_results_call_better_or_worse_is_what_has_a_star():
    (table,) = (t for t in tables("docs/results.md", "## The brake") if "better in" in t[0])
    assert [row["score"] for row in table] == list(SCORES)
    brakes = [row for row in DIFFERENCES if row["grid"] == "uses, brake"]
    for row in table:
        starred = [r for r in brakes if r[row["score"]].endswith("*")]
        for sign, side in ((1, "better in"), (-1, "worse in")):
            settings = {r["setting"] for r in starred if sign * number(r[row["score"]]) > 0}
            assert named(row[side]) == settings, (row["score"], side)
        falls = {abs(number(r[row["score"]])) for r in starred if number(r[row["score"]]) < 0}
        assert {float(value) for value in re.findall(r"\.\d{3}", row["worse in"])} <= falls


def test_the_page_of_rules_repeats_the_differences():
    (table,) = (t for t in tables("docs/choose.md") if "passes, learning rate" in t[0])
    assert len(table) == 12
    setting = ""
    for row in table:
        if row["passes, learning rate"]:
            setting = row["passes, learning rate"].replace(", ", "x-")
        rule = row[""]
        grid, objective = ("uses, brake", "brake") if rule == "brake" else ("uses", "push-once")
        for column, shown in zip(COLUMNS, ("avg@8", "pass@8", "avg@8 at 0.6", "pass@8 at 0.6"), strict=False):
            stored = difference(setting, objective, column, grid)
            expected = stored.partition(" ")[0] + ("*" if stored.endswith("*") else "")
            assert plain(row[shown]) == expected, (setting, rule, column)


def percent(*scores):
    return [f"{100 * value:.0f}" for value in scores]


def points(*cells):
    """Differences in points, without their sign."""
    return [f"{100 * abs(number(cell)):.1f}".removesuffix(".0") for cell in cells]


def gains(grid, settings):
    """What a sequence mean adds to GRPO's avg@8, from the least to the most."""
    found = [
        score(each, "grpo-sequence", AVG, g) - score(each, "grpo", AVG, g)
        for g, each in zip(grid, settings, strict=True)
    ]
    return [min(found), max(found)]


SEQUENCE_MEAN = gains(
    ("on_policy", "staleness", "staleness", "study", "staleness", "staleness"),
    ("1-update", "4-updates", "16-updates", "32-updates", "replay", "partial"),
)
MEAN_ALONE = [
    score("4x8", "grpo-sequence", AVG, "study") - score("4x8", "grpo", AVG, "study"),
    score("8x-1e-4", "grpo", AVG, "uses") - score("8x-1e-4, token mean", "grpo", AVG, "uses"),
]
PUSH_ALONE = score("8x-1e-4, token mean", "push-once", AVG, "uses") - score("8x-1e-4, token mean", "grpo", AVG, "uses")

CLAIMS = {
    "eight and sixteen passes": (
        "README.md",
        r"GRPO ends at (\d+)% \((\d+)% before training\), and the brake at (\d+)%. With sixteen at 3e-5, GRPO ends at "
        r"(\d+)%, and the brake at (\d+)%",
        percent(
            score("8x-1e-4", "grpo"), score("before training", "", AVG, "uses"), score("8x-1e-4", "brake"),
            score("16x-3e-5", "grpo"), score("16x-3e-5", "brake"),
        ),
    ),
    "eight passes at the better rate": (
        "README.md",
        r"within eight tries \((\d+)% against (\d+)%\) and is ahead at temperature 0.6 \((\d+)% against (\d+)%\)",
        percent(
            score("8x-3e-5", "brake", PASS), score("8x-3e-5", "grpo", PASS),
            score("8x-3e-5", "brake", AVG_COLD), score("8x-3e-5", "grpo", AVG_COLD),
        ),
    ),
    "replay": (
        "README.md",
        r"under replay it loses ([\d.]+) points at temperature 0.6 and ([\d.]+) with greedy answers",
        points(difference("replay", "brake", AVG_COLD), difference("replay", "brake", GREEDY)),
    ),
    "the mean, in README": (
        "README.md", r"gains (\d+) to (\d+) points where data is used once or a few times", percent(*SEQUENCE_MEAN),
    ),
    "the mean under eight passes, in README": (
        "README.md", r"With eight passes at 1e-4 it gains (\d+) to (\d+)\.", percent(*MEAN_ALONE),
    ),
    "the mean, in the results": (
        "docs/results.md", r"GRPO gains (\.\d\d) to (\.\d\d) avg@8 over a token mean",
        [f"{value:.2f}"[1:] for value in SEQUENCE_MEAN],
    ),
    "the mean under eight passes, in the results": (
        "docs/results.md", r"the mean alone gains (\.\d\d) to (\.\d\d), and push once gains (\.\d\d) even",
        [f"{value:.2f}"[1:] for value in (*MEAN_ALONE, PUSH_ALONE)],
    ),
    "the mean, among the rules": (
        "docs/choose.md", r"it gains (\.\d\d) \((\.\d{3}) to (\.\d{3})\), and push once alone gains (\.\d\d) ",
        [
            f"{value:.{digits}f}"[1:]
            for value, digits in (
                (MEAN_ALONE[1], 2), (score("8x-1e-4, token mean", "grpo", AVG, "uses"), 3),
                (score("8x-1e-4", "grpo", AVG, "uses"), 3), (PUSH_ALONE, 2),
            )
        ],
    ),
}  # fmt: skip
"""Sentences with numbers: the page, what to look for, and the numbers that the measurements give."""


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_sentence_has_the_numbers_of_the_measurements(claim):
    page, sentence, expected = CLAIMS[claim]
    found = re.search(sentence, words(page))
    assert found, f"{page} has no such sentence: {sentence}"
    assert list(found.groups()) == expected


def test_readme_and_results_count_the_runs_alike():
    counts = {
        page: re.findall(r"some (\d+) runs", words(page), flags=re.IGNORECASE)
        for page in ("README.md", "CHANGELOG.md", "docs/results.md")
    }
    assert len({tuple(set(found)) for found in counts.values()}) == 1, counts


def test_readme_states_the_ratios_of_the_page_of_performance():
    sampling, whole = (
        tables("docs/performance.md", "## Sampling")[0],
        tables("docs/performance.md", "## A whole step")[0],
    )
    rows_256 = {r["shape"]: re.match(r"[\d.]+", r["ours against vLLM"])[0] for r in sampling if r["load"] == "256 rows"}
    steps = sorted(float(r["ratio"].strip("*×")) for r in whole)
    found = re.search(
        r"is ([\d.]+) \(7B\) to ([\d.]+) times \(135M\) as fast as vLLM [\d.]+, and a whole step is ([\d.]+) to "
        r"([\d.]+) times",
        words("README.md"),
    )
    assert found
    assert [float(value) for value in found.groups()] == [
        round(float(rows_256["7B"]), 1), float(rows_256["135M"]), steps[0], steps[-1],
    ]  # fmt: skip


def test_readme_promises_of_the_first_run_what_the_quickstart_shows():
    before, low, high = re.search(r"goes from ([\d.]+) to ([\d.]+)–([\d.]+)", words("README.md")).groups()
    shown = re.search(r"avg@8 +([\d.]+) +\[[^\]]+\] +([\d.]+)", (ROOT / "docs/quickstart.md").read_text())
    assert float(before) == round(float(shown[1]), 2)
    assert float(low) <= float(shown[2]) <= float(high)
    said = re.search(r"avg@8 ended at (\.\d+) to (\.\d+) and pass@8 at (\.\d+) to (\.\d+)", words("docs/quickstart.md"))
    assert [float(value) for value in said.groups()[:2]] == [float(low), float(high)]
    passed = re.search(r"pass@8 +([\d.]+) +\[[^\]]+\] +([\d.]+)", (ROOT / "docs/quickstart.md").read_text())
    assert float(said[3]) <= float(passed[2]) <= float(said[4])
