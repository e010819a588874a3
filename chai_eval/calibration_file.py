"""The format in which calibration hands on what it found out about a model: written, found, checked and read here.

A calibration is a folder with `calibration.json` (what was done, for which model, with which counts) and
`calibration.safetensors` (what was found). A user's own lie under `<cache>/calibration/<model>/` and are looked for
first; those that ship with the project, under `conf/calibration/<model>/`, leave DejaVu's predictors out.

Tensors, for L layers and H heads; where a dimension counts clusters, column k - 1 is that of k clusters:

- `static_membership.<preset>`: [L, H], int64, for each head the lowest head of its cluster
- `output_aware.<preset>`: [L, H], int64, for each head the head that serves it
- `head_importance`: [L, H], mean squared norm of what each head adds to the layer's output
- `output_cost`: [L, H, H], what it costs that head r (last dimension) serves head i
- `kept_kv_heads`: [L, clusters], K heads that CHAI's representatives need
- `distance.last_row`, `distance.probe`: [L, H, H], mean cosine distances of heads' attention
- `error_curves`: [L, clusters], squared distances to the clusters' means
- `predicted_divergence`, `predicted_divergence.output_aware`: [L, clusters], KL divergence in nats per token
- `predictor.<layer>.down`, `predictor.<layer>.up`: [1000, hidden] and [H, 1000], DejaVu's

What `kv_rank` and `layer_share` read is a pair of files of its own in the same folder, `moments.json` and
`moments.safetensors`:

- `query`, `pull`, `gradient`, `output`: [L, H_kv, n (n + 1) / 2], factors of second moments (`calibration.moments`)
- `scale`: [4, L, H_kv], what those factors are multiplied with
- `layer_share`: [L], KL divergence in nats per token where the layer takes the probabilities of the one before
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from chai_eval.checksum import DamagedError, Document, read_document, say_unchecked, write_document
from chai_eval.data.assets import cache_dir
from chai_eval.errors import SettingError
from chai_eval.files import disk_errors, write_whole
from chai_eval.models.fingerprint import identity
from chai_eval.resources import conf_dir

LAYOUT = 1
# Names of the pairs of files, without what comes after the dot.
CLUSTERS, MOMENTS = "calibration", "moments"
DESCRIPTION, TENSORS = f"{CLUSTERS}.json", f"{CLUSTERS}.safetensors"
Preset = Literal["conservative", "balanced", "aggressive"]
PRESETS: tuple[Preset, ...] = get_args(Preset)
COMMAND = "python -m chai_eval calibrate model="


def write_calibration(
    folder: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor], stem: str = CLUSTERS
) -> None:
    """Write a calibration in place of an older one, with checksums of both files.

    The description goes last. Until it does, an older one refuses the new tensors by their checksum. RunError for a
    full disk, or a folder that can't be written.
    """
    saved, name = save({name: each.contiguous() for name, each in tensors.items()}), f"{stem}.safetensors"
    with disk_errors(f"out: {folder} can't be written"):
        write_whole(folder / name, saved)
        described = {"layout": LAYOUT, **description}
        write_document(folder / f"{stem}.json", described, {name: hashlib.sha256(saved).hexdigest()})


def runs(counts: Sequence[int]) -> list[list[int]]:
    """Counts of all layers as a run-length list of [count, layers], as `calibration.json` has them."""
    return [[count, len(list(run))] for count, run in groupby(counts)]


@dataclass(frozen=True)
class Calibration:
    """A calibration on the disk, opened: `calibration.json`, with the checksum of the tensors, as its `document`.

    `setting` is the one that named it, for messages; `stem` says which pair of files: `CLUSTERS` or `MOMENTS`.
    """

    folder: Path
    document: Document
    setting: str
    stem: str = CLUSTERS

    @property
    def description(self) -> Mapping[str, Any]:
        """`calibration.json` without its checksums."""
        return self.document.content

    @cached_property
    def sha256(self) -> str:
        """Of what it says and of its tensors, in hex: the same whether it has checksums or not.

        SettingError where the tensors are not those that it names.
        """
        said = hashlib.sha256(json.dumps(self.description, indent=1).encode() + b"\n")
        return hashlib.sha256(said.digest() + bytes.fromhex(self._checked[1])).hexdigest()

    def tensor(self, name: str) -> Tensor:
        """A tensor of the file, on the CPU; SettingError where it isn't there, or the file can't be read."""
        if not self.has(name):
            made_for = self.description["model"].get("name", "…")
            raise SettingError(f"{self.setting}: calibration {self.folder} has no {name}; {_made_by(made_for)}")
        with self._opened() as opened:
            return opened.get_tensor(name)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name; raises where the file can't be read."""
        with self._opened() as opened:
            return name in opened.keys()  # noqa: SIM118 - not a mapping

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        file = self._checked[0]
        try:
            with safe_open(file, "pt") as opened:
                yield opened
        except Exception as error:  # without checksums the file may hold anything
            raise _unreadable(self.setting, file, error) from error

    def membership(self, kind: str, preset: str) -> list[list[int]]:
        """For each layer and head a head of its cluster, by the kind of membership; raises as `tensor` does."""
        return self.tensor(f"{kind}.{preset}").tolist()

    def predictor(self, layer: int) -> tuple[Tensor, Tensor]:
        """The two matrices of a layer's predictor, [1000, hidden] and [heads, 1000]; raises as `tensor` does."""
        return self.tensor(f"predictor.{layer}.down"), self.tensor(f"predictor.{layer}.up")

    @cached_property
    def _checked(self) -> tuple[Path, str]:
        """The file of the tensors, which has been checked, and its sha256."""
        file = self.folder / f"{self.stem}.safetensors"
        try:
            return file, self.document.check(self.folder, file.name)
        except (DamagedError, OSError) as error:
            raise _unreadable(self.setting, file, error) from error

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a calibration that was made for another model, by a SettingError that names both."""
        made_for, given = self.description["model"], identity(model)
        differing = [key for key in given if key in made_for and made_for[key] != given[key]]
        if differing:
            theirs, ours = ({key: each[key] for key in differing} for each in (made_for, given))
            raise SettingError(
                f"{self.setting}: calibration {self.folder} was made for {_named(made_for, theirs)}, the model is "
                f"{_named(given, ours)}; {_made_by('…')}"
            )


def _roots() -> list[Path]:
    """Where calibrations lie, in the order in which they are looked for."""
    return [cache_dir() / "calibration", conf_dir() / "calibration"]


def calibrated_presets() -> dict[str, list[list[int]]]:
    """Run-length lists of undamaged calibrations, as `<model>-balanced`; a user's own go before those we ship."""
    found: dict[str, list[list[int]]] = {}
    for root in reversed(_roots()):
        for file in sorted(root.glob(f"*/{DESCRIPTION}")):
            with suppress(ValueError, KeyError, TypeError, AttributeError, OSError, DamagedError):
                presets = read_document(file).content["presets"]
                found |= {f"{file.parent.name}-{preset}": each["clusters"] for preset, each in presets.items()}
    return found


