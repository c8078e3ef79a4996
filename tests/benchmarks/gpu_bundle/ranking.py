"""How well the static model's order is that of the times, and the records of what was measured."""

import datetime
import json

import numpy as np

LEAST = 3
"""Candidates that an order is worth a number of."""


def ranks(values):
    """From 1; equal values share the mean of theirs."""
    ordered, inverse, counts = np.unique(
        np.asarray(values, "float64"), return_inverse=True, return_counts=True
    )
    del ordered
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse.reshape(-1)]


def spearman(first, second):
    """The correlation of ranks; None of fewer than three, or where all of one side are equal."""
    if len(first) < LEAST:
        return None
    a, b = (ranks(side) - (len(side) + 1) / 2 for side in (first, second))
    size = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / size) if size else None


def correlations(manifest, times):
    """Of all timings; of the default tiles, by rows; and of the tiles of one product, by rows."""
    pairs = {}
    for row in times:
        case = case_of(manifest, row)
        estimate = case["estimates"][str(row["rows"])]
        if estimate is None:
            continue
        product = (json.dumps(case["workload"]), row["rows"])
        pair = estimate, row["seconds"]
        pairs.setdefault("all", []).append(pair)
        if case["is_default"]:
            pairs.setdefault(f"default tiles, {row['rows']} rows", []).append(pair)
        pairs.setdefault(product, []).append(pair)
    found = {name: spearman(*zip(*values, strict=True)) for name, values in pairs.items()}
    tiles = {key: value for key, value in found.items() if not isinstance(key, str)}
    result = {key: value for key, value in found.items() if isinstance(key, str)}
    for (workload, rows), value in tiles.items():
        if value is not None:
            parts = json.loads(workload)
            name = f"tiles of {parts['family']} {parts['n']}x{parts['k']}, {rows} rows"
            result[name] = value
    return result


def case_of(manifest, row):
    return next(case for case in manifest["cases"] if case["name"] == row["case"])


def records(manifest, results, multiprocessors):
    """A line of the database by product and range of rows: the fastest tile at its last timing
    whose range of rows is that of the record, beside the default."""
    groups = {}
    for row in results["times"]:
        case = case_of(manifest, row)
        key = json.dumps(case["workload"]), row["bucket"]
        groups.setdefault(key, {}).setdefault(row["rows"], []).append((row, case["is_default"]))
    lines = []
    for (workload, bucket), by_rows in groups.items():
        tried = by_rows[min(by_rows)]
        best = min((row for row, _ in tried), key=lambda row: row["seconds"])
        default = next((row["seconds"] for row, is_default in tried if is_default), None)
        lines.append({
            "format": manifest["record"]["format"],
            "arch": manifest["arch"],
            **json.loads(workload),
            "rows": bucket,
            "parameters": best["tile"],
            "ranked": "measured",
            "device": results["device"],
            "cores": multiprocessors,
            "date": datetime.date.today().isoformat(),
            "tvm": manifest["record"]["tvm"],
            "trials": len(tried),
            "seconds": best["seconds"],
            "default_seconds": default,
            "model": None,
            "ties": 0,
        })  # fmt: skip
    return lines


def write_database(folder, arch, lines):
    """As `sits_tvm.tune` does: a folder for `Config.database`."""
    (folder / arch).mkdir(parents=True, exist_ok=True)
    families = {}
    for line in lines:
        families.setdefault(line["family"], []).append(json.dumps(line) + "\n")
    for family, texts in families.items():
        (folder / arch / f"{family}.jsonl").write_text("".join(texts))
