"""What ``profile`` finds, as plain data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tabulate import tabulate

from .tables import Table


@dataclass(frozen=True)
class ProfileRow:
    """One kernel of one call; of converted models, one op.

    Attributes:
        op: path of the op it belongs to, as in reports; of torchscript models, torch's name of the kernel.
        kernel: what computes: oneDNN's name of the implementation, torch's of the function, or the report's words.
        computes: in words, what is fused included.
        shape: of its result.
        microseconds: the least of some executions.
        gops: billions of operations a second, two for each multiply-accumulate; None where they do not count.
        share: of the whole, 0 to 1.
        conversion: of converted models, how many of ``microseconds`` turn float into integers and back.
    """

    op: str
    kernel: str
    computes: str
    shape: tuple[int, ...]
    microseconds: float
    gops: float | None
    share: float
    conversion: float = 0.0


@dataclass(frozen=True)
class Profile(Table):
    """Kernels in the order in which they run. ``str()`` is a table, with a line for each kind of kernel below.

    Attributes:
        whole: of converted models, microseconds of a call, of each part the least of some; else None.
        spent: of converted models, what a call does -> microseconds, all of ``whole``.
        why: of converted models, why they are slow, in sentences, what takes longest first.
    """

    rows: tuple[ProfileRow, ...]
    whole: float | None = None
    spent: Mapping[str, float] = field(default_factory=dict)
    why: tuple[str, ...] = ()

    @property
    def microseconds(self) -> float:
        """Of all kernels together."""
        return sum(row.microseconds for row in self.rows)

    def shares(self) -> dict[str, float]:
        """Path of an op -> its share of the time of all."""
        found: dict[str, float] = defaultdict(float)
        for row in self.rows:
            found[row.op] += row.share
        return dict(found)

    def head(self) -> list[str]:
        return ["op", "computes", "kernel", "shape", "us", "GOP/s", "share"]

    def cells(self, row: ProfileRow) -> list[str]:
        return [
            row.op, row.computes, row.kernel, "x".join(map(str, row.shape)), f"{row.microseconds:.1f}",
            "" if row.gops is None else f"{row.gops:.0f}", f"{row.share:.1%}",
        ]  # fmt: skip

    def title(self) -> str:
        return f"{self.microseconds:.0f} us in {len(self.rows)} {'ops' if self.spent else 'kernels'}"

    def __str__(self) -> str:
        kinds: dict[str, float] = defaultdict(float)
        for row in self.rows:
            kinds[row.computes] += row.share
        by_kind = [[kind, f"{share:.1%}"] for kind, share in sorted(kinds.items(), key=lambda item: -item[1])]
        parts = [self.table(), tabulate(by_kind, ["computes", "share"])]
        if self.whole and self.spent:
            spent = [[what, f"{us:.0f}", f"{us / self.whole:.1%}"] for what, us in self.spent.items()]
            parts.append(tabulate(spent, ["what a call does", "us", "share"], disable_numparse=True))
        parts.append(self.title() + (f"; a call takes {self.whole:.0f} us" if self.whole else ""))
        if self.why:
            parts.append("why it is not faster\n" + "\n".join(f"- {sentence}" for sentence in self.why))
        return "\n\n".join(parts)


def profile_of(found: Sequence[tuple], **more: Any) -> Profile:
    """A profile of tuples (op, kernel, what it computes, shape, microseconds, multiply-accumulates, and perhaps
    microseconds of conversion).
    """
    total = sum(row[4] for row in found) or 1.0
    return Profile(tuple(
        ProfileRow(op, kernel, computes, shape, us, 2e-3 * macs / us if macs and us else None, us / total, *conversion)
        for op, kernel, computes, shape, us, macs, *conversion in found
    ), **more)  # fmt: skip
