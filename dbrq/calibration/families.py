"""Values that share what is known of them, because ops that pass elements on lie between."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from ..mappings import Role
from ..record.record import Record, SeenOp


def root_of(parents: dict[int, int], vid: int) -> int:
    """The value that stands for all that ``vid`` was joined with."""
    root = vid
    while root in parents:
        root = parents[root]
    while vid != root:  # shorten the way for those who come after
        parents[vid], vid = root, parents[vid]
    return root


class Families:
    """Values that are moved from one another, and the ops around them: what one of them is, depends on the others.

    Attributes:
        used: values that are outputs, or that something reads which is not merely moving them about for nobody.
    """

    def __init__(self, record: Record) -> None:
        self._parents: dict[int, int] = {}
        moved_from: dict[int, list[int]] = defaultdict(list)
        for vid, value in record.values.items():
            if value.origin is not None:
                self._join(vid, value.origin)
            for op in value.readers:
                for other in op.outputs if op.row.role is Role.PASS else ():
                    if other.id != vid:
                        self._join(vid, other.id)
                        moved_from[other.id].append(vid)
        self.used: set[int] = set()
        waiting = [
            vid
            for vid, value in record.values.items()
            if value.is_output or any(op.row.role is not Role.PASS for op in value.readers)
        ]
        while waiting:
            vid = waiting.pop()
            if vid not in self.used:
                self.used.add(vid)
                waiting += moved_from[vid]
        self._members: dict[int, list[int]] = defaultdict(list)
        self._ops: dict[int, dict[SeenOp, None]] = defaultdict(dict)
        for vid in sorted(record.values):
            value, root = record.values[vid], root_of(self._parents, vid)
            self._members[root].append(vid)
            self._ops[root].update(dict.fromkeys(value.readers))
            if value.producer is not None:
                self._ops[root][value.producer] = None
        self._known: set[int] = set()

    def _join(self, one: int, other: int) -> None:
        one, other = root_of(self._parents, one), root_of(self._parents, other)
        if one != other:
            self._parents[max(one, other)] = min(one, other)

    def know(self, vid: int, find: Callable[[list[int]], None]) -> None:
        """Call ``find`` for the family of a value, in order of appearance, unless that was done."""
        root = root_of(self._parents, vid)
        if root not in self._known:
            self._known.add(root)
            find(self._members[root])

    def forget(self, vid: int) -> None:
        self._known.discard(root_of(self._parents, vid))

    def touch(self, vid: int) -> Iterable[SeenOp]:
        """The ops around a family, of which something has changed."""
        self.forget(vid)
        return self._ops[root_of(self._parents, vid)]
