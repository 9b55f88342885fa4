"""What a run shows on Weights & Biases. Whatever goes wrong there, the training goes on.

Everything that is sent also lies in the run directory: figures in ``metrics.jsonl``, samples and
tree beside it, and wandb's own transaction log below ``wandb/``, which ``wandb sync`` uploads.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specheads.config import LogConfig
from specheads.runs.directory import read_rows
from specheads.system.files import write_whole

_START = 30.0  # seconds for the server to answer at the start; wandb's own limit is 90
# seconds for the rest of the upload at the end; torchrun kills 30 after it passed a SIGTERM on
_FINISH, _FINISH_ARTIFACTS = 20.0, 900.0

# one panel for all heads: metric -> panel and line
_LINE = re.compile(
    r"train/head_(?P<head>\d+)/(?P<panel>loss|top1)"
    r"|eval/(?:tree|chain)/(?P<at>t[\d.]+)/(?:head|depth)_(?P<depth>\d+)/acceptance"
)
_POINTS = 500  # of a line in such a panel; the single metrics have all

Row = Mapping[str, Any]


def wanted_mode(setting: str) -> str:
    """Return ``online``, ``offline``, ``disabled`` or ``auto`` for ``log.wandb``.

    ``auto`` follows ``WANDB_MODE`` where that is set; any other setting outweighs it.
    """
    if setting != "auto":
        return setting
    mode = os.environ.get("WANDB_MODE", "") or "auto"
    return {"run": "online", "dryrun": "offline"}.get(mode, mode)


def has_credentials(base_url: str) -> bool:
    """Return whether the environment, or what ``wandb login`` wrote, has a key for ``base_url``."""
    from requests.utils import get_netrc_auth  # wandb brings it

    given = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
    return bool(given or get_netrc_auth(base_url))


def run_id(run_dir: Path) -> str:
    """Return the run's name on the server, chosen once and on disk before it is used.

    A run that is killed while it registers must come back under the same name.
    """
    place = run_dir / "wandb" / "id"
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, secrets.token_hex(4))
    return place.read_text().strip()


def head_lines(rows: Sequence[Row]) -> dict[str, dict[str, tuple[list[int], list[float]]]]:
    """Return panel -> head -> steps and values, from rows of ``metrics.jsonl``.

    ``heads/loss`` and ``heads/top1`` while training, ``heads/acceptance`` at the first temperature
    of the evaluations. A line of many points is thinned evenly; its last point stays.
    """
    lines: dict[str, dict[str, tuple[list[int], list[float]]]] = {}
    first = None
    for row in rows:
        for key, value in row.items():
            if not (found := _LINE.fullmatch(key)):
                continue
            first = first or found["at"]
            if found["at"] in (None, first):
                panel = lines.setdefault(f"heads/{found['panel'] or 'acceptance'}", {})
                name = f"head {found['head'] or found['depth']}"
                steps, values = panel.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(value)
    for heads in lines.values():
        for name, (steps, values) in heads.items():
            stride = -(-len(steps) // _POINTS)
            chosen = slice((len(steps) - 1) % stride, None, stride)
            heads[name] = (steps[chosen], values[chosen])
    return lines


def _while_it_runs(method: Callable[..., None]) -> Callable[..., None]:
    """Let a method do nothing once the run is lost, and lose the run where it fails."""

    @functools.wraps(method)
    def sending(self: WandbLog, *given: Any) -> None:
        if self._run is not None:
            with self._guarded("is lost"):
                method(self, *given)

    return sending


class WandbLog:
    """A run on Weights & Biases, or a stand-in that does nothing.

    After the first error nothing more is sent; one line says so, and how to upload later.
    """

    def __init__(
        self,
        cfg: LogConfig,
        name: str,
        run_dir: Path,
        settings: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        """Start or resume the run.

        Args:
            cfg: which mode, project and artifacts.
            name: shown on the server.
            run_dir: gets ``wandb/``.
            settings: shown as the run's config; without secrets.
            say: prints a line.
        """
        self._cfg, self._dir, self._say = cfg, run_dir, say
        self._run: Any = None
        self._offline = True
        self._folder = run_dir / "wandb"  # what wandb sync is to read
        self._asked = cfg.wandb != "auto" or bool(os.environ.get("WANDB_MODE"))
        mode = wanted_mode(cfg.wandb)
        if mode == "disabled":
            return
        try:
            import wandb
        except ImportError:
            say(
                "wandb is not installed (pip install 'specheads[wandb]'); metrics go to"
                " metrics.jsonl only"
            )
            return
        self._wandb = wandb
        if mode == "auto":
            base_url = wandb.setup(settings=wandb.Settings(silent=True)).settings.base_url
            mode = "online" if has_credentials(base_url) else "offline"
        with self._guarded("does not start" if mode == "offline" else "cannot be reached"):
            self._start(mode, name, settings)
        if self._run is None and mode != "offline":
            self._asked = True
            with self._guarded("does not start offline either"):
                self._start("offline", name, settings)
        if self._run is not None and not self._offline:
            self._say(f"Weights & Biases: {self._run.url}")

    def _start(self, mode: Any, name: str, settings: Mapping[str, Any]) -> None:
        wait = _FINISH if self._cfg.artifacts == "none" else _FINISH_ARTIFACTS
        given = {
            "console": "off",
            "silent": True,
            "init_timeout": float(os.environ.get("WANDB_INIT_TIMEOUT", _START)),
            "finish_timeout": wait,
            "finish_timeout_raises": True,
            # wandb's own record holds the command line as it was typed; ours stands in the config
            "x_disable_meta": True,
            "x_save_requirements": False,
            "disable_git": True,
        }
        known = self._wandb.Settings.model_fields  # older releases lack some
        run = self._wandb.init(
            project=self._cfg.project,
            name=name,
            dir=str(self._dir),
            mode=mode,
            id=run_id(self._dir),
            resume="allow",
            config=dict(settings),
            allow_val_change=True,  # a resumed run may differ in max_steps and the like
            settings=self._wandb.Settings(**{k: v for k, v in given.items() if k in known}),
        )
        run.define_metric("*", step_metric="step")
        for key, best in (("eval/accept_length", "max"), ("train/loss", "min")):
            run.define_metric(key, step_metric="step", summary=best)
        self._run, self._offline = run, mode == "offline"
        if not self._offline:
            self._folder = Path(run.settings.sync_dir)

    @contextlib.contextmanager
    def _guarded(self, problem: str) -> Iterator[None]:
        try:
            yield
        # an onlooker must not end the training, and wandb's errors are no closed set: its own,
        # those of its service's pipes, of its mailbox, of the network
        except Exception as error:
            self._run = None
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            self._say(
                f"Weights & Biases {problem} ({reason}); the run goes on, its metrics are in "
                f"{self._dir / 'metrics.jsonl'}; later: {self.sync_command}"
            )
            # else wandb's exit hook prints the same error again, as a traceback; and its service
            # would refuse this run's name to an offline start
            with contextlib.suppress(Exception):
                self._wandb.teardown(exit_code=1)

    @property
    def sync_command(self) -> str:
        """The command that uploads what this run kept on disk."""
        return f"wandb sync {'' if self._offline else '--include-online '}{self._folder}"

    @_while_it_runs
    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Send figures of a step.

        After a resume, steps that the server has are taken again with the same figures, and left
        out; figures added to the last of them, as at the end of a run, come one step later.
        """
        if values and step + 1 >= self._run.step:
            self._run.log({"step": step, **values}, step=max(step, self._run.step))

    @_while_it_runs
    def charts(self, step: int, metrics: Path) -> None:
        """Send the panels in which all heads share the axes, of the rows in ``metrics``."""
        found, plot = {}, self._wandb.plot.line_series
        for panel, heads in head_lines(read_rows(metrics)).items():
            steps, values = zip(*heads.values(), strict=True)
            found[panel] = plot(steps, values, keys=list(heads), title=panel, xname="step")
        self.log(step, found)

    @_while_it_runs
    def outcome(self, step: int, samples: Sequence[Row], tree_svg: str) -> None:
        """Send the table of samples and the picture of the tree."""
        shown: dict[str, Any] = {}
        if samples:
            columns = list(samples[0])
            cells = [[row[key] for key in columns] for row in samples]
            data = [[" ".join(map(str, x)) if isinstance(x, list) else x for x in y] for y in cells]
            shown["samples"] = self._wandb.Table(columns=columns, data=data)
        if tree_svg:
            shown["tree"] = self._wandb.Html(tree_svg, inject=False, data_is_not_path=True)
        self.log(step, shown)

    @_while_it_runs
    def export(self, folder: Path) -> None:
        """Send what users load, with ``log.artifacts=export``."""
        if self._cfg.artifacts != "none" and folder.is_dir():
            artifact = self._wandb.Artifact(f"export-{self._run.id}", type="export")
            artifact.add_dir(str(folder), policy="immutable")
            self._run.log_artifact(artifact, aliases=["latest", "export"])

    def close(self, *, failed: bool, interrupted: bool) -> None:
        """Wait for the upload, within bounds, and say how to upload what is left."""
        if self._run is None:
            return
        with self._guarded("did not take everything"):
            if interrupted:
                self._run.mark_preempting()  # shown as such, not as crashed
            self._run.finish(exit_code=int(failed))
        if self._run is not None and self._offline and self._asked:
            self._say(f"Weights & Biases was offline; to upload: {self.sync_command}")
        self._run = None
