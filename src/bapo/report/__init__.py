"""One HTML file that shows what runs did: the overview table, the paper's figures from our own metrics, the responses.

    write_report([Path("runs/quick")], Path("report.html"))

command.py   the arguments of `bapo report`, and what it prints
arms.py      run directories -> arms: runs that differ only by seed, with labels
table.py     arms -> the overview, mean and interval over seeds
figures.py   arms -> the figures, as plain values; which metric each curve is, and its caption
sft.py       the same two for runs of `bapo sft`
samples.py   responses at the start, in the middle and at the end of a run
page.py      all of it as one file: values, style, script and plotly.js inline; no network
live.py      the same page, following runs that are still going on
page.css, page.js   how it looks, and how values become plots

Nothing here computes what a run should have logged, and nothing imports torch. The page draws from the values embedded
in it, so a report can be read without the run directories.
"""

from bapo.report.arms import Arm, Found, find
from bapo.report.page import contents, write_report

__all__ = ["Arm", "Found", "contents", "find", "write_report"]
