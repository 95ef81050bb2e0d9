"""The recorded paths through a module, and how far one call of it has come on one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ..mappings import OpRow
from ..record.callsite import chain_of_spots, spot
from ..record.record import Place, SeenOp
from .interfaces import Hook, State

#: A loop that runs on is looked ahead for this many ops at most.
_AHEAD = 64


class PathState(State, Protocol):
    """The state of a module, as its paths ask it."""

    def any_hooks(self) -> dict[Place, tuple[list[Hook], int]]: ...

    def places_of_leaf(self, path: str) -> list[Place]: ...

    def places_of_function(self, row: OpRow, bound: list[Any] | None) -> list[Place]: ...

    def check_end(self, last: SeenOp | None, expected: SeenOp | None) -> None: ...


class Came:
    """The places that a run came through in one call of a module, in any order.

    Attributes:
        counts: how often through each.
    """

    __slots__ = ("_hashes", "_number", "counts")

    def __init__(self) -> None:
        self.counts: Counter[Place] = Counter()
        self._number = self._hashes = 0

    def through(self, hooks: Iterable[Hook]) -> None:
        for hook in hooks:
            place = hook.op.place
            self.counts[place] += 1
            self._number += 1
            self._hashes += hash(place)

    @property
    def key(self) -> tuple[int, int]:
        """Stands for all of ``counts``, whatever their order."""
        return self._number, self._hashes


class Hooks:
    """The op hooks of one call of a module.

    Attributes:
        usual: those of the path that was seen most.
    """

    def __init__(self, state: PathState, paths: Sequence[list[Hook]], usual: int) -> None:
        self.state, self.usual = state, paths[usual] if paths else []
        self._at: dict[tuple[Place, int], dict[tuple[int, int], tuple[list[Hook], int]]] = {}
        for hooks in paths:
            came = Came()
            for position, hook in enumerate(hooks):
                self._at.setdefault((hook.op.place, hook.op.nth), {}).setdefault(came.key, (hooks, position))
                came.through([hook])

    def find(self, place: Place, came: Came) -> tuple[list[Hook], int] | None:
        """Where a run goes on at ``place``: on a recorded path that came through the same; else at that op, whatever
        follows; else, as it was not met so often, in hooks that serve any time and any call.
        """
        known = self._at.get((place, came.counts[place]))
        if known is None:
            return self._on_and_on(place, came.counts.copy())
        found = known.get(came.key)
        if found is None:
            hooks, position = next(iter(known.values()))
            return [hooks[position]], 0
        return found

    def _on_and_on(self, place: Place, counts: Counter[Place]) -> tuple[list[Hook], int] | None:
        """Hooks for a loop that runs on at ``place``, up to what it never ran on to."""
        found = self.state.any_hooks().get(place)
        if found is None:
            return None
        hooks, position = found
        body = []
        for hook in hooks[position : position + _AHEAD]:
            its = hook.op.place
            if (its, counts[its]) in self._at:
                break
            counts[its] += 1
            body.append(hook)
        return body, 0


class Frame:
    """One call of one module in a run: the hooks of the recorded path that it follows, and how far it has come.

    Attributes:
        state: the module's.
        known: the hooks of this call.
        hooks, index: the path followed, and the op expected next.
        start: where the code branched to that path, and ...
        came: ... the places that it came through before, None if it has not branched yet.
        lenient: an op of the kind that is expected will do, wherever in the code it is.
    """

    __slots__ = ("came", "hooks", "index", "known", "lenient", "start", "state")

    def __init__(self, state: PathState, known: Hooks, lenient: bool = False) -> None:
        self.state, self.known, self.lenient = state, known, lenient
        self.hooks, self.index, self.start = known.usual, 0, 0
        self.came: Came | None = None

    def leaf(self, row: OpRow, path: str) -> Hook | None:
        """The hook of a leaf module that runs now; None if it was never recorded."""
        index = self.index
        if index < len(self.hooks):
            hook = self.hooks[index]
            if hook.row is row and hook.module_path == path and (not hook.sited or self._here(hook)):
                self.index = index + 1
                return hook
        found = self._branch(self.state.places_of_leaf(path))
        if found is not None and found.sited:
            self._learn(found)
        return found

    def _here(self, hook: Hook) -> bool:
        """Whether the code that runs now is where the op was met before."""
        return (chain_of_spots() if hook.deep else spot()) in hook.spots

    def _learn(self, hook: Hook) -> None:
        hook.spots.add(chain_of_spots() if hook.deep else spot())

    def function(self, row: OpRow, bound: list[Any] | None) -> Hook | None:
        """The hook of a function that runs now; None if it was never recorded. ``bound``: its arguments, if its row
        takes a weight.
        """
        index = self.index
        if index < len(self.hooks):
            hook = self.hooks[index]
            if (
                hook.row is row
                and hook.module_path is None
                and (chain_of_spots() if hook.deep else spot()) in hook.spots
                and (bound is None or hook.fits(bound))
            ):
                self.index = index + 1
                return hook
        found = self._branch(self.state.places_of_function(row, bound))
        if found is not None:
            self._learn(found)
        elif self.lenient and index < len(self.hooks):
            hook = self.hooks[index]
            if hook.row is row and hook.module_path is None and (bound is None or hook.fits(bound)):
                self.index = index + 1
                return hook
        return found

    def _branch(self, places: list[Place]) -> Hook | None:
        """Go on where one of ``places`` was recorded, if one was."""
        if self.came is None:
            self.came = Came()
        self.came.through(self.hooks[self.start : self.index])
        self.start = self.index
        for place in places:
            found = self.known.find(place, self.came)
            if found is not None:
                self.hooks, self.start = found
                self.index = self.start + 1
                return self.hooks[self.start]
        return None

    def unrecorded(self, op: str, leaf: str | None) -> None:
        """``op`` runs in float, since no recorded path has it here."""
        self.state.unrecorded(op, leaf)

    def finish(self) -> None:
        """The forward is over; in strict models it must have ended where a recorded path does."""
        left = self.index != len(self.hooks)
        if (left or self.hooks is not self.known.usual) and self.state.token.strict:
            last = self.hooks[self.index - 1].op if self.index else None
            self.state.check_end(last, self.hooks[self.index].op if left else None)


class FloatFrame(Frame):
    """One call of one module in a run that is not in int8 at all."""

    __slots__ = ()

    def __init__(self, state: PathState, known: Hooks, lenient: bool = False) -> None:
        super().__init__(state, known, lenient)
        self.hooks = []

    def leaf(self, row: OpRow, path: str) -> Hook | None:
        return None

    def function(self, row: OpRow, bound: list[Any] | None) -> Hook | None:
        return None

    def unrecorded(self, op: str, leaf: str | None) -> None:
        pass

    def finish(self) -> None:
        pass
