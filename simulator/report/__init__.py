"""The replay's report: one HTML file that needs nothing else, to put before a colleague.

* `result`: what of a replay's result is read.
* `axes`, `svg`: scales with ticks, and shapes.
* `plots`: the figures.
* `reading`: a plain sentence for each, and the lead.
* `tables`: all figures of the summaries.
* `page`: the document; `write_html` is all that others need.
"""

from simulator.report.page import write_html

__all__ = ["write_html"]
