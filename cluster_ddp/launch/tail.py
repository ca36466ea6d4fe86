"""Following a growing log file."""

from __future__ import annotations

from pathlib import Path


class Tail:
    """Reads what is appended to a file, whole lines at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""

    def lines(self, *, rest: bool = False) -> list[str]:
        """The lines that came since the last call, with `rest` also one without an end; none where there is no file."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return []
        self._offset += len(new)
        *whole, self._rest = (self._rest + new).split(b"\n")
        if rest and self._rest:
            whole.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in whole]
