"""docs/faults.md from what was measured: `python tests/cluster/fault_page.py build/chaos/faults` after `make chaos`.

What was measured is kept in fault_results.json beside this file; a fault that was not run again keeps its figures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fault_rows import ROWS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
RESULTS = Path(__file__).with_name("fault_results.json")
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
_HEAD = "| fault | what follows | ends as | attempts | steps again | seconds |\n|---|---|---|---|---|---|\n"

Results = dict[str, dict[str, Any]]


def table(results: Results) -> str:
    """The table: a row for each fault, the figures of sbatch and of submitit beside each other."""
    lines = []
    for name, row in ROWS.items():
        found = [results.get(f"{name}: {via}") for via in ("sbatch", "submitit")]
        lost, seconds = (" · ".join(_figure(result, key) for result in found) for key in ("lost", "seconds"))
        lines.append(f"| {name} | {row.follows} | {row.state} | {row.attempts} | {lost} | {seconds} |\n")
    return _HEAD + "".join(lines)


def read_results() -> Results:
    """What was measured so far, by fault and way."""
    results: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return results


def page_with(text: str, table: str) -> str:
    """The page with this table in the place of its own."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table + END + rest.split(END)[1]


def _figure(result: dict[str, Any] | None, key: str) -> str:
    if result is None or result[key] is None:
        return "–"
    return f"{result[key]:.0f}"


def main(folder: Path) -> None:
    """Take in the results of a run, and rewrite the page."""
    results = read_results()
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text())
        results[f"{result['fault']}: {result['via']}"] = {key: result[key] for key in ("lost", "seconds", "slurm")}
    known = {name: results[name] for name in sorted(results) if name.rsplit(": ", 1)[0] in ROWS}
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    PAGE.write_text(page_with(PAGE.read_text(), table(known)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
