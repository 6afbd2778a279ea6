"""What is in the data, as Markdown tables."""

from typing import Any

from stars.options import SPLITS


def tables(schema: dict[str, Any]) -> str:
    """Return tables of the classes, of what is missing, and of what was corrected."""
    options = ", ".join(f"{name} {value}" for name, value in schema["options"].items())
    lines = [f"Made with {options}.", "", "| stars | train | validation | test |", "|---|---|---|---|"]
    counts = schema["stars_by_class"]
    for name in schema["classes"]:
        lines.append(_row(name, [f"{counts[split].get(name, 0):,}" for split in SPLITS]))
    lines.append(_row("all", [f"{schema['stars'][split]:,}" for split in SPLITS]))
    lines += ["", "| MISS tokens | train | validation | test |", "|---|---|---|---|"]
    for place, column in enumerate(schema["columns"]):
        missing = {split: schema["missing_by_column"][split][place] for split in SPLITS}
        if any(missing.values()):
            shares = [f"{missing[split] / schema['stars'][split]:.1%}" for split in SPLITS]
            lines.append(_row(column, shares))
    lines += ["", "| corrected in the catalogue | times |", "|---|---|"]
    lines += [_row(what, [f"{count:,}"]) for what, count in schema["corrected"].items()]
    return "\n".join(lines) + "\n"


def _row(name: str, cells: list[str]) -> str:
    return f"| {' | '.join([name, *cells])} |"
