"""`chai-eval frontier`: KL and same token over bytes held and read, for all methods over their range, in one run."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from chai_eval.calibration.figures import INSTALL, to_be_drawn
from chai_eval.calibration.settings import check_tokens
from chai_eval.checksum import write_document
from chai_eval.data.text import open_text
from chai_eval.errors import RunError
from chai_eval.files import held, write_whole
from chai_eval.frontier.figure import draw, draw_positions
from chai_eval.frontier.points import Point, best_at, points, positions, table
from chai_eval.frontier.settings import FrontierSettings
from chai_eval.markdown import table as lines_of
from chai_eval.models import fingerprint, load
from chai_eval.scoring.compare import HELD_BYTES, LOGITS_BYTES, compare, most_tokens
from chai_eval.scoring.fidelity import read_sequences
from chai_eval.scoring.positions import position_edges, without_bins
from chai_eval.scoring.runner import Runner
from chai_eval.store.code import NumericCode
from chai_eval.store.provenance import versions

# Savings at which a sentence says which method is best.
SAID_AT = (0.1, 0.2, 0.3, 0.5)

log = logging.getLogger("chai_eval")


def frontier(settings: FrontierSettings, command: str) -> Path:
    """Compare all methods over their range and return the folder that was written.

    A kill loses the sequences that were being compared; the same command goes on from there, to the same files.

    Raises
    ------
    SettingError
        Text that isn't there or is too short, sequences longer than the model reads, a calibration that lacks
        something.
    RunError
        The model, the hub or the disk fails, or another process writes to the folder.
    """
    drawn = to_be_drawn(settings.figures)
    text = open_text(settings.text, settings.seed)
    model, tokenizer = load(settings.model)
    check_tokens(settings.tokens, model)
    found = points(model, settings)
    for point in found:
        point.method.check(model)
    sequences = list(read_sequences(model, tokenizer, text.documents, settings.tokens, settings.sequences))
    name = f"{settings.model.name}-{Path(text.name).stem.replace(' ', '_')}-{settings.tokens}"
    edges = position_edges(settings.tokens)
    folder, weights = settings.out or Path("results") / "frontier" / name, fingerprint(model)

    def taken() -> None:
        raise RunError(f"out: another process is writing to {folder}")

    try:
        with held(folder / "frontier.lock", taken):
            parts = folder / f".parts-{_key(weights, found, sequences)}"
            rows = _compared(model, found, sequences, edges, parts)
            frame = table(found, rows)
            said = [each for of in ("held", "read") for at in SAID_AT if (each := best_at(frame, rows, at, of))]
            described = {
                "model": {"name": settings.model.name, "fingerprint": weights},
                "text": text.name,
                "settings": settings.as_config(),
                "best": said,
                "points": json.loads(frame.to_json(orient="records", double_precision=6)),
                "versions": versions(),
                "command": command,
            }
            samples = without_bins(pd.concat(rows, names=["point"]).reset_index(level=0))
            by_bin = positions(found, rows, edges)
            write_whole(folder / "samples.parquet", partial(samples.to_parquet, index=False))
            write_whole(folder / "frontier.csv", frame.to_csv(index=False, float_format="%.6g"))
            write_whole(folder / "positions.csv", by_bin.to_csv(index=False, float_format="%.6g"))
            write_whole(folder / "frontier.md", "\n".join([_shown(frame), *(f"- {each}" for each in said), ""]))
            if drawn:
                title = f"{settings.model.name}, {len(sequences)} × {settings.tokens} tokens"
                draw(frame, title, command, folder)
                draw_positions(by_bin, frame, title, command, folder)
            write_document(folder / "frontier.json", described, files=None)
            shutil.rmtree(parts)
    except OSError as error:
        raise RunError(f"out: {folder} can't be written ({error.strerror or error})") from error
    return folder


def _key(weights: str, found: Sequence[Point], sequences: Sequence[tuple[int, ...]]) -> str:
    """Names what was compared: any other weights, settings, code or text begin anew."""
    code = NumericCode.of()
    scorer = "chai_eval.scoring.compare"
    methods = [[each.label, each.method.settings(), code.version(scorer, *each.method.modules)] for each in found]
    return hashlib.sha256(json.dumps([weights, methods, sequences], default=str).encode()).hexdigest()[:16]


def _compared(
    model: Any, found: Sequence[Point], sequences: Sequence[tuple[int, ...]], edges: Sequence[int], parts: Path
) -> dict[str, pd.DataFrame]:
    """By label, one row a sequence; each part that is finished is on the disk."""
    at_once = max(most_tokens(model, HELD_BYTES) // max(map(len, sequences)), 1)
    methods = {each.label: each.method for each in found}
    done: list[pd.DataFrame] = []
    for number, start in enumerate(range(0, len(sequences), at_once)):
        file, some = parts / f"{number}.parquet", sequences[start : start + at_once]
        if not file.exists():
            log.info("frontier: sequences %d to %d of %d", start + 1, start + len(some), len(sequences))
            runner = Runner(model, batch_tokens=most_tokens(model, LOGITS_BYTES))
            compared = compare(runner, methods, some, edges)
            part = pd.concat({label: pd.DataFrame(rows) for label, rows in compared.items()}, names=["point"])
            write_whole(file, partial(part.reset_index(level=0).to_parquet, index=False))
        done.append(pd.read_parquet(file))
    whole = pd.concat(done, ignore_index=True)
    return {
        str(label): own.drop(columns="point").reset_index(drop=True)
        for label, own in whole.groupby("point", sort=False)
    }


def _shown(frame: pd.DataFrame) -> str:
    lines = [
        {
            "method": each["method"],
            "held (%)": f"{100 * each['held']:.1f}",
            "read (%)": f"{100 * each['read']:.1f}",
            "products (%)": f"{100 * each['multiplications']:.1f}",
            "KL (nats)": f"{each['kl']:.4f}",
            "95 % interval": f"{each['kl_low']:.4f} to {each['kl_high']:.4f}",
            "same token (%)": f"{100 * each['same_token']:.1f}",
            "dominated": "yes" if each["dominated"] else "",
        }
        for each in frame.to_dict("records")
    ]
    return lines_of(lines)


def main(settings: FrontierSettings, command: str) -> None:
    """Make a frontier, print its table and which method is best where; raises as `frontier` does."""
    folder = frontier(settings, command)
    sys.stdout.write((folder / "frontier.md").read_text() + f"\n{folder}\n")
    if settings.figures is None and not to_be_drawn(None):
        sys.stdout.write(f"No figure, for want of matplotlib: {INSTALL}\n")
