"""One HTML file that shows what runs did: the overview table, the paper's figures from our own metrics, the responses.

    write_report([Path("runs/quick")], Path("report.html"))

Nothing here computes what a run should have logged, and nothing imports torch. The page draws from the values embedded
in it, so a report can be read without the run directories.
"""

from bapo.report.arms import Arm, Found, find
from bapo.report.page import contents, write_report

__all__ = ["Arm", "Found", "contents", "find", "write_report"]
