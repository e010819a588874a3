"""From what a user types after `python -m chai_eval.calibrate` or `.analyse` to values; every mistake is one line."""

from __future__ import annotations

import logging
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra import compose
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from chai_eval.cli.console import quiet_libraries
from chai_eval.cli.overrides import LAUNCHER, LOCAL, SHORT, added, choices, configuration
from chai_eval.cli.verbatim import verbatim
from chai_eval.errors import RunError, SettingError, failure_line
from chai_eval.resources import conf_dir
from chai_eval.values import unknown

# Their values are taken as they are typed: folders have spaces, brackets and = in their names.
VERBATIM = ("model.path", "model.revision", "model.tokenizer", "text", "out", "calibration")
WIDTH = 110


def run_command(config: str, usage: str, work: Callable[[Mapping[str, Any], Sequence[str]], None]) -> int:
    """Do `work` with the composed values; return the exit status, as `python -m chai_eval` does.

    Parameters
    ----------
    config : str
        Name of a file in `conf/`.
    usage : str
        What `--help` says first.
    work : callable
        Gets the values as plain containers, and the arguments as they were typed.
    """
    arguments = sys.argv[1:]
    if any(each in ("-h", "--help") for each in arguments):
        sys.stdout.write(usage + "\n" + _settings_help(config))
        return 0
    quiet_libraries()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        work(composed(config, arguments), arguments)
    except SettingError as error:
        return _say(failure_line(error), 2)
    except RunError as error:
        return _say(failure_line(error), 1)
    except KeyboardInterrupt:
        return _say("interrupted: what was read is kept, the same command goes on from there", 130)
    except Exception as error:
        if "debug=true" in [each.lower() for each in arguments]:
            traceback.print_exc()
            return 1
        return _say(f"{failure_line(error)} (unexpected; debug=true shows where)", 1)
    return 0


def composed(config: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Values of a configuration file with what the user typed, as plain containers.

    Raises
    ------
    SettingError
        For an argument that can't be read, or a setting there is not.
    """
    overrides = [_override(argument) for argument in arguments]
    for override in overrides:
        key, value = override.lstrip("+").split("=", 1)
        if key == "model" and value not in choices("model"):
            raise unknown("model", value, choices("model"))
    given = {override.split("=", 1)[0] for override in overrides}
    if "model.path" in given and "model" not in given and LOCAL in choices("model"):
        overrides = [f"model={LOCAL}", *overrides]
    with configuration():
        known = _plain(_composed(config, []))
        for key in given:
            top, _, rest = key.lstrip("+").partition(".")
            if top not in known or (rest and not key.startswith("+") and rest not in known.get(top, {})):
                raise unknown(key, key, [*known, *SHORT])
        return _plain(_composed(config, overrides))


def _override(argument: str) -> str:
    match = re.fullmatch(r"([A-Za-z_][\w.]*)=(.*)", argument, flags=re.DOTALL)
    if match is None:
        raise SettingError(f"{argument}: not understood; allowed: setting=value (see --help)")
    key, value = SHORT.get(match[1], match[1]), match[2]
    if key == LAUNCHER:
        raise SettingError(f"{argument}: there is nothing to launch here; allowed: setting=value (see --help)")
    return f"{added(key)}{key}={verbatim(value) if key in VERBATIM else value}"


def _composed(config: str, overrides: list[str]) -> Any:
    try:
        return compose(config, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        said = (str(error).splitlines() or [""])[0].strip()
        raise SettingError(f"{' '.join(overrides)}: {said}; allowed: see --help") from error


def _plain(config: Any) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key != "hydra"}


def _settings_help(config: str) -> str:
    text = (conf_dir() / f"{config}.yaml").read_text(encoding="utf-8")
    lines = [f"  model=…  one of {', '.join(choices('model'))}"]
    for name, value, said in re.findall(r"^(\w+): (.+?)  # (.+)$", text, flags=re.MULTILINE):
        lines += [f"  {name}={value}", *textwrap.wrap(said, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    return "\n".join(["Settings", *lines]) + "\n"


def _say(line: str, status: int) -> int:
    sys.stderr.write(line + "\n")
    return status
