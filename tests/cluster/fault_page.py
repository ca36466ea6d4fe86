"""docs/faults.md from what was measured: `python tests/cluster/fault_page.py build/chaos/faults` after `make chaos`.

What was measured is kept in fault_results.json beside this file, by version of Slurm; a fault that was not run again
keeps its figures. With TEST_SLURM=/opt/slurm-26.05 the same faults are struck on another Slurm.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fault_rows import ROWS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
RESULTS = Path(__file__).with_name("fault_results.json")
VERSIONS = ("22.05", "24.05", "26.05")
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
_HEAD = "fault", "what follows", "ends as", "attempts", "steps repeated", *(f"s, {version}" for version in VERSIONS)
_NOT_RUN, _NONE = "?", "–"

Results = dict[str, dict[str, dict[str, Any]]]
"""By version of Slurm, then by fault and way."""


def table(results: Results) -> str:
    """The table: a row for each fault, the figures of sbatch and of submitit beside each other."""
    lines = [_line(_HEAD), _line(("---",) * len(_HEAD)).replace(" ", "")]
    for name, row in ROWS.items():
        cases = [f"{name}: {via}" for via in row.ways]
        again = _figures([_most_lost(results, case) for case in cases])
        seconds = [_figures([_seconds(results, version, case) for case in cases]) for version in VERSIONS]
        lines.append(_line((name, row.follows, row.state, str(row.attempts), again, *seconds)))
    return "".join(lines)


def read_results() -> Results:
    """What was measured so far."""
    results: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return results


def page_with(text: str, table: str) -> str:
    """The page with this table in the place of its own."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table + END + rest.split(END)[1]


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _figures(ways: list[str]) -> str:
    return ways[0] if set(ways) in ({_NOT_RUN}, {_NONE}) else " · ".join(ways)


def _most_lost(results: Results, case: str) -> str:
    """The steps trained again, at most of all versions."""
    lost = [found[case]["lost"] for found in results.values() if case in found]
    return str(max(lost)) if lost else _NOT_RUN


def _seconds(results: Results, version: str, case: str) -> str:
    result = results.get(version, {}).get(case)
    if result is None:
        return _NOT_RUN
    return _NONE if result["seconds"] is None else f"{result['seconds']:.0f}"


def main(folder: Path) -> None:
    """Take in the results of a run, and rewrite the page."""
    results = read_results()
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text())
        case = f"{result['fault']}: {result['via']}"
        results.setdefault(result["slurm"], {})[case] = {key: result[key] for key in ("lost", "seconds")}
    for version, found in results.items():
        results[version] = {case: found[case] for case in sorted(found) if case.rsplit(": ", 1)[0] in ROWS}
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page_with(PAGE.read_text(), table(results)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
