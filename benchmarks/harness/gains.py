"""Is it for me? Recorded gains by density and kind of network, recorded pipelines, what moves in films: the tables of
docs/is_it_for_me.md, and what `sbnet density` knows (sbnet/apps/gains.json), both made by `sbnet bench --docs`.

python -m sbnet.benchmarks.harness.gains street.mp4 --mask motion:20 -o benchmarks/results/pipelines/density.jsonl

records what a mask makes active of a source.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sbnet.apps.density import Curve, measure
from sbnet.benchmarks.harness.document import markdown
from sbnet.benchmarks.harness.measure import Row, Session, keep_row, made_by
from sbnet.benchmarks.harness.readme import MASKS, filled
from sbnet.benchmarks.harness.report import cell

# Where the rows of a kind stand: the file's stem, facts of its rows, what to call it.
KINDS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("cpu_network", {"network": "four 3x3, 64 channels"}, "four 3x3 layers, 64 channels"),
    ("cpu_network", {"network": "contour_net"}, "contours: four 3x3 layers and a head"),
    ("cpu_network_avx2", {"network": "contour_net"}, "contours"),
    ("cpu_sparsify", {"network": "repvgg_a0"}, "3x3 with strides: RepVGG-A0"),
    ("epyc_onnxruntime", {"of": "SparseResNet-18, no head"}, "residual, 3x3: ResNet-18"),
    ("epyc_onnxruntime", {"of": "SparseResNet-50, no head"}, "residual, 1x1 and 3x3: ResNet-50"),
    ("cpu_sparsify", {"network": "YOLOv8n-like"}, "narrow detector: like YOLOv8n"),
    ("cpu_sparsify", {"network": "mobilenet_v2"}, "depthwise: MobileNetV2"),
    ("h200", {"network": "contour_net", "dtype": "float16"}, "contours"),
    ("h200_sparsify", {"network": "SRVGG"}, "upscaler: SRVGG"),
    ("h200_sparsify", {"network": "U-Net"}, "U-Net"),
    ("h200_network", {"of": "SparseResNet-50, no head", "size": [1, 1024, 1024]}, "residual: ResNet-50, 1024x1024"),
    ("h200_sparsify", {"network": "FPN-ResNet-50"}, "FPN on ResNet-50"),
    ("h200_sparsify", {"network": "YOLOv8n-like"}, "narrow detector: like YOLOv8n"),
    ("h200_sparsify", {"network": "mobilenet_v3_large"}, "depthwise: MobileNetV3"),
)
COLUMNS = ((0.0, 0.02, "1 %"), (0.04, 0.06, "5 %"), (0.08, 0.12, "10 %"), (0.24, 0.31, "25 to 30 %"),
           (0.45, 0.55, "50 %"), (0.99, 1.0, "all"))  # fmt: skip


def curves(sessions: Mapping[str, Session]) -> list[Curve]:
    """Of each kind its points, the slowest mask of each density; sessions by the stem of their file."""
    return [curve(sessions[stem], facts, like) for stem, facts, like in KINDS]


def curve(session: Session, facts: dict[str, Any], like: str) -> Curve:
    rows = [r for r in session.rows if r["group"] == "network" and facts.items() <= r["facts"].items()]
    rows = [r for r in rows if "x dense" in r and r["name"] != "ONNX Runtime"]
    points: dict[float, float] = {}
    for row in rows:
        at = round(float(row.get("density", row["facts"].get("wanted density", -1.0))), 4)
        points[at] = min(points.get(at, row["x dense"]), row["x dense"])
    if len(points) < 2:
        raise ValueError(f"gains: {like}: expected rows of two densities at least, got {len(points)}")
    dtypes = sorted({r["facts"]["dtype"] for r in rows})
    e = session.environment
    return Curve(like, machine(e), ", ".join(dtypes), e["date"], sorted(points.items()))


def machine(environment: Mapping[str, Any]) -> str:
    cores = f", {environment['threads']} cores" if "threads" in environment else ""
    kind = f" ({environment['instructions']})" if "instructions" in environment else ""
    return f"{environment['device']}{kind}{cores}"


MEASURED = "measured on (empty: as above)"


def _said_once(lines: list[list[str]]) -> list[list[str]]:
    """Of neighbouring lines that end with the same machine and date, the first alone names them."""
    before = ["", *(line[-1] for line in lines)]
    return [[*line[:-1], "" if line[-1] == last else line[-1]] for line, last in zip(lines, before, strict=False)]


def curve_table(found: Iterable[Curve]) -> str:
    """Measured points alone, in the column that they are nearest to."""
    by_machine: dict[str, list[Curve]] = {}
    for one in found:
        by_machine.setdefault(f"{one.device}, {one.dtype}, {one.date}", []).append(one)
    lines = []
    for where, listed in by_machine.items():
        for one in listed:
            cells = []
            for low, high, _ in COLUMNS:
                gains = [gain for at, gain in one.points if low < at <= high]
                cells.append(f"{cell(min(gains))}x" if gains else "")
            lines.append([one.like, *cells, where])
    return markdown(["active blocks", *(name for *_, name in COLUMNS), MEASURED], _said_once(lines))


def pipeline_table(rows: Iterable[Row]) -> str:
    """From reading to writing, the fastest dense form likewise; and what the mask takes of a frame's time on a CPU. Of
    rows of one device that differ in its instructions alone, the fastest."""
    fastest: dict[tuple[Any, ...], Row] = {}
    for row in sorted(rows, key=lambda row: row["fps"]):
        fastest[row["device"], row["network"], row["source"], bool(row["to"])] = row
    lines = []
    for row in sorted(fastest.values(), key=lambda row: (row["device"], -row["end to end"])):
        share = row.get("mask share", {}).get("all")
        (dtype,) = re.findall(r", (\w+) on ", row["title"])
        kind = f" ({row['instructions']})" if "instructions" in row else ""
        cores = "" if "NVIDIA" in row["device"] else f"{kind}, {row['threads']} cores"
        lines.append([
            f"`{row['network']}`" + ("" if row["to"] else ", writing nothing"),
            f"{row['source']}, {row['title'].split(': ')[0].rpartition(', ')[2]}",
            percent(row["density"]), cell(row["fps"]), cell(row["dense fps"]),
            f"**{cell(row['end to end'])}x**", _bounds(row), "" if share is None else percent(share),
            f"{row['device']}{cores}, {dtype}, {row['date']}",
        ])  # fmt: skip
    head = ["network", "source", "active", "frames a second", "dense", "end to end", "bound by / dense", "mask's share",
            MEASURED]  # fmt: skip
    return markdown(head, _said_once(lines))


def network_table(sessions: Iterable[Session]) -> str:
    """Whole networks, one image and several a call: times of the fastest dense form over the masked call's."""
    found: dict[tuple[str, tuple[int, int]], dict[int, dict[str, float]]] = {}
    for session in sessions:
        for row in (r for r in session.rows if "x dense" in r):
            batch, *side = row["facts"]["size"]
            of = found.setdefault((row["facts"]["network"], tuple(side)), {})
            of.setdefault(batch, {})[row["facts"]["mask"]] = row["x dense"]
    lines = []
    for (network, side), batches in found.items():
        images = max(batches)
        sides = batches.get(1, {}), batches[images] if images > 1 else {}
        cells = [cell(of[mask]) if mask in of else "" for of in sides for mask in MASKS]
        lines.append([network, "x".join(map(str, side)), *cells[:3], str(images) if images > 1 else "", *cells[3:]])
    one_image = [f"1 image: {title}" if mask == "rect" else title for mask, title in MASKS.items()]
    return markdown(["network", "size", *one_image, "images", *MASKS.values()], lines)


