"""A small terminal: it understands what rich writes, wraps long lines, and reflows them when its width changes."""

import re

TOKEN = re.compile(r"\x1b\[\??([\d;]*)([A-Za-z])|\x1b.|([\r\n])|([^\x1b\r\n]+)", re.S)


class Terminal:
    """Rows of (text, whether the next row goes on with it). The last `height` rows are on the screen."""

    def __init__(self, width, height):
        self.width, self.height = width, height
        self.rows, self.y, self.x = [["", False]], 0, 0

    @property
    def top(self):
        return max(0, len(self.rows) - self.height)

    @property
    def screen(self):
        return [row.rstrip() for row, _ in self.rows[self.top :]]

    def feed(self, data):
        for parameters, code, control, text in TOKEN.findall(data):
            if control == "\r":
                self.x = 0
            elif control == "\n":
                self._down(wrapped=False)
                self.x = 0  # as a terminal driver translates it
            elif text:
                self._write(text)
            elif code == "A":
                self.y = max(self.top, self.y - int(parameters or 1))
            elif code == "H":
                self.y, self.x = self.top, 0
            elif code == "K":
                row = self.rows[self.y][0]
                self.rows[self.y] = ["" if parameters == "2" else row[: self.x], False]
            elif code == "J":
                assert parameters == "", "rows above the cursor must stay"
                self.rows[self.y] = [self.rows[self.y][0][: self.x], False]
                self.rows[self.y + 1 :] = [["", False] for _ in self.rows[self.y + 1 :]]
            else:
                assert code in "mhl", (parameters, code)

    def resize(self, width, height):
        """As most terminals do: lines are wrapped anew, and the cursor stays in its line."""
        lines, cursor = [], None
        for index, (row, wrapped) in enumerate(self.rows):
            if index == 0 or not self.rows[index - 1][1]:
                lines.append("")
            if index == self.y:
                cursor = (len(lines) - 1, len(lines[-1]) + self.x)
            lines[-1] += row if wrapped else row.rstrip()
        self.width, self.height, self.rows = width, height, []
        for number, line in enumerate(lines):
            parts = [line[start : start + width] for start in range(0, max(1, len(line)), width)]
            if number == cursor[0]:
                self.y = len(self.rows) + min(cursor[1] // width, len(parts) - 1)
                self.x = min(cursor[1] % width, width)
            self.rows += [[part, True] for part in parts[:-1]] + [[parts[-1], False]]

    def _write(self, text):
        for letter in text:
            if self.x == self.width:
                self.rows[self.y][1] = True
                self._down(wrapped=True)
                self.x = 0
            row = self.rows[self.y][0].ljust(self.x)
            self.rows[self.y][0] = row[: self.x] + letter + row[self.x + 1 :]
            self.x += 1

    def _down(self, *, wrapped):
        self.rows[self.y][1] = wrapped
        self.y += 1
        if self.y == len(self.rows):
            self.rows.append(["", False])
