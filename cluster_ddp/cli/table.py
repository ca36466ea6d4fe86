"""The table of runs, laid out for a terminal of any width."""

from __future__ import annotations

from collections.abc import Iterator

# What a narrow terminal shows first, after the run and its state; metrics and reasons get the remaining width.
_BY_IMPORTANCE = ("STEP", "JOB", "CHECKPOINT", "GOODPUT", "ATTEMPTS")
_GAP = 2  # between two columns
_MIN_ROOM = 16  # a metric or a reason that is cut shorter is useless


def table(columns: dict[str, list[str]], width: int | None) -> Iterator[str]:
    """Yield the lines of the table; rich takes longer to lay out a thousand lines than it takes to read the runs.

    Parameters
    ----------
    columns
        The cells by heading, each whole and in one line.
    width
        That of the terminal; None to show everything, however long the lines are.
    """
    if width is None:
        widths = {heading: _width(heading, cells) for heading, cells in columns.items()}
    else:
        widths = _fitted(columns, width)
    gap = " " * _GAP
    for cells in zip(*([heading, *columns[heading]] for heading in widths), strict=True):
        yield gap.join(map(_fit, cells, widths.values())).rstrip()


def _fitted(columns: dict[str, list[str]], width: int) -> dict[str, int]:
    """The columns that a terminal of `width` shows, and how wide each is.

    States are shown whole if at all possible, then run ids. Of the other columns, those that are not empty follow as
    far as there is room.
    """
    widths = {"STATE": min(_width("STATE", columns["STATE"]), width)}
    room = width - widths["STATE"]
    widths["RUN"] = max(min(_width("RUN", columns["RUN"]), room - _GAP), 1)
    room -= widths["RUN"] + _GAP
    shown = {heading: _width(heading, cells) for heading, cells in columns.items() if set(cells) - {"", "-"}}
    for heading in _BY_IMPORTANCE:
        if heading in shown and shown[heading] + _GAP <= room:
            widths[heading] = shown[heading]
            room -= shown[heading] + _GAP
    cut = [heading for heading in ("REASON", "METRICS") if heading in shown]
    if room < len(cut) * (_MIN_ROOM + _GAP):
        cut = cut[:1]
    for sharing, heading in zip(range(len(cut), 0, -1), sorted(cut, key=shown.__getitem__), strict=True):
        share = min(shown[heading], room // sharing - _GAP)
        if share >= min(shown[heading], _MIN_ROOM):
            widths[heading] = share
            room -= share + _GAP
    return {heading: widths[heading] for heading in columns if heading in widths}


def _fit(cell: str, width: int) -> str:
    """A cell as wide as its column: filled up, or cut with an ellipsis."""
    if cell.isascii() and len(cell) <= width:
        return cell.ljust(width)
    from rich.cells import set_cell_size

    return set_cell_size(cell, width) if _cells(cell) <= width else set_cell_size(cell, width - 1) + "…"


def _width(heading: str, cells: list[str]) -> int:
    return max(map(_cells, (heading, *cells)))


def _cells(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