PAYS = 1.2  # times from which on a mask is said to pay


def pays_table(rows: Iterable[Row], cameras: Iterable[Row]) -> str:
    """For which networks and machines a mask pays from end to end: of each network the gains of one source and of
    cameras, the least and the most that was recorded, and at which share of active blocks."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        writing = "" if row["to"] or "NVIDIA" not in row["device"] else ", writing nothing"
        of = found.setdefault(f"`{row['network']}`", {})
        of.setdefault(f"{_short(row['device'])}, one source{writing}", []).append((row["end to end"], row["density"]))
    for row in cameras:
        of, side = found.setdefault(f"`{row['network']}`", {}), row["masked"]
        of.setdefault(f"{_short(row['device'])}, {row['cameras']} cameras of 1080p", []).append(
            (row["x dense"], side["density"])
        )
    machines = sorted({machine for of in found.values() for machine in of})
    lines = []
    for network, of in found.items():
        cells = []
        for machine in machines:
            gains = sorted(of.get(machine, []))
            if not gains:
                cells.append("")
                continue
            (least, _), (most, _) = gains[0], gains[-1]
            said = f"{cell(least)}x" if cell(least) == cell(most) else f"{cell(least)} to {cell(most)}x"
            share = sum(density for _, density in gains) / len(gains)
            verdict = "pays" if least >= PAYS else "hardly" if most < PAYS else "in part"
            cells.append(f"{verdict}: {said} at {percent(share)}")
        lines.append([network, *cells])
    return markdown(["network", *machines], lines)


def _short(device: str) -> str:
    return device.removeprefix("NVIDIA ") if "NVIDIA" in device else "a CPU"


def camera_table(rows: Iterable[Row]) -> str:
    """Cameras from decoding to results, with the dense network beside."""
    lines = []
    for row in sorted(rows, key=lambda row: -row["x dense"]):
        own, whole = row["masked"], row["dense"]
        lines.append([
            f"{row['cameras']} x `{row['network']}`", own["title"].split(": ")[0].rpartition(", ")[2], own["decoder"],
            percent(own["density"]), cell(own["fps"]), cell(whole["fps"]), f"**{cell(row['x dense'])}x**",
            f"{own['cpu']:.2g} / {whole['cpu']:.2g}" if "cpu" in own else "", own["bound"],
            f"{row['device']}, {row['date']}",
        ])  # fmt: skip
    head = ["cameras", "frames", "decoder", "active", "frames a second of all", "dense", "end to end",
            "CPU seconds a thousand frames, both", "bound by", MEASURED]  # fmt: skip
    return markdown(head, _said_once(lines))


def _bounds(row: Row) -> str:
    """The stages that worked longest, of both runs; nothing of GPU rows whose writing held the wait for the device."""
    if "NVIDIA" in row["device"] and "device" not in row["busy"]:
        return ""
    return " / ".join(max(row[name], key=lambda stage: row[name][stage]) for name in ("busy", "dense busy"))


def motion_table(rows: Iterable[Row]) -> str:
    lines = []
    for row in sorted(rows, key=lambda row: row["density"]):
        shares = (row[k] for k in ("density", "density_p10", "density_p90", "whole_frames"))
        lines.append([row["source"], str(row["frames"]), *map(percent, shares)])
    head = [
        "source, mask",
        "frames",
        "active blocks, mean",
        "a tenth of the frames below",
        "nine tenths below",
        "whole frames",
    ]
    return markdown(head, lines)


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def parts(
    sessions: Mapping[str, Session], pipelines: Sequence[Row], films: Iterable[Row], cameras: Sequence[Row]
) -> dict[str, str]:
    """What stands between the marks of docs/is_it_for_me.md."""
    return {
        "pays": pays_table(pipelines, cameras), "gains": curve_table(curves(sessions)),
        "networks": network_table(sessions[stem] for stem in ("h200_whole", "h200_whole_tokens")),
        "pipelines": pipeline_table(pipelines), "cameras": camera_table(cameras), "motion": motion_table(films),
    }  # fmt: skip


def as_json(found: Iterable[Curve]) -> str:
    lines = ",\n".join(f"  {json.dumps(vars(one))}" for one in found)
    return f"[\n{lines}\n]\n"


def load(results: Path) -> tuple[list[Row], list[Row], list[Row]]:
    """Rows of pipelines, of what moves in films, and of cameras."""
    names = "cpu", "h200", "density", "h200_cameras"
    *found, films, cameras = (_lines(results / "pipelines" / f"{name}.jsonl") for name in names)
    pairs = [row for row in cameras if "dense" in row]
    return [row for rows in found for row in rows if "end to end" in row], films, pairs


def _lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(page: Path, stored: Path, sessions: Mapping[str, Session], results: Path) -> None:
    page.write_text(filled(page.read_text(), parts(sessions, *load(results)), page.name, Path(__file__).name))
    stored.write_text(as_json(curves(sessions)))


def row(given: argparse.Namespace) -> Row:
    found = measure(given.source, given.mask, margin=given.margin, limit=given.frames).facts()
    kept = {k: v for k, v in found.items() if k != "device" and not k.endswith(" ms")}  # no speeds
    return {**kept, **made_by(False), "date": datetime.date.today().isoformat()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--mask", default="motion:20")
    parser.add_argument("--margin", type=int, default=0)
    parser.add_argument("--frames", type=int)
    keep_row(row, parser)


if __name__ == "__main__":
    main()