def check_description(model: str, setting: str) -> None:
    """Refuse (SettingError) a damaged description of a model's calibration, if any: another would give other counts."""
    files = (file for root in _roots() for file in root.glob(f"*/{DESCRIPTION}") if file.parent.name == model)
    if file := next(files, None):
        _read_description(file, setting)


def _read_description(file: Path, setting: str) -> Document:
    try:
        document = read_document(file)
    except (DamagedError, OSError) as error:
        raise _unreadable(setting, file, error) from error
    if document.files is None:
        say_unchecked("calibrations")
    return document


def calibration(name_or_path: str, setting: str = "calibration", stem: str = CLUSTERS) -> Calibration:
    """Open a calibration by a model's name, a folder, or the `calibration.json` in it; the rest is as it has it.

    SettingError where there is none, or it can't be read.
    """
    given = Path(name_or_path).expanduser()
    folders = [given.parent if given.suffix in (".json", ".safetensors") else given]
    if len(given.parts) == 1 and not given.suffix:
        folders = [root / name_or_path for root in _roots()] + folders
    folder = next((each for each in folders if (each / f"{stem}.json").is_file()), None)
    if folder is None:
        what = "no calibration" if stem == CLUSTERS else f"no {stem} in a calibration"
        raise SettingError(f"{setting}: {what} {name_or_path!r}; {_made_by(name_or_path)}")
    file = folder / f"{stem}.json"
    document = _read_description(file, setting)
    if document.content.get("layout") != LAYOUT or not isinstance(document.content.get("model"), dict):
        raise SettingError(f"{setting}: {file} is no calibration of layout {LAYOUT}; {_made_by('…')}")
    return Calibration(folder, document, setting, stem)


def _unreadable(setting: str, file: Path, error: Exception) -> SettingError:
    one_line = " ".join(str(error).split())
    said = one_line if isinstance(error, DamagedError) else f"{file} can't be read ({one_line[:200]})"
    return SettingError(f"{setting}: {said}; {_made_by('…')}")


def _made_by(model: str) -> str:
    return f"allowed: a calibration of this model, made by `{COMMAND}{model if '/' not in model else '…'}`"


def _named(model: Mapping[str, Any], differing: Mapping[str, Any]) -> str:
    name = model.get("name") or model.get("model_type", "a model")
    return f"{name} ({', '.join(f'{key} {value}' for key, value in differing.items())})"
