"""Jobs of a sweep handed to one of Hydra's launchers: joblib, Ray, submitit."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from chai_eval.cli.configuration import configuration
from chai_eval.cli.console import quiet_libraries
from chai_eval.cli.overrides import Job
from chai_eval.errors import RunError, SettingError, failure_line
from chai_eval.run import Report, attempt, failure
from chai_eval.schema import read
from chai_eval.session import Session
from chai_eval.settings import Settings


def launch(jobs: Sequence[Job]) -> list[Report]:
    """Run each job in a process of its own and wait for all of them.

    Raises
    ------
    SettingError
        Where the launcher isn't installed.
    RunError
        Where the launcher itself fails; what its jobs had scored is kept.
    """
    name = jobs[0].launcher
    extra = name.partition("_")[0]
    if find_spec("hydra_plugins") is None or find_spec(f"hydra_plugins.hydra_{extra}_launcher") is None:
        raise SettingError(
            f"launcher: {name!r} given, which isn't installed; allowed: basic, or pip install 'chai-eval[{extra}]'"
        )
    overrides = [[each for each in job.overrides if not each.startswith("hydra")] for job in jobs]
    shared = [each for each in jobs[0].overrides if each.startswith("hydra")]
    with configuration():
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        # The results folder of the first job is where launchers keep their own files.
        try:
            config = hydra.compose_config("config", [*overrides[0], *shared], run_mode=RunMode.MULTIRUN)
        except (HydraException, OmegaConfBaseException) as error:
            raise SettingError(f"hydra.launcher: {failure_line(error)}; allowed: its settings in conf/hydra") from error
        context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(config))
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=context, task_function=launched_job, config=config
        )
        try:
            returned = launcher.launch(overrides, initial_job_idx=0)
        except Exception as error:
            raise RunError(f"launcher={name}: {failure_line(error)}") from error
    return [_report(each) for each in returned]


def launched_job(config: DictConfig) -> Report:
    """What a launcher runs in its process."""
    quiet_libraries()
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return attempt(read(Settings, {str(key): value for key, value in plain.items()}), Session())


def _report(returned: JobReturn) -> Report:
    try:
        return returned.return_value
    except Exception as error:
        return Report(failures=(failure("", error),))
