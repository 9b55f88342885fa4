"""Write an export in a foreign format: what it needs is loaded, checked, and written whole.

A draft model as a plain Hugging Face folder, which every engine with a draft slot loads.

What follows a written folder: its card, the commands that serve it, and the upload if asked.

Upload a written folder to the hub: ``push=organisation/name``.

The token comes from the environment or from ``hf auth login``, never from a setting, which would
stand in shell histories and in what a run writes about itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from specheads.config import ConfigError
from specheads.formats.medusa import check_parallel, check_v1, check_v2, place_of_base
from specheads.system.files import whole_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from specheads.models.heads import MedusaHeads
    from specheads.models.output import OutputLayer
import re

from specheads.config import RunError
from specheads.formats import card
from specheads.formats.serving import commands, lines
from specheads.models.base import load_base_model, load_config, load_tokenizer
from specheads.models.checkpoint import save_plain_model
from specheads.models.draft import save_draft
from specheads.models.manifest import first_line, read_provenance
from specheads.models.names import is_hub_error

MEDUSA = ("vllm_medusa", "fasterdecoding_v1", "fasterdecoding_v2", "merged")
MTP = ("hf", "mtp_standard")
HOLDING = {"medusa": MEDUSA, "mtp": MTP}  # by the kind of heads; no format holds other kinds


def check_form(form: str, checkpoint: str | Path, info: dict[str, Any]) -> None:
    """Refuse what ``form`` cannot hold, from config.json alone.

    Args:
        form: a format of heads, or ``plain``.
        checkpoint: the export.
        info: what its config.json holds.

    Raises:
        ConfigError: one line with what is in the way.
    """
    if form in MTP and form not in HOLDING.get(info["kind"], ()):
        raise ConfigError(f"format={form} is for MTP heads, {checkpoint} is {info['kind']}")
    if form == "draft":
        raise ConfigError(
            f"format=draft is for draft models, {checkpoint} is {info['kind']}; plain writes its"
            " base model"
        )
    if form not in MEDUSA:
        return
    check_parallel(form, checkpoint, info)
    if form == "fasterdecoding_v2":
        check_v2(checkpoint, info)
    elif form != "vllm_medusa":
        check_v1(form, checkpoint, info)


def write(
    form: str, checkpoint: str, output: Path, info: dict[str, Any], dtype: str | None
) -> list[str]:
    """Write an export in ``form``, whole or not at all.

    Args:
        form: that ``check_form`` has nothing against.
        checkpoint: the export.
        output: a new folder.
        info: what the export's config.json holds.
        dtype: of the written tensors; None keeps theirs.

    Returns:
        What the user has to know, in lines.

    Raises:
        ConfigError: if the base cannot be loaded, or the format cannot hold these heads.
        RunError: if the disk is full.
    """
    if form in MEDUSA:
        return _medusa(form, checkpoint, output, info, dtype)
    if form == "vllm_custom_class":
        return _custom_class(checkpoint, output, info, dtype)
    from specheads.formats import mtp_standard
    from specheads.models import mtp_hf
    from specheads.models.checkpoint import load_export, save_plain_model
    from specheads.models.mtp import MtpHeads

    export = load_export(checkpoint, dtype=dtype, device="cpu")
    base, heads, tokenizer = export.base, export.heads, export.tokenizer
    if form == "plain":
        save_plain_model(output, base, tokenizer, dtype=dtype)
        return ["AutoModelForCausalLM.from_pretrained loads it"]
    if form == "hf":
        mtp_hf.write(output, base, cast("MtpHeads", heads), tokenizer)
        return [
            "after `import specheads` AutoModelForCausalLM.from_pretrained loads it, its heads as"
            " model.mtp; without them: mtp_heads=None"
        ]
    mtp_standard.write(output, base, heads, tokenizer)
    after = "" if base.config.model_type in mtp_standard.NATIVE else " after `import specheads`"
    notes = [f"for generate(use_mtp=True) of transformers >= 5.20{after}"]
    if layers := mtp_standard.unlisted_layers(base, heads.num_heads):
        pattern = rf"model\.layers\.({'|'.join(map(str, layers))})\."
        notes.append(
            f"{type(base).__name__} of transformers does not look for layers {layers} by itself;"
            f" first do: model._keys_to_ignore_on_load_unexpected.add(r'{pattern}')"
        )
    return notes


def _custom_class(
    checkpoint: str, output: Path, info: dict[str, Any], dtype: str | None
) -> list[str]:
    """Write settings for vLLM, and the base beside them where the recipe changed it."""
    from specheads.formats import vllm
    from specheads.models.base import torch_dtype
    from specheads.models.checkpoint import load_export

    notes = ["vLLM guesses from the text with it: the heads are not in it"]
    if not info["base"]["tuned"]:
        vllm.write(output)
        return notes
    export = load_export(checkpoint, device="cpu")
    wanted = None if dtype is None else torch_dtype(dtype)
    vllm.write(output, export.base, export.tokenizer, dtype=wanted)
    return [*notes, "the tuned base model lies beside the settings"]


def _medusa(
    form: str, checkpoint: str, output: Path, info: dict[str, Any], dtype: str | None
) -> list[str]:
    from specheads.formats import medusa
    from specheads.models.base import load_tokenizer, torch_dtype
    from specheads.models.checkpoint import load_export, load_heads, save_hf
    from specheads.models.heads import MedusaHeads
    from specheads.models.output import output_layer

    heads = cast(MedusaHeads, load_heads(checkpoint))  # in the precision they are stored in
    wanted = None if dtype is None else torch_dtype(dtype)
    place, tuned = place_of_base(info, output), bool(info["base"]["tuned"])
    if form == "fasterdecoding_v2" and not tuned:  # nothing of the base is in it
        with whole_folder(output) as folder:
            notes = medusa.write_v2(folder, heads, wanted, base=place)
            load_tokenizer(checkpoint).save_pretrained(folder)
        return notes
    export = load_export(checkpoint, device="cpu")
    base, tokenizer, layer = export.base, export.tokenizer, output_layer(export.base)
    with whole_folder(output) as folder:
        if form == "merged":
            return medusa.write_merged(folder, base, heads, layer, tokenizer, wanted)
        if form == "vllm_medusa":
            notes = medusa.write_vllm_medusa(folder, heads, layer, wanted)
        else:
            notes = _original(form, folder, heads, layer, tokenizer, wanted, place)
        if tuned:
            save_hf(folder / "base", base, tokenizer, wanted)
            notes.append(f"these heads belong to the tuned base model, which is in {place}")
    return notes


def _original(
    form: str,
    folder: Path,
    heads: MedusaHeads,
    output: OutputLayer,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype | None,
    base: str,
) -> list[str]:
    """Write a folder that the original repository reads, with the tokenizer as its trainer does."""
    from specheads.formats import medusa

    tokenizer.save_pretrained(folder)
    if form == "fasterdecoding_v1":
        return medusa.write_v1(folder, heads, output, dtype, base=base)
    return medusa.write_v2(folder, heads, dtype, base=base)


def write_draft(
    form: str, checkpoint: str, output: Path, dtype: str | None
) -> tuple[list[str], dict[str, Any]]:
    """Write a draft model again.

    Args:
        form: ``native``, with what specheads knows of its origin; ``draft``, without.
        checkpoint: the draft model's folder.
        output: a new one.
        dtype: of the written tensors; None keeps that of its config.

    Returns:
        What the user has to know, in lines; and what the folder says of its origin.

    Raises:
        ConfigError: if the folder is not whole.
        RunError: if the disk is full.
    """
    info = read_provenance(Path(checkpoint))
    tokenizer = load_tokenizer(checkpoint)
    model = load_base_model(checkpoint, dtype=dtype or recorded_dtype(checkpoint), device="cpu")
    if form == "native":
        base = info["base"]
        save_draft(
            output, model, tokenizer, base_name=base["name"], base_digest=base["digest"],
            base_dtype=base["dtype"], base_revision=base.get("revision"), dtype=dtype,
            training=info["training"], measured=info["measured"],
        )  # fmt: skip
        return ["a draft model, its origin beside it"], info
    save_plain_model(output, model, tokenizer, dtype=dtype)
    trained_for = info["base"]["name"] or "a base model trained from scratch"
    return [f"a draft model for {trained_for}, AutoModelForCausalLM.from_pretrained loads it"], info


def recorded_dtype(name: str) -> str:
    """Return the dtype that a model's config names, float32 where it names none.

    Raises:
        ConfigError: if its config cannot be read.
    """
    config = load_config(name)
    dtype = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    return str(dtype or "float32").removeprefix("torch.")


def finish(
    folder: Path, form: str, info: dict[str, Any], *, push: str = "", private: bool = False
) -> None:
    """Write the card of a folder, print how it is served, and upload it if asked.

    Args:
        folder: that was just written, whole.
        form: its format: ``native``, ``plain``, ``vllm_medusa``, ...
        info: what the config.json of the native export holds that it was made of; of a draft model,
            what its specheads.json holds.
        push: ``organisation/name`` on the hub, see :func:`specheads.formats.write.check`; empty:
            nowhere.
        private: of a repository that is made for it.

    Raises:
        RunError: if the upload fails, or the disk is full; the folder stays.
    """
    card.write(folder, form, info, name=push)
    print("\n".join(lines(commands(form, folder, info))))
    if push:
        where = upload(folder, push, private=private)
        print(f"uploaded to {where}")


_NAME = re.compile(r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?/[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?")
_LONGEST = 96  # characters of a name, as the hub limits it


def check(push: str) -> None:
    """Check the name, and that the hub knows who is asking, before anything is written.

    Args:
        push: ``organisation/name``.

    Raises:
        ConfigError: one line, if the name is none, nobody is logged in, the login is refused, or
            the hub cannot be reached.
    """
    name = push.partition("/")[2]
    if not _NAME.fullmatch(push) or len(push) > _LONGEST or "--" in push or ".." in push:
        raise ConfigError(f"push is {push!r:.120}, expected organisation/name, as the hub has it")
    if name.endswith(".git"):
        raise ConfigError(f"push is {push!r}: a repository's name must not end with .git")
    try:
        _hub().whoami()
    except Exception as error:
        if not is_hub_error(error):
            raise
        raise ConfigError(f"push={push}: {_reason(error)}") from None


def upload(folder: str | Path, push: str, *, private: bool = False) -> str:
    """Make the repository if there is none, and upload a folder in one commit.

    Args:
        folder: whole; it stays as it is.
        push: ``organisation/name``.
        private: of a repository that is made; one that is there stays as it is.

    Returns:
        Where it can be seen.

    Raises:
        RunError: one line, if the hub refuses or cannot be reached.
    """
    hub = _hub()
    try:
        hub.create_repo(push, private=private, repo_type="model", exist_ok=True)
        hub.upload_folder(
            repo_id=push,
            folder_path=str(folder),
            repo_type="model",
            commit_message="Export of specheads",
            ignore_patterns=[".*", "**/.*"],  # what editors and systems leave behind
        )
    except Exception as error:
        if not is_hub_error(error):
            raise
        raise RunError(
            f"{folder} is written, but was not uploaded to {push}: {_reason(error)}"
        ) from None
    return f"https://huggingface.co/{push}"


def _hub() -> Any:
    from huggingface_hub import HfApi

    return HfApi()


def _reason(error: Exception) -> str:
    """Return what went wrong in one line, without what a server says at length."""
    from huggingface_hub.errors import LocalTokenNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, LocalTokenNotFoundError):
        return "nobody is logged in: set HF_TOKEN, or run `hf auth login`"
    if status == 401:
        return "the hub does not accept the token: set HF_TOKEN, or run `hf auth login`"
    if status == 403:
        return "the token may not write there: it needs the write permission for that organisation"
    if status is not None:
        return f"the hub answered {status}"
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"TransportError", "ConnectionError"}:
        return "the hub cannot be reached"
    return first_line(error)
