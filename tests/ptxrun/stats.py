"""What a launch did: bytes, access widths, counts."""

from __future__ import annotations

from collections import Counter


class Stats:
    """Counts of one launch.

    Attributes:
        global_read, global_written: bytes; an atomic counts as both.
        atomics: lanes that did an atomic.
        steps: instructions issued (each for a group of lanes).
        lane_insts: instructions times lanes.
        per_line: {(line, text): a dict of line, text, space, rw, width, lanes, bytes, sectors} of each memory access.
        approx: Counter of the .approx and .full operations that ran. A GPU is off by an ulp or two there, the
            interpreter is not: a test that claims bitwise results asserts that this is empty.
        warnings: Counter of what is legal but odd.
    """

    def __init__(self):
        self.global_read = self.global_written = self.atomics = self.steps = self.lane_insts = 0
        self.per_line, self.approx, self.warnings = {}, Counter(), Counter()

    def access(self, ins, space, rw, width, lanes):
        """Counts an access of ``width`` bytes by each of ``lanes`` lanes; returns its row of ``per_line``."""
        key = ins.line, ins.text
        row = self.per_line.get(key)
        if row is None:
            row = {"line": ins.line, "text": ins.text, "space": space, "rw": rw, "width": width}
            row |= {"lanes": 0, "bytes": 0, "sectors": 0}
            self.per_line[key] = row
        row["lanes"] += lanes
        row["bytes"] += lanes * width
        if space == "global":
            self.global_read += lanes * width if "r" in rw else 0
            self.global_written += lanes * width if "w" in rw else 0
        return row

    def widths(self, space="global"):
        """{(rw, bytes a lane): bytes in all}, rw being r, w or (for atomics) rw."""
        out = Counter()
        for row in self.per_line.values():
            if row["space"] == space:
                out[row["rw"], row["width"]] += row["bytes"]
        return dict(out)
