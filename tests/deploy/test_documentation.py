"""docs/telemetry.md names every metric with its labels, and no other."""

import re
from pathlib import Path

from everything import everything

DOCS = Path(__file__).parents[2] / "docs" / "telemetry.md"
OF_ITS_OWN = {"le", "quantile"}


def documented():
    """Names of samples (of histograms and summaries: of the family) → names of labels, from the table."""
    table = {}
    section = DOCS.read_text().partition("## Metrics")[2].partition("\n## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3:
            labels = {label.strip() for label in cells[1].split(",") if label.strip()}
            for name in re.findall(r"`(\w+)`", cells[0]):
                assert name not in table, f"{name} is there twice"
                table[name] = labels
    return table


def in_the_code():
    found = {}
    for family in everything().snapshot().collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        assert family.samples, f"{family.name} has no sample: `everything` does not count it"
        found[name] = {label for sample in family.samples for label in sample.labels} - OF_ITS_OWN
    return found


def test_the_table_of_metrics_is_what_a_scrape_shows():
    assert documented() == in_the_code()


def test_hyperpods_names_are_named():
    text = DOCS.read_text()
    plain = {family.name for family in everything().snapshot().collect()}
    for family in everything(hyperpod={}).snapshot().collect():
        if family.name not in plain:
            assert f"`{family.name}{'_total' if family.type == 'counter' else ''}`" in text
