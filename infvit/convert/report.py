"""What a conversion did to each module of attention."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One module: its path, the name of its class, and what was done or why not."""

    name: str
    kind: str
    note: str = ""


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` did; `str(report)` is a table.

    Attributes:
        mechanism: name of the mechanism.
        converted: modules that have it now.
        kept: modules that could have been converted and were not: not asked for, or converted before.
        refused: modules that cannot be converted exactly, each with the reason.
        copied: whether the model is a copy of the one that was given.
        warnings: what the user should know before training.
    """

    mechanism: str
    converted: tuple[Entry, ...] = ()
    kept: tuple[Entry, ...] = ()
    refused: tuple[Entry, ...] = ()
    copied: bool = True
    warnings: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        counts = f"{len(self.converted)} converted, {len(self.kept)} kept, {len(self.refused)} refused"
        rows = [
            (what, entry.name or "(the model)", entry.kind, entry.note)
            for what in ("converted", "kept", "refused")
            for entry in getattr(self, what)
        ]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = [f"{self.mechanism}: {counts}; {'a copy of the model' if self.copied else 'in place'}"]
        for row in rows:
            lines.append("  " + "  ".join(x.ljust(w) for x, w in zip(row, (*widths, 0), strict=True)).rstrip())
        return "\n".join([*lines, *(f"  note: {text}" for text in self.warnings)])
